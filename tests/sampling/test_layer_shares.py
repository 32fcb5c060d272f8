"""Sums of shares by source: against their definition, on parts over real connections, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.comm import Kind, Request
from gnnsys.graph import EDGE, NODE, Graph, NodeType
from gnnsys.ops import CSC
from gnnsys.partition import open_parts, relabel
from gnnsys.sampling import FastGCNSampler, GraphService, LadiesSampler, SampleKey, layer_shares
from gnnsys.sampling.layer_shares import WITH_SOURCES, LayerShares, _read_piece, _SharePiece, _Total
from gnnsys.sampling.layer_shares import layer_shares as shares_of
from tests.sampling import machines as machines_module
from tests.sampling.machines import assert_same_sample, homogeneous, machines, to_global

KEY = SampleKey(seed=3, epoch=1, batch=4)
SEEDS: dict[NodeType, Tensor] = {NODE: torch.tensor([7, 11, 80, 3, 80, 119])}
LAYER = torch.cat([torch.arange(0, 120, 2), torch.tensor([8, 119])])  # one node twice, one without in-edges


def by_original(shares: LayerShares) -> dict[int, int]:
    assert shares.ids.unique().numel() == shares.ids.numel()
    return dict(zip(shares.originals.tolist(), shares.sums.tolist(), strict=True))


@pytest.mark.parametrize("num_nodes", [40, 400])
def test_shares_are_the_squared_norms_of_columns(num_nodes: int) -> None:
    graph = homogeneous(num_nodes, 900)
    csc, nodes = graph.csc(), torch.arange(0, num_nodes, 3)
    found = shares_of(graph, EDGE, nodes)
    expected: dict[int, Fraction] = {}
    for v in nodes.tolist():
        sources = csc.indices[csc.indptr[v] : csc.indptr[v + 1]].tolist()
        for u in sources:
            expected[u] = expected.get(u, Fraction(0)) + Fraction(1, len(sources) ** 2)
    total = sum(expected.values())
    ours = by_original(found)
    assert set(ours) == set(expected)
    for u, share in expected.items():
        assert float(Fraction(ours[u], sum(ours.values())) / (share / total)) == pytest.approx(1, rel=1e-12)
    assert torch.equal(found.degrees, csc.in_degrees()[nodes])


def test_seeds_that_repeat_count_as_often_as_they_come(tmp_path: Path) -> None:
    """Two edges alone: what stands for 1 is large, and eight times that is more than sums have room for."""
    graph = Graph.from_edge_index(torch.tensor([[2, 3], [0, 1]]), 4)
    with machines(graph, tmp_path / "p", 2) as graphs:
        for times in (1, 2, 3, 8, 50):
            seeds = torch.tensor([0] * times + [1])
            expected = by_original(shares_of(graph, EDGE, seeds))
            assert expected[2] == times * expected[3] > 0 and sum(expected.values()) < layer_shares.SUM_END
            for mine in graphs:
                assert by_original(shares_of(mine, EDGE, mine.global_ids(seeds))) == expected
            sample = LadiesSampler(graph, [2 * times]).sample({NODE: seeds}, key=KEY)
            assert sample.blocks[0].csc[EDGE].num_edges >= times


@pytest.mark.parametrize("num_parts", [1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def test_parts_add_up_to_what_one_process_has(tmp_path: Path, num_parts: int, monkeypatch) -> None:
    graph = homogeneous()
    expected = shares_of(graph, EDGE, LAYER)
    with machines(graph, tmp_path / "p", num_parts) as graphs:
        for chunk in (layer_shares._CHUNK, 7):
            monkeypatch.setattr(layer_shares, "_CHUNK", chunk)
            for mine in graphs:
                found = shares_of(mine, EDGE, mine.global_ids(LAYER))
                assert by_original(found) == by_original(expected) and torch.equal(found.degrees, expected.degrees)
                assert torch.equal(mine.original_ids(found.ids), found.originals)


def test_several_parts_of_a_machine_wide_ids_and_a_deeper_halo_change_nothing(tmp_path: Path, monkeypatch) -> None:
    graph = homogeneous()
    expected = [kind(graph, [25, 20]).sample(SEEDS, key=KEY) for kind in (LadiesSampler, FastGCNSampler)]
    wide = Graph({NODE: 120}, {EDGE: _wide(graph.csc())})
    for kind, sample in zip((LadiesSampler, FastGCNSampler), expected, strict=True):
        csc, other = (s.blocks[0].csc[EDGE] for s in (kind(wide, [25, 20]).sample(SEEDS, key=KEY), sample))
        assert torch.equal(csc.indptr, other.indptr) and torch.equal(csc.edge_ids, other.edge_ids)
    with machines(graph, tmp_path / "p", 4, machine_of_part=[0, 0, 1, 1], halo_hops=2) as graphs:
        for mine in graphs:
            assert_same_sample(LadiesSampler(mine, [25, 20]).sample(to_global(mine, SEEDS), key=KEY), expected[0], mine)
    monkeypatch.setattr(relabel, "INT32_END", 50)  # as if no more than 50 numbers fitted
    with machines(graph, tmp_path / "wide", 3) as graphs:
        for kind, sample in zip((LadiesSampler, FastGCNSampler), expected, strict=True):
            ours = kind(graphs[1], [25, 20]).sample(to_global(graphs[1], SEEDS), key=KEY)
            assert_same_sample(ours, sample, graphs[1])


def _wide(csc: CSC) -> CSC:
    edge_ids = None if csc.edge_ids is None else csc.edge_ids.long()
    return CSC(csc.indptr, csc.indices.long(), csc.num_src, edge_ids)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_layer_of_ladies_is_two_messages_to_every_other_machine(tmp_path: Path, normalize: bool) -> None:
    seen: list[Request] = []
    with machines(homogeneous(), tmp_path / "p", 3, seen=seen) as graphs:
        sampler, seeds = LadiesSampler(graphs[1], [25, 20, 15], normalize=normalize), to_global(graphs[1], SEEDS)
        sampler.sample(seeds, key=KEY)  # the first one has the parts prepared
        seen.clear()
        sampler.sample(seeds, key=SampleKey(batch=5))
        assert sorted(r.kind for r in seen) == 3 * 2 * [Kind.INDUCED] + 3 * 2 * [Kind.SHARES]


def test_answers_are_sums_and_not_edges(tmp_path: Path) -> None:
    """Every other node has an edge from every one of ten: what travels is ten sums."""
    src, dst = torch.meshgrid(torch.arange(10), torch.arange(10, 2010), indexing="ij")
    graph = Graph.from_edge_index(torch.stack([src.reshape(-1), dst.reshape(-1)]), 2010)
    with machines(graph, tmp_path / "p", 2) as graphs:
        mine = graphs[0]
        found = shares_of(mine, EDGE, mine.global_ids(torch.arange(10, 2010)))
        assert found.ids.numel() == 10
        there = mine.parts.part(1).num_core(NODE)
        bytes_in = mine.client.counters()["kinds"]["SHARES"]["bytes_in"]
        assert 4 * there - 40 < bytes_in < 4 * there + 2000  # degrees, and next to nothing; edges would be 80 * there


def test_a_server_that_was_started_again_is_prepared_again(tmp_path: Path, monkeypatch) -> None:
    services: list[GraphService] = []

    def made(*args) -> GraphService:
        services.append(GraphService(*args))
        return services[-1]

    monkeypatch.setattr(machines_module, "GraphService", made)
    graph = homogeneous()
    expected = LadiesSampler(graph, [25, 20]).sample(SEEDS, key=KEY)
    with machines(graph, tmp_path / "p", 2) as graphs:
        sampler = LadiesSampler(graphs[0], [25, 20])
        for _ in range(2):
            assert_same_sample(sampler.sample(to_global(graphs[0], SEEDS), key=KEY), expected, graphs[0])
            assert services[1].views.has(WITH_SOURCES)
            services[1].views._views.pop(WITH_SOURCES.key)


@pytest.mark.parametrize(
    ("head", "nodes", "said"),
    [
        ([WITH_SOURCES.key, 0, 0, 2], [0, 1, 2], "2 nodes are announced, 3 came"),
        ([WITH_SOURCES.key, 0, 0, 3], [0, 1, 200], "seeds of part 0 must be in"),
        ([WITH_SOURCES.key, 0, 0, 3], [0, 1, -1], "seeds of part 0 must be in"),
        ([WITH_SOURCES.key, 0, 1, 3], [0, 1, 2], "part 1 is not here"),
        ([WITH_SOURCES.key, 1, 0, 3], [0, 1, 2], "edge type must be in"),
        ([WITH_SOURCES.key, 0, 0, -3], [], "counts must not be negative"),
        ([WITH_SOURCES.key, 0, 0], [0, 1, 2], "two numbers, then a part and a count"),
        ([0, 0, 0, 3], [0, 1, 2], "need a view that knows the original ids"),
        ([5, 0, 0, 3], [0, 1, 2], "was not prepared"),
    ],
)
def test_a_request_that_does_not_add_up_is_refused(
    tmp_path: Path, head: list[int], nodes: list[int], said: str
) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        service = GraphService(open_parts(tmp_path / "p"), [0])
        halo = {w: graphs[0].original_ids(ids) for w, ids in service.views.wanted(WITH_SOURCES).items()}
        service.views.prepare(WITH_SOURCES, halo)
        with pytest.raises(ValueError, match=said):
            arrays = [torch.tensor(head), torch.tensor([1]), torch.tensor(nodes, dtype=torch.int32)]
            list(service.shares(Request.local(Kind.SHARES, arrays)))
        nodes_of_part = torch.arange(3, dtype=torch.int32)
        for most_often in ([], [1, 1], [0], [-1], [1 << 61]):
            arrays = [torch.tensor([WITH_SOURCES.key, 0, 0, 3]), torch.tensor(most_often).long(), nodes_of_part]
            with pytest.raises(ValueError, match=r"how often|cannot be added up"):
                list(service.shares(Request.local(Kind.SHARES, arrays)))


def test_an_answer_that_does_not_add_up_is_refused() -> None:
    none, no_degrees = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    two, order = torch.tensor([1, 2]), torch.arange(5)
    for piece, said in (
        (_SharePiece(4, two.int(), none, none, none), "degrees from node 4 on"),
        (_SharePiece(-1, two.int(), none, none, none), "degrees from node -1 on"),
        (_SharePiece(0, two, none, none, none), "degrees must be int32"),
        (_SharePiece(0, two.int() - 2, none, none, none), "not negative"),
        (_SharePiece(0, no_degrees, two, two, none), "2 sources have 2 original ids and 0 sums"),
        (_SharePiece(0, no_degrees, two, two, two.double()), "must be integers"),
        (_SharePiece(0, no_degrees, two + 0.7, two, two), "must be integers"),
        (_SharePiece(0, no_degrees, two, two + 0.7, two), "must be integers"),
        (_SharePiece(0, no_degrees, two, two + 9, two), r"must be in \[0, 10\)"),
        (_SharePiece(0, no_degrees, two - 2, two, two), r"must be in \[0, 10\)"),
        (_SharePiece(0, no_degrees, two * 0, two, two), "has a source of part 3 twice"),
        (_SharePiece(0, no_degrees, two, two, two - 1), "must be positive"),
        (_SharePiece(0, no_degrees, two, two, two - 4), "must be positive"),
        (_SharePiece(0, no_degrees, two, two, two * 0 + 2**61), "less than 2\\^62"),
        (_SharePiece(0, no_degrees, two, two, two * 0 + 2**63 - 1), "less than 2\\^62"),
    ):
        with pytest.raises(ValueError, match=said):
            _Total(10, 5).add(3, order, piece)
    for arrays in ([two] * 4, [none, two, two, two, two]):
        with pytest.raises(ValueError, match="five vectors"):
            _read_piece(arrays, 1)
    with pytest.raises(ValueError, match="of part 1 of 1"):
        _read_piece([torch.tensor([1, 0]), two, two, two, two], 1)
    with pytest.raises(ValueError, match="must be int64"):
        _read_piece([torch.tensor([0.0, 0.0]), two, two, two, two], 1)


def test_answers_that_do_not_go_together_are_refused() -> None:
    none, no_degrees = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    two, order = torch.tensor([1, 2]), torch.arange(3)
    total = _Total(10, 3)
    total.add(0, order, _SharePiece(1, two.int(), two, two, two))
    for part, piece, said in (
        (0, _SharePiece(3, no_degrees, two[1:], two[1:], two[1:]), "has a source of part 0 twice"),
        (1, _SharePiece(0, two.int(), none, none, none), "came twice"),
        (1, _SharePiece(3, no_degrees, two, two + 1, two), "two original ids"),
    ):
        with pytest.raises(ValueError, match=said):
            total.add(part, order, piece)
    total = _Total(10, 3)
    total.add(0, order, _SharePiece(1, two.int(), two, two, two))
    total.add(1, order, _SharePiece(3, no_degrees, two, two, two * 0 + 2**60))
    with pytest.raises(ValueError, match="degrees of 1 of 3 nodes did not come"):
        total.whole()
    total.add(1, order, _SharePiece(0, two[:1].int(), none, none, none))  # chunks may come in any order
    assert total.whole().degrees.tolist() == [1, 1, 2] and total.whole().sums.tolist() == [2**60 + 1, 2**60 + 2]
    with pytest.raises(ValueError, match="less than 2\\^62"):
        total.add(2, order, _SharePiece(3, no_degrees, two[:1], two[:1], two[:1] * 2**61))
