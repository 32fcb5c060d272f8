"""FastGCN and LADIES against their definitions, in expectation, and on parts over real connections."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gnnsys.comm import Kind, Request
from gnnsys.graph import EDGE, NODE, Graph, NodeType
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.sampling import FastGCNSampler, LadiesSampler, LayerWiseSampler, SampleKey, layer_wise
from gnnsys.sampling.layer_shares import layer_shares as shares_of
from gnnsys.sampling.layer_wise import _draw, _scaled
from tests.sampling.machines import assert_same_sample, homogeneous, machines, to_global, typed
from tests.sampling.test_labor import NUM_COPIES, assert_exact_in_expectation, exact_output, many_outputs

KEY = SampleKey(seed=3, epoch=1, batch=4)
SEEDS: dict[NodeType, Tensor] = {NODE: torch.tensor([7, 11, 80, 3, 80, 119])}
SAMPLERS = [FastGCNSampler, LadiesSampler]


def dense(graph: Graph) -> np.ndarray:
    """P, and how many edges each entry is."""
    csc = graph.csc()
    count = np.zeros((graph.num_nodes(), graph.num_nodes()))
    np.add.at(count, (csc.dst().numpy(), csc.indices.long().numpy()), 1)
    return count


def squared_norms(count: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """q by definition: parallel edges are entries of their own."""
    degree = np.maximum(count.sum(1), 1)
    q = (count[rows] / degree[rows, None] ** 2).sum(0)
    return q / q.sum()


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_layer_is_drawn_and_weighted_as_defined(kind: type[LayerWiseSampler], normalize: bool) -> None:
    graph = homogeneous(60, 500)
    count = dense(graph)
    degree = np.maximum(count.sum(1), 1)
    sample = kind(graph, [40], normalize=normalize).sample({NODE: torch.arange(12)}, key=KEY)
    (block,) = sample.blocks
    csc, node = block.csc[EDGE], sample.node[NODE].numpy()
    src, dst = node[csc.indices.numpy()], csc.dst().numpy()
    q = squared_norms(count, range(60) if kind is FastGCNSampler else range(12))
    drawn = set(src.tolist())
    assert 5 < len(drawn) <= 40 and all(q[u] > 0 for u in drawn)
    for v in range(12):  # every edge between what was drawn and the layer, and no other
        taken = np.bincount(src[dst == v], minlength=60)
        assert all(taken[u] == count[v, u] for u in drawn) and taken.sum() == sum(count[v, u] for u in drawn)
    weight = block.edge_weight[EDGE].double().numpy()
    if normalize:
        sums = np.bincount(dst, weight, minlength=12)
        assert np.allclose(sums[np.bincount(dst, minlength=12) > 0], 1)
    else:
        times = weight * degree[dst] * 40 * q[src]  # how often each source was drawn
        assert np.allclose(times, times.round(), rtol=1e-4) and (times.round() >= 1).all()
        of = dict(zip(src.tolist(), times.round().tolist(), strict=True))
        assert sum(of.values()) <= 40


@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_is_drawn_follows_q(kind: type[LayerWiseSampler]) -> None:
    graph = homogeneous(60, 500)
    seeds = {NODE: torch.arange(60)}  # all rows: both have the same q, and every node that is drawn has an edge
    q = squared_norms(dense(graph), range(60))
    num_keys, number = 100, 400
    sampler, times = kind(graph, [number], normalize=False), np.zeros(60)
    degree = np.maximum(dense(graph).sum(1), 1)
    for batch in range(num_keys):
        sample = sampler.sample(seeds, key=SampleKey(0, 0, batch))
        csc, weight = sample.blocks[0].csc[EDGE], sample.blocks[0].edge_weight[EDGE].double().numpy()
        src = csc.indices.numpy()  # seeds are all nodes in order, so local ids are ids
        found = np.zeros(60)
        found[src] = weight * degree[csc.dst().numpy()] * number * q[src]
        times += found.round()
    assert times.sum() == num_keys * number
    error = np.sqrt(num_keys * number * q * (1 - q)).clip(1e-9)
    assert (np.abs(times - num_keys * number * q) / error).max() < 4


@pytest.mark.parametrize("kind", SAMPLERS)
def test_two_layers_are_exact_in_expectation_without_normalizing(kind: type[LayerWiseSampler]) -> None:
    """Copies share a layer's draws, which makes their mean a little more exact than that of as many samples."""
    graph = homogeneous(60, 900)
    rows = torch.randn(60, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    numbers = [30 * NUM_COPIES, 30 * NUM_COPIES]
    found, _ = many_outputs(lambda all_copies: kind(all_copies, numbers, normalize=False), graph, rows, 20)
    assert_exact_in_expectation(found, exact_output(graph, rows)[:20])


@pytest.mark.parametrize("num_parts", [1, 2, *(pytest.param(number, marks=pytest.mark.long) for number in (3, 4))])
def test_every_machine_samples_what_one_process_samples(tmp_path: Path, num_parts: int) -> None:
    graph = homogeneous()
    with machines(graph, tmp_path / "p", num_parts) as graphs:
        for kind in SAMPLERS:
            for normalize in (True, False):
                expected = kind(graph, [25, 20], normalize=normalize).sample(SEEDS, key=KEY)
                for mine in graphs:
                    sampler = kind(mine, [25, 20], normalize=normalize)
                    assert_same_sample(sampler.sample(to_global(mine, SEEDS), key=KEY), expected, mine)


def test_no_message_of_fastgcn_stands_for_many_edges(tmp_path: Path, monkeypatch) -> None:
    graph = homogeneous()
    expected = FastGCNSampler(graph, [25, 20]).sample(SEEDS, key=KEY)
    largest, seen = int(graph.csc().in_degrees().max()), list[Request]()
    with machines(graph, tmp_path / "p", 2, seen=seen) as graphs:
        mine, (_, other) = graphs[0], graphs
        for num_nodes, num_edges in ((1 << 20, 1 << 24), (1 << 20, 2 * largest), (50, 1 << 24), (1 << 20, 1)):
            monkeypatch.setattr(layer_wise, "_NODES_PER_MESSAGE", num_nodes)
            monkeypatch.setattr(layer_wise, "_EDGES_PER_MESSAGE", num_edges)
            seen.clear()
            assert_same_sample(FastGCNSampler(mine, [25, 20]).sample(to_global(mine, SEEDS), key=KEY), expected, mine)
            asked = [request.arrays[-1].long() for request in seen if request.kind == Kind.SHARES]
            there = other.parts.part(1).csc(EDGE).in_degrees()
            assert torch.equal(torch.cat(asked).sort()[0], torch.arange(other.parts.part(1).num_core(NODE)))
            assert all(len(nodes) <= num_nodes for nodes in asked)
            assert all(int(there[nodes].sum()) <= num_edges or int((there[nodes] > 0).sum()) == 1 for nodes in asked)


def test_answers_that_together_pass_what_sums_have_room_for_are_refused(monkeypatch) -> None:
    graph = homogeneous()
    monkeypatch.setattr(layer_wise, "SUM_END", int(shares_of(graph, EDGE, torch.arange(120)).sums.sum()))
    with pytest.raises(ValueError, match="add up to"):
        FastGCNSampler(graph, [25])


@pytest.mark.parametrize("kind", SAMPLERS)
def test_no_seeds_and_seeds_without_edges_give_empty_blocks(kind: type[LayerWiseSampler]) -> None:
    sampler = kind(homogeneous(), [10, 10])
    for seeds in (torch.empty(0, dtype=torch.int64), torch.tensor([119])):
        sample = sampler.sample({NODE: seeds}, key=KEY)
        assert sample.node[NODE].tolist() == seeds.tolist() and sample.num_sampled_edges[EDGE] == [0, 0]


def test_numbers_are_scaled_exactly() -> None:
    words = np.random.Philox(key=1).random_raw(500)
    for bound in (1, 3, 2**32 - 1, 2**32, 2**62 - 57):
        assert [int(n) for n in _scaled(words, bound)] == [int(w) * bound >> 64 for w in words]


def test_a_node_of_no_share_is_never_drawn() -> None:
    ends = torch.tensor([0, 5, 5, 6, 6])
    assert set(_draw(torch.arange(5), ends, np.random.Philox(key=2).random_raw(400)).nodes.tolist()) == {1, 3}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_loaders_hand_out_blocks_and_their_weights(kind: type[LayerWiseSampler]) -> None:
    graph = homogeneous()
    batch = next(iter(NeighborLoader(graph, sampler=kind(graph, [20, 20]), batch_size=16)))
    assert len(batch.blocks) == 2 and all(b.edge_weight[EDGE].numel() == b.csc[EDGE].num_edges for b in batch.blocks)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_they_cannot_do_is_refused_with_a_remedy(kind: type[LayerWiseSampler]) -> None:
    graph = homogeneous()
    with pytest.raises(ValueError, match="for links"):
        LinkNeighborLoader(graph, sampler=kind(graph, [5]))
    with pytest.raises(ValueError, match="use a NeighborSampler or a LaborSampler"):
        kind(typed(), [5])
    for numbers in ([], [0], [4, -1]):
        with pytest.raises(ValueError, match="num_nodes must be a positive number"):
            kind(graph, numbers)
    with pytest.raises(ValueError, match="takes no exclude"):
        kind(graph, [5]).sample(SEEDS, key=KEY, exclude={EDGE: torch.tensor([0])})
    with pytest.raises(ValueError, match=r"seeds must be in \[0, 120\)"):
        kind(graph, [5]).sample({NODE: torch.tensor([120])}, key=KEY)
