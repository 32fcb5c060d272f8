"""An array of the graph that a batch would overwrite, or hide, is refused when the loader is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gnnsys.graph import EDGE, Graph
from gnnsys.loader import Batch, LinkNeighborLoader, NeighborLoader
from tests.sampling.machines import CITES, homogeneous, machines, typed

NODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "disjoint": {"disjoint": True},
    "timed": {"time_attr": "t", "input_time": torch.zeros(120, dtype=torch.int64)},
}
LINKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "binary": {"neg_sampling": "binary"},
    "triplet": {"neg_sampling": "triplet"},
    "disjoint": {"disjoint": True, "edge_label": torch.zeros(900)},
}


def with_array(graph: Graph, key: Any, name: str) -> Graph:
    if isinstance(key, tuple):
        graph.set_edge_data(name, torch.rand(graph.num_edges(key)), key)
    else:
        graph.set_node_data(name, torch.rand(graph.num_nodes(key)), key)
    return graph


def test_whatever_a_batch_sets_itself_is_refused_as_an_array_of_the_graph() -> None:
    for kind, cases in ((NeighborLoader, NODES), (LinkNeighborLoader, LINKS)):
        for case, options in cases.items():
            plain = homogeneous()
            batch: Batch = next(iter(kind(plain, [2], num_threads=0, **options)))
            own = {"node": set(batch.nodes["node"]) - set(plain.node_data["node"])}
            own[EDGE] = set(batch.edges[EDGE]) - set(plain.edge_data[EDGE])
            assert {"n_id"} <= own["node"] and {"e_id", "edge_index"} <= own[EDGE]
            for key, names in own.items():
                for name in names:
                    graph = with_array(homogeneous(), key, name)
                    with pytest.raises(ValueError, match=rf"array '{name}'.*fetch=\["):
                        kind(graph, [2], **options)
                        raise AssertionError(f"{kind.__name__} with {case} overwrites {name}")
                    left_out = kind(graph, [2], fetch=["x"], num_threads=0, **options)
                    assert torch.equal(next(iter(left_out)).n_id, batch.n_id)


def test_names_of_the_batch_itself_are_refused_where_they_would_hide_an_array() -> None:
    for name in ("num_nodes", "blocks", "to", "keys"):
        with pytest.raises(ValueError, match=f"array '{name}'"):
            NeighborLoader(with_array(homogeneous(), "node", name), [2])


def test_typed_graphs_and_parts_refuse_them_too(tmp_path: Path) -> None:
    for key in ("paper", "author", CITES):
        with pytest.raises(ValueError, match="array 'n_id'"):
            NeighborLoader(with_array(typed(), key, "n_id"), [2], input_nodes="paper")
    with machines(with_array(homogeneous(), "node", "e_id"), tmp_path / "parts", 2, machine_of_part=[0, 0]) as (graph,):
        with pytest.raises(ValueError, match="array 'e_id'"):
            NeighborLoader(graph, [2])
        NeighborLoader(graph, [2], fetch=["x"])


def test_methods_of_a_types_values_are_refused_as_names_and_are_free_in_one_type() -> None:
    """`batch["paper"].values` is a method of dictionaries, whatever array is called so; `batch.values` is none."""
    for name in (n for n in dir(dict) if not n.startswith("_")):
        for key in ("paper", CITES):
            with pytest.raises(ValueError, match=f"array '{name}'"):
                NeighborLoader(with_array(typed(), key, name), [2], input_nodes="paper")
    graph = with_array(homogeneous(), "node", "values")
    batch = next(iter(NeighborLoader(graph, [2], batch_size=4, num_threads=0)))
    assert torch.equal(batch.values, graph.node_data["node"]["values"][batch.n_id])


def test_a_name_of_nodes_and_edges_alike_is_not_guessed() -> None:
    graph = with_array(with_array(homogeneous(), "node", "time"), EDGE, "time")
    batch = next(iter(NeighborLoader(graph, [2], batch_size=4, num_threads=0)))
    assert torch.equal(batch.nodes["node"]["time"], graph.node_data["node"]["time"][batch.n_id])
    assert torch.equal(batch.edges[EDGE]["time"], graph.edge_data[EDGE]["time"][batch.e_id])
    for read in (lambda: batch.time, lambda: batch["time"], lambda: setattr(batch, "time", batch.n_id)):
        with pytest.raises(ValueError, match=r"both have 'time'.*batch.nodes\['node'\].*batch.edges\[\('node', "):
            read()
    assert "time" in batch and set(batch.time_dict) == {"node", EDGE} and "time=" in repr(batch)


def test_names_that_a_loader_does_not_set_are_free() -> None:
    graph = with_array(with_array(homogeneous(), "node", "batch"), EDGE, "edge_label")
    batch = next(iter(NeighborLoader(graph, [2], batch_size=4, num_threads=0)))
    assert torch.equal(batch.batch, graph.node_data["node"]["batch"][batch.n_id])
    assert torch.equal(batch.edge_label, graph.edge_data[EDGE]["edge_label"][batch.e_id])
