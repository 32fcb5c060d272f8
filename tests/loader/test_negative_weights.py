"""Weights of negatives are by the user's own ids, or by the name of an array: the same in memory and on parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, Graph
from gnnsys.loader import LinkNeighborLoader, NegativeSampling
from gnnsys.loader.weighted_negatives import NodeDraw
from gnnsys.sampling import DistGraph
from tests.sampling.machines import CITES, WRITES, homogeneous, machines, typed


def weighted(graph: Graph) -> Graph:
    generator = torch.Generator().manual_seed(7)
    for node_type in graph.node_types:
        weight = torch.rand(graph.num_nodes(node_type), generator=generator)
        weight[::3] = 0
        graph.set_node_data("popularity", weight, node_type)
    return graph


def ends(graph: Graph | DistGraph, edge_type: Any, links: Tensor, negatives: Any) -> list[Tensor]:
    """The links of two batches, drawn ones included, by original ids."""
    given = graph.from_original(links, edge_type)
    loader = LinkNeighborLoader(
        graph, [2], edge_label_index=(edge_type, given), neg_sampling=negatives, batch_size=20, seed=5, num_threads=0
    )
    out = []
    for batch in loader:
        src, dst = batch.nodes[edge_type[0]], batch.nodes[edge_type[2]]
        store = batch.edges[edge_type]
        if "edge_label_index" in store:
            pairs = [(src["n_id"][store["edge_label_index"][0]], edge_type[0])]
            pairs.append((dst["n_id"][store["edge_label_index"][1]], edge_type[2]))
        else:
            pairs = [(dst["n_id"][dst["dst_neg_index"].reshape(-1)], edge_type[2])]
        out += [graph.original_ids(ids, t) if isinstance(graph, DistGraph) else ids for ids, t in pairs]
    return out


def test_weights_draw_the_same_negatives_in_memory_and_on_parts(tmp_path: Path) -> None:
    links = torch.randint(0, 40, (2, 40), generator=torch.Generator().manual_seed(1))
    cases = [(weighted(homogeneous()), [EDGE]), (weighted(typed()), [WRITES, CITES])]
    for number, (graph, edge_types) in enumerate(cases):
        with machines(graph, tmp_path / str(number), 2) as (parted, _):
            for edge_type in edge_types:
                src, dst = (graph.node_data[t]["popularity"] for t in (edge_type[0], edge_type[2]))
                expected = {}
                for mode in ("binary", "triplet"):
                    expected[mode] = ends(graph, edge_type, links, NegativeSampling(mode, 2, src, dst))
                    for of in (graph, parted):
                        for given in (
                            (src, dst),
                            ("popularity", "popularity"),
                            (src.numpy(), dst.tolist()),
                            (of.node_data[edge_type[0]]["popularity"], of.node_data[edge_type[2]]["popularity"]),
                        ):
                            found = ends(of, edge_type, links, NegativeSampling(mode, 2, *given))
                            for a, b in zip(found, expected[mode], strict=True):
                                assert torch.equal(a, b), (mode, edge_type, type(of))
                negatives = expected["triplet"][0]
                assert dst[negatives].min() > 0  # no node without weight was drawn


def test_weights_that_cannot_be_drawn_by_are_refused_when_the_loader_is_made(tmp_path: Path) -> None:
    graph = weighted(homogeneous())
    with machines(graph, tmp_path / "parts", 2, machine_of_part=[0, 0]) as (parted,):
        for of in (graph, parted):
            for wrong, match in (
                ("popularty", "dst_weight.*did you mean 'popularity'"),
                (torch.ones(5), "dst_weight must have one entry per node, 120, got"),
                (torch.full((120,), -1.0), "dst_weight must be finite"),
                ("x", "dst_weight must have one entry per node"),
            ):
                with pytest.raises(ValueError, match=match):
                    LinkNeighborLoader(of, [2], edge_label_index=EDGE, neg_sampling=("binary", 1, None, wrong))


def test_a_node_without_weight_is_never_drawn_in_time_neither() -> None:
    """Nodes 0 and 1 are first and have no weight: while there is no other, the earliest that has some stands in."""
    time, weight = torch.tensor([0, 1, 5, 9, 9]), torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0])
    draw = NodeDraw(5, weight, time, "weight")
    for limit, allowed in ((-3, {2}), (0, {2}), (4, {2}), (5, {2}), (9, {2, 3})):
        drawn = draw.draw(50, torch.Generator().manual_seed(0), torch.tensor([limit]))
        assert set(drawn.tolist()) == allowed, limit
