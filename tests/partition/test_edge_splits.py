"""Links of a split as constraints of a partition: counted at their destination, by edge type."""

from pathlib import Path

import pytest
import torch

from gnnsys.cli import main
from gnnsys.graph import EdgeType, Graph, save, sbm, typed_graph
from gnnsys.partition import Assigned, PartitionOptions, assign_parts, open_parts, partition_graph
from gnnsys.partition.subpart_loads import loads_of

HOMO = ("node", "to", "node")


def skewed() -> Graph:
    """Three quarters of the links to train on lead to one of four communities; links to validate with, to another."""
    graph = sbm(800, num_classes=4, homophily=0.95)
    to_class = graph.node_data["node"]["y"][graph.edge_index()[1]]
    random = torch.rand(graph.num_edges(), generator=torch.Generator().manual_seed(0))
    graph.set_edge_data("train_mask", random < torch.where(to_class == 0, 0.9, 0.1))
    graph.set_edge_data("val_mask", (random < 0.3) & (to_class == 2))
    return graph


def heaviest_to_average(graph: Graph, assigned: Assigned, mask: str, edge_type: EdgeType = HOMO) -> float:
    """Counted edge by edge: an edge is where its destination is."""
    chosen = graph.edge_data[edge_type][mask].bool()
    subpart = assigned.assignment.subpart[edge_type[2]][graph.edge_index(edge_type)[1][chosen]]
    counts = torch.bincount(subpart.long(), minlength=assigned.assignment.num_subparts)
    return float(counts.max() * counts.numel() / counts.sum())


def test_links_of_a_split_are_even_where_they_are_asked_for_and_not_otherwise():
    graph = skewed()
    without = assign_parts(graph, 4, options=PartitionOptions(balance=["edges"]))
    assert heaviest_to_average(graph, without, "train_mask") > 2
    given = assign_parts(graph, 4, options=PartitionOptions(balance=["edges", "train_edges", "val_edges"]))
    assert not given.shortfalls
    for name in ("train", "val"):
        (balance,) = (b for b in given.balances if b.name == f"{name}_edges:node|to|node")
        assert balance.ratio == pytest.approx(heaviest_to_average(graph, given, f"{name}_mask"))
        assert balance.ratio <= 1.05


def test_links_are_evened_out_for_every_edge_type_that_has_the_mask():
    graph = typed_graph(1600)
    masked = graph.edge_types[:2]
    for edge_type in masked:
        low = graph.edge_index(edge_type)[1] < graph.num_nodes(edge_type[2]) // 3
        columns = torch.stack([low, ~low], dim=1)  # of two splits the first one counts
        graph.set_edge_data("test_mask", columns if edge_type == masked[0] else low, edge_type)
    assigned = assign_parts(graph, 2, 2, options=PartitionOptions(balance=["test_edges"]))
    assert [b.name for b in assigned.balances] == ["nodes", *(f"test_edges:{'|'.join(t)}" for t in masked)]
    assert not assigned.shortfalls
    graph.set_edge_data("test_mask", graph.edge_data[masked[0]]["test_mask"][:, 0].clone(), masked[0])
    for balance, edge_type in zip(assigned.balances[1:], masked, strict=True):
        assert balance.ratio == pytest.approx(heaviest_to_average(graph, assigned, "test_mask", edge_type))


def test_parts_are_counted_again_by_their_own_masks_and_the_command_line_takes_the_name(tmp_path: Path):
    graph = skewed()
    done = partition_graph(graph, 2, tmp_path / "parts", trainers_per_part=2, balance=["train_edges"])
    loads, notes = loads_of(open_parts(tmp_path / "parts"))
    assert not notes
    assert {load.name: (sum(load.subparts), max(load.subparts), load.heaviest_node) for load in loads} == {
        b.name: (b.total, b.heaviest, b.heaviest_node) for b in done.assigned.balances
    }
    save(graph, tmp_path / "saved")
    typed = ["--balance", "train_edges", "--out", str(tmp_path / "typed"), "--trainers-per-part", "2"]
    assert main(["partition", str(tmp_path / "saved"), "--parts", "2", *typed]) == 0
    told = open_parts(tmp_path / "typed").info["balance"]
    assert [entry["name"] for entry in told] == [b.name for b in done.assigned.balances]
    assert all(entry["ratio"] <= 1.05 for entry in told)


def test_a_split_that_no_edge_has_is_named():
    with pytest.raises(ValueError, match="balance 'test_edges' needs edge data called 'test_mask', and no edge type"):
        assign_parts(skewed(), 2, options=PartitionOptions(balance=["test_edges"]))


def test_a_mask_that_is_not_of_all_edges_is_refused():
    graph = sbm(40)
    for rows in (graph.num_edges() + 5, graph.num_edges() - 1):
        graph.edge_data[HOMO]["train_mask"] = torch.ones(rows, dtype=torch.bool)  # past what checks it
        with pytest.raises(ValueError, match="must have a row for each of its"):
            assign_parts(graph, 2, options=PartitionOptions(balance=["train_edges"]))
    graph.edge_data[HOMO]["train_mask"] = torch.ones(graph.num_edges(), 0, dtype=torch.bool)
    with pytest.raises(ValueError, match="must have a row for each of its"):
        assign_parts(graph, 2, options=PartitionOptions(balance=["train_edges"]))
