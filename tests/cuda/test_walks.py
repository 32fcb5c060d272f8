"""Walks on the device and the samplers that are made of them: bit for bit what the host gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import NeighborLoader, SubgraphLoader
from gnnsys.ops import COIN_SIDES, CSC, draw_below, stream_key
from gnnsys.ops import random_walks as csc_random_walks
from gnnsys.sampling import (
    ClusterSampler,
    PinSAGESampler,
    SaintEdgeSampler,
    SaintNodeSampler,
    SaintWalkSampler,
    SampleKey,
    ShadowSampler,
    cluster,
    random_walks,
)
from tests.cuda.places import PLACES, homogeneous, placed, same_batch, same_sample
from tests.cuda.test_parts import placing
from tests.cuda.test_sampling import graph, on_device
from tests.sampling.device_parts import LAYOUTS, check_subgraphs, check_walks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

KEY = SampleKey(seed=3, epoch=1, batch=4)


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("coin", [0, COIN_SIDES // 3, COIN_SIDES - 1])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 70])  # around what one launch makes
def test_walks_are_the_cpus(pinned: bool, dtype: torch.dtype, coin: int, length: int) -> None:
    csc = graph(dtype, seed=1)
    keys: dict[str, Any] = {
        "step_keys": [stream_key(1, step) for step in range(length)],
        "coin_keys": [stream_key(2, step) for step in range(length)],
        "coin": coin,
    }
    roots = torch.randint(0, csc.num_dst, (3000,), generator=torch.Generator().manual_seed(length))
    for original in (
        None,
        torch.randperm(csc.num_dst),
        torch.randperm(csc.num_dst).int(),
        torch.arange(700) + (1 << 40),
    ):
        expected = csc_random_walks(csc, roots, **keys, original=original)
        moved = original if original is None else original.pin_memory() if pinned else original.cuda()
        got = csc_random_walks(on_device(csc, pinned), roots.cuda(), **keys, original=moved)
        assert got.is_cuda and got.dtype == expected.dtype and torch.equal(got.cpu(), expected)
    assert length == 0 or coin or bool((expected[:, -1] < 0).any())


def test_no_walks_and_no_edges_are_fine() -> None:
    empty = CSC(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int32), 3)
    for csc, roots in ((empty, torch.tensor([0, 2])), (graph(torch.int32, 1), torch.empty(0, dtype=torch.int64))):
        expected = csc_random_walks(csc, roots, step_keys=[1, 2])
        assert torch.equal(csc_random_walks(on_device(csc, False), roots.cuda(), step_keys=[1, 2]).cpu(), expected)


def test_bad_arguments_are_refused() -> None:
    csc, one = on_device(graph(torch.int64, 1), False), torch.tensor([0]).cuda()
    with pytest.raises(ValueError, match="coin must be in"):
        csc_random_walks(csc, one, step_keys=[1], coin_keys=[1], coin=-1)
    with pytest.raises(ValueError, match="coin_keys must be as many"):
        csc_random_walks(csc, one, step_keys=[1], coin=5)
    with pytest.raises(ValueError, match="original must have an id"):
        csc_random_walks(csc, one, step_keys=[1], original=one)
    with pytest.raises(ValueError, match=r"roots must be in \[0, 600\)"):
        random_walks(homogeneous().to("cuda"), torch.tensor([600]), 3, key=1)


def test_numbers_below_a_bound_are_the_cpus() -> None:
    for ids in (torch.arange(70_000), torch.arange(70_000, dtype=torch.int32), torch.arange(9) + (1 << 50)):
        for bound in (1, 7, (1 << 53), (1 << 62) + 12345, (1 << 63) - 1):
            assert torch.equal(draw_below(ids.cuda(), bound, key=5).cpu(), draw_below(ids, bound, key=5))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("restart_prob", [0.0, 0.3])
def test_walks_of_graphs_are_the_hosts(place: str, restart_prob: float) -> None:
    whole, roots = homogeneous(), torch.arange(600)
    expected = random_walks(whole, roots, 9, key=4, restart_prob=restart_prob)
    got = random_walks(placed(whole, place), roots, 9, key=4, restart_prob=restart_prob, device="cuda")
    assert got.is_cuda and torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("place", ("device", "structure", "registered"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_walks_on_parts_are_those_of_one_process(tmp_path: Path, layout: str, place: str) -> None:
    check_walks(tmp_path / "p", layout, placing(place))


@pytest.mark.parametrize("place", ("device", "structure", "registered"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_subgraphs_of_parts_are_those_of_one_process(tmp_path: Path, layout: str, place: str) -> None:
    check_subgraphs(tmp_path / "p", layout, placing(place))


# -- samplers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_pinsage_samples_and_batches_are_the_hosts(place: str) -> None:
    whole = homogeneous()
    make = partial(PinSAGESampler, num_neighbors=[6, 4], num_walks=12, length=3, restart_prob=0.3)
    graphs = placed(whole, place), whole
    there, here = make(graphs[0], device="cuda"), make(graphs[1])
    seeds = {NODE: torch.arange(0, 300, 2)}
    a, b = there.sample(seeds, key=KEY), here.sample(seeds, key=KEY)
    same_sample(a, b)
    assert torch.equal(a.edge_weight[EDGE].cpu(), b.edge_weight[EDGE])
    options = {"batch_size": 64, "shuffle": True}
    loaders = (
        NeighborLoader(graphs[0], sampler=there, device="cuda", **options),
        NeighborLoader(whole, sampler=here, num_threads=0, **options),
    )
    for mine, other in zip(*loaders, strict=True):
        same_batch(mine, other)


SAINT = {
    "nodes": partial(SaintNodeSampler, size=60),
    "edges": partial(SaintEdgeSampler, size=40),
    "walks": partial(SaintWalkSampler, size=30, length=3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("coverage", [0, 3])
@pytest.mark.parametrize("kind", SAINT)
def test_saint_batches_are_the_hosts(place: str, coverage: int, kind: str) -> None:
    whole = homogeneous()
    graphs = placed(whole, place), whole
    there = SAINT[kind](graphs[0], coverage=coverage, device="cuda")
    here = SAINT[kind](whole, coverage=coverage)
    assert there.presample() == here.presample()
    loaders = SubgraphLoader(graphs[0], there, device="cuda"), SubgraphLoader(whole, here, num_threads=0)
    for mine, other in zip(*loaders, strict=True):
        same_batch(mine, other)


@pytest.mark.parametrize("place", PLACES)
def test_batches_of_clusters_are_the_hosts(place: str) -> None:
    whole = homogeneous()
    cut, graphs = cluster(whole, 8), (placed(whole, place), whole)
    options = {"batch_size": 3, "shuffle": True}
    there = SubgraphLoader(graphs[0], ClusterSampler(graphs[0], cut, device="cuda"), device="cuda", **options)
    here = SubgraphLoader(whole, ClusterSampler(whole, cut), num_threads=0, **options)
    for mine, other in zip(there, here, strict=True):
        same_batch(mine, other)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("disjoint", [True, False])
def test_shadow_batches_are_the_hosts(place: str, disjoint: bool) -> None:
    whole = homogeneous()
    graphs = placed(whole, place), whole
    options = {"batch_size": 50, "shuffle": True}
    there = NeighborLoader(
        graphs[0], sampler=ShadowSampler(graphs[0], [5, 3], disjoint=disjoint, device="cuda"), device="cuda", **options
    )
    here = NeighborLoader(whole, sampler=ShadowSampler(whole, [5, 3], disjoint=disjoint), num_threads=0, **options)
    for mine, other in zip(there, here, strict=True):
        same_batch(mine, other)


def test_a_subgraph_of_nothing_is_empty_on_the_device_too() -> None:
    there: Graph = homogeneous().to("cuda")
    sample = SaintWalkSampler(there, 5, 2, coverage=0).sample(torch.empty(0, dtype=torch.int64), key=KEY)
    assert sample.node[NODE].is_cuda and sample.node[NODE].numel() == 0
