"""Edges among chosen nodes, against every edge of the graph looked at one by one: in memory, and on parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.comm import Kind, Request
from gnnsys.graph import EDGE, NODE, EdgeType, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.ops import CSC, draw_below
from gnnsys.ops import edges_within as csc_edges_within
from gnnsys.partition import open_parts
from gnnsys.sampling import (
    GraphService,
    NeighborSampler,
    SampleKey,
    WithinRequest,
    edges_within,
    induced,
    inner_edges,
    neighborhoods,
)
from gnnsys.sampling.edges_within import _by_lookup
from gnnsys.sampling.hop_message import InnerDraw, InnerRequest, Slot, SourceList
from tests.sampling.machines import CITES, WRITES, assert_same_sample, homogeneous, machines, to_global, typed

KEY = SampleKey(seed=3, epoch=1, batch=4)


def by_hand(graph: Graph, r: WithinRequest) -> list[list[tuple[int, int]]]:
    """Of each destination its (place of the source, position), by looking at every in-edge."""
    csc, excluded = graph.csc(r.edge_type), set() if r.exclude is None else set(r.exclude.tolist())
    src = r.src.tolist()
    listed = list(zip([0] * len(src) if r.src_tree is None else r.src_tree.tolist(), src, strict=True))
    found = []
    for number, node in enumerate(r.dst.tolist()):
        tree = 0 if r.dst_tree is None else int(r.dst_tree[number])
        columns = range(int(csc.indptr[node]), int(csc.indptr[node + 1]))
        ends = [((tree, int(csc.indices[p])), p) for p in columns if p not in excluded]
        found.append([(listed.index(end), p) for end, p in ends if end in listed])
    return found


def as_lists(indptr: Tensor, places: Tensor, positions: Tensor) -> list[list[tuple[int, int]]]:
    pairs = list(zip(places.tolist(), positions.tolist(), strict=True))
    ends = indptr.tolist()
    return [pairs[begin:end] for begin, end in pairwise(ends)]


def lists(num_src: int, num_dst: int, edge_type: EdgeType, *, trees: bool, seed: int = 0) -> WithinRequest:
    """Some nodes twice; without trees and with."""
    g = torch.Generator().manual_seed(seed)
    dst, src = torch.randint(0, num_dst, (30,), generator=g), torch.randint(0, num_src, (45,), generator=g)
    if not trees:
        return WithinRequest(edge_type, dst, src)
    of_dst, of_src = torch.randint(0, 4, (30,), generator=g), torch.randint(0, 4, (45,), generator=g)
    return WithinRequest(edge_type, dst, src, of_dst, of_src)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("trees", [False, True])
def test_the_op_finds_what_is_found_by_hand(dtype: torch.dtype, trees: bool) -> None:
    graph = homogeneous()
    csc = graph.csc()
    graph = Graph({NODE: 120}, {EDGE: CSC(csc.indptr, csc.indices.to(dtype), 120)})
    exclude = torch.arange(0, 900, 3)
    for seed in range(5):
        for without in (None, exclude):
            r = lists(120, 120, EDGE, trees=trees, seed=seed)._replace(exclude=without)
            expected = by_hand(graph, r)
            assert sum(map(len, expected)) > 3
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                try:
                    (found,) = inner_edges(graph, [r])
                finally:
                    torch.set_num_threads(1)
                assert as_lists(*found) == expected


@pytest.mark.parametrize("trees", [False, True])
def test_what_a_device_does_finds_the_same(trees: bool) -> None:
    """All in-edges gathered, then looked up: the way of a device, on the host."""
    graph = homogeneous()
    for without in (None, torch.arange(0, 900, 3)):
        r = lists(120, 120, EDGE, trees=trees)._replace(exclude=without)
        (found,), (expected,) = _by_lookup(graph, neighborhoods(graph), [r]), inner_edges(graph, [r])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_op_refuses_what_does_not_fit() -> None:
    csc, one = homogeneous().csc(), torch.tensor([0])
    with pytest.raises(ValueError, match=r"dst must be in \[0, 120\)"):
        csc_edges_within(csc, torch.tensor([120]), one)
    with pytest.raises(ValueError, match="go together"):
        csc_edges_within(csc, one, one, dst_tree=one)
    with pytest.raises(ValueError, match="entry per node"):
        csc_edges_within(csc, one, one, dst_tree=one, src_tree=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="dst_tree must be in"):
        csc_edges_within(csc, one, one, dst_tree=torch.tensor([-1]), src_tree=one)
    with pytest.raises(ValueError, match="below 2"):
        csc_edges_within(csc, one, torch.tensor([1 << 41]))
    with pytest.raises(ValueError, match="exclude must ascend"):
        csc_edges_within(csc, one, one, exclude=torch.tensor([3, 1]))
    assert csc_edges_within(csc, torch.arange(50), torch.tensor([-1, -7])).places.numel() == 0


def test_numbers_drawn_below_a_bound_are_uniform_and_depend_on_key_and_id_alone() -> None:
    ids = torch.arange(70_000)
    drawn = draw_below(ids, 7, key=5)
    counts = torch.bincount(drawn, minlength=7).double()
    assert float(((counts - 1e4) ** 2 / 1e4).sum()) < 30  # chi square with 6 degrees of freedom
    order = torch.randperm(70_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw_below(order.int(), 7, key=5), drawn[order])
    assert not torch.equal(draw_below(ids, 7, key=6), drawn)


LONG = [pytest.param(number, marks=pytest.mark.long) for number in (2, 3)]  # of parts


@pytest.fixture(scope="module", params=[1, *LONG, 4])
def parted(request, tmp_path_factory) -> Iterator[tuple]:
    graph, seen = homogeneous(), list[Request]()
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", request.param, seen=seen) as graphs:
        yield graph, graphs, seen


@pytest.mark.parametrize("trees", [False, True])
def test_every_machine_finds_the_edges_of_the_whole_graph(parted, trees: bool) -> None:
    graph, graphs, _ = parted
    r = lists(120, 120, EDGE, trees=trees)
    (expected,) = inner_edges(graph, [r])
    for mine in graphs:
        ours = r._replace(dst=mine.global_ids(r.dst), src=mine.global_ids(r.src))
        (found,) = inner_edges(mine, [ours])
        assert torch.equal(found.indptr, expected.indptr) and torch.equal(found.places, expected.places)
        edge_ids = graph.csc().edge_ids
        assert torch.equal(mine.original_edge_ids(found.positions), edge_ids[expected.positions].long())


def test_edges_into_some_nodes_from_others_are_asked_for_with_one_message_each(parted) -> None:
    graph, graphs, seen = parted
    dst, src = torch.arange(0, 100), torch.arange(40, 80)
    expected = edges_within(graph, dst, src)
    for mine in graphs:
        ours = mine.global_ids(dst), mine.global_ids(src)
        seen.clear()
        found = edges_within(mine, *ours)
        assert [request.kind for request in seen] == [Kind.INDUCED] * (len(graphs) - 1)
        assert torch.equal(found.indptr, expected.indptr)
        assert torch.equal(mine.original_ids(found.ids), expected.ids)


def test_an_answer_has_no_edge_from_outside_the_list(parted) -> None:
    """What is answered is what is kept: no neighbour travels to be dropped."""
    _, graphs, _ = parted
    mine = graphs[0]
    before = mine.client.counters()["kinds"].get("INDUCED", {}).get("bytes_in", 0)
    edges_within(mine, torch.arange(120), torch.empty(0, dtype=torch.int64))
    after = mine.client.counters()["kinds"].get("INDUCED", {}).get("bytes_in", 0)
    assert after - before < 1500 * len(graphs)  # 900 edges with 8 bytes each would be more


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=["shared", "trees"])
def test_induced_samples_of_parts_are_those_of_one_process(parted, options: dict) -> None:
    graph, graphs, _ = parted
    seeds = {NODE: torch.tensor([7, 11, 80, 3, 80, 119])}
    expected = induced(NeighborSampler(graph, [4, 3], **options).sample(seeds, key=KEY), graph)
    assert expected.row[EDGE].numel() > 50
    for mine in graphs:
        sample = NeighborSampler(mine, [4, 3], **options).sample(to_global(mine, seeds), key=KEY)
        assert_same_sample(induced(sample, mine), expected, mine)


def test_typed_induced_samples_of_parts_are_those_of_one_process(tmp_path: Path) -> None:
    graph = typed()
    seeds = {"paper": torch.tensor([5, 60, 2, 5])}
    whole = NeighborSampler(graph, [4, 3], disjoint=True)
    expected = induced(whole.sample(seeds, key=KEY), graph)
    assert expected.row[WRITES].numel() and expected.row[CITES].numel()
    with machines(graph, tmp_path / "p", 3) as graphs:
        for mine in graphs:
            sample = NeighborSampler(mine, [4, 3], disjoint=True).sample(to_global(mine, seeds), key=KEY)
            assert_same_sample(induced(sample, mine), expected, mine)


def test_excluded_edges_are_not_among_induced_ones_on_parts_either(parted) -> None:
    graph, graphs, _ = parted
    seeds = {NODE: torch.arange(0, 60)}
    edges = graph.edge_index()[:, ::2]
    whole = NeighborSampler(graph, [2])
    sample = whole.sample(seeds, key=KEY)
    without = induced(sample, graph, {EDGE: whole.find_edges(EDGE, *edges)})
    assert 0 < without.row[EDGE].numel() < induced(sample, graph).row[EDGE].numel()
    for mine in graphs:
        ours = NeighborSampler(mine, [2])
        exclude = {EDGE: ours.find_edges(EDGE, mine.global_ids(edges[0]), mine.global_ids(edges[1]))}
        assert_same_sample(induced(ours.sample(to_global(mine, seeds), key=KEY), mine, exclude), without, mine)


def test_disjoint_induced_batches_have_every_edge_inside_a_tree_and_none_between_trees() -> None:
    graph = homogeneous()
    pairs = graph.edge_index()
    for batch in NeighborLoader(graph, [3, 2], batch_size=8, disjoint=True, subgraph_type="induced"):
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
        for tree in range(batch.batch_size):
            nodes = batch.n_id[batch.batch == tree]
            inside = torch.isin(pairs[0], nodes) & torch.isin(pairs[1], nodes)
            own = batch.batch[batch.edge_index[1]] == tree
            assert sorted(batch.e_id[own].tolist()) == inside.nonzero().view(-1).tolist()
            ends = batch.n_id[batch.edge_index[:, own]]
            assert torch.equal(ends, pairs[:, batch.e_id[own]])


def message(**changes) -> InnerRequest:
    ids = torch.tensor([0, 1], dtype=torch.int32)
    fields = {"parts": [0], "slots": [Slot([2], ids, None, None)], "sources": [SourceList(ids, None)]}
    return InnerRequest(**{**fields, "draws": [InnerDraw(0, 0, 0, [None])], **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts": [1]}, "part 1 is not here"),
        ({"draws": [InnerDraw(4, 0, 0, [None])]}, "edge type must be in"),
        ({"draws": [InnerDraw(0, 1, 0, [None])]}, "names slot 1 of 1"),
        ({"draws": [InnerDraw(0, 0, -1, [None])]}, "list -1 of 1"),
        ({"slots": [Slot([2], torch.tensor([0, 99], dtype=torch.int32), None, None)]}, "destinations of part 0"),
        ({"sources": [SourceList(torch.tensor([0.5]), None)]}, "sources must be int32 or int64"),
        ({"sources": [SourceList(torch.tensor([0]), torch.tensor([0]))]}, "both have trees, or neither"),
    ],
)
def test_a_request_that_does_not_add_up_is_refused(tmp_path: Path, changes: dict, said: str) -> None:
    with machines(homogeneous(), tmp_path / "p", 2):
        service = GraphService(open_parts(tmp_path / "p"), [0])
        with pytest.raises(ValueError, match=said):
            list(service.induced(Request.local(Kind.INDUCED, message(**changes).to_arrays())))


def test_a_request_is_read_as_it_was_written() -> None:
    tree = torch.tensor([0, 1])
    asked = message(
        slots=[Slot([2], torch.tensor([3, 4], dtype=torch.int32), tree, None)],
        sources=[SourceList(torch.tensor([5, 6]), tree)],
        draws=[InnerDraw(0, 0, 0, [torch.tensor([1, 8])])],
    )
    read = InnerRequest.from_arrays(asked.to_arrays())
    assert all(torch.equal(a, b) for a, b in zip(read.to_arrays(), asked.to_arrays(), strict=True))
    with pytest.raises(ValueError, match="array too many"):
        InnerRequest.from_arrays([*asked.to_arrays(), tree])
    with pytest.raises(ValueError, match="format"):
        InnerRequest.from_arrays([torch.tensor([7])])
