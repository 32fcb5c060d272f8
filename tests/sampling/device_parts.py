"""Parts that a device samples, against the sampler on the whole graph: for every kind, wherever parts lie.

The same checks run with the host as the device (tests/sampling) and with a GPU (tests/cuda).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from gnnsys.graph import EDGE
from gnnsys.sampling import (
    DistGraph,
    LaborSampler,
    NeighborSampler,
    PinSAGESampler,
    SaintEdgeSampler,
    SaintNodeSampler,
    SaintWalkSampler,
    ShadowSampler,
    random_walks,
)
from gnnsys.sampling.device_neighborhoods import DeviceNeighborhoods
from tests.sampling.machines import assert_same_sample, homogeneous, machines, to_global, typed
from tests.sampling.test_dist import KEY, KINDS, SEEDS, seed_time

Place = Callable[[DistGraph], None]  # has a device sample a graph's own parts

LAYOUTS = {
    "one part": (1, [0], None),
    "a machine each": (3, [0, 1, 2], None),
    "all on one machine": (4, [0, 0, 0, 0], None),
    "not neighbours": (4, [0, 1, 0, 1], None),
    "neighbours": (4, [0, 0, 1, 1], None),
    "a machine without parts": (3, [1, 1, 1], None),
    "empty parts": (4, [0, 1, 2, 3], [0, 2]),
    "empty parts on one machine": (4, [0, 0, 0, 0], [1, 2]),
}


def check_every_kind(folder: Path, layout: str, place: Place) -> None:
    num_parts, owner, used = LAYOUTS[layout]
    graph = homogeneous()
    with machines(graph, folder, num_parts, machine_of_part=owner, used=used) as graphs:
        for mine in graphs:
            place(mine)
        for fanouts, options in KINDS.values():
            time = seed_time(SEEDS, options)
            expected = NeighborSampler(graph, fanouts, **options).sample(SEEDS, key=KEY, seed_time=time)
            for mine in graphs:
                sampler = NeighborSampler(mine, fanouts, **options)
                assert isinstance(sampler._neighborhoods, DeviceNeighborhoods)
                sample = sampler.sample(to_global(mine, SEEDS), key=KEY, seed_time=time)
                assert sample.device == mine.sampled_on
                assert_same_sample(sample, expected, mine)


def check_typed_kinds(folder: Path, num_parts: int, owner: list[int], place: Place) -> None:
    graph = typed()
    seeds = {"paper": torch.tensor([5, 60, 2, 5]), "author": torch.tensor([39, 0])}
    trees = {"paper": torch.tensor([0, 1, 2, 3]), "author": torch.tensor([4, 5])}
    with machines(graph, folder, num_parts, machine_of_part=owner) as graphs:
        for mine in graphs:
            place(mine)
        for fanouts, options in KINDS.values():
            tree = trees if options.get("disjoint") or options.get("time") else None
            time = seed_time(seeds, options)
            expected = NeighborSampler(graph, fanouts, **options).sample(seeds, key=KEY, seed_time=time, tree=tree)
            for mine in graphs:
                ours = NeighborSampler(mine, fanouts, **options)
                sample = ours.sample(to_global(mine, seeds), key=KEY, seed_time=time, tree=tree)
                assert_same_sample(sample, expected, mine)


def check_exclusions(folder: Path, layout: str, place: Place) -> None:
    num_parts, owner, used = LAYOUTS[layout]
    graph = homogeneous()
    edges = graph.edge_index()
    src, dst = edges[:, torch.isin(edges[1], SEEDS["node"])][:, ::2]
    with machines(graph, folder, num_parts, machine_of_part=owner, used=used) as graphs:
        for mine in graphs:
            place(mine)
        for kind in ("uniform", "weighted", "edge times", "node times", "blocks"):
            fanouts, options = KINDS[kind]
            time = seed_time(SEEDS, options)
            whole = NeighborSampler(graph, fanouts, **options)
            exclude = {EDGE: whole.find_edges(EDGE, src, dst)}
            assert exclude[EDGE].numel() > 10
            expected = whole.sample(SEEDS, key=KEY, seed_time=time, exclude=exclude)
            for mine in graphs:
                ours = NeighborSampler(mine, fanouts, **options)
                found = {EDGE: ours.find_edges(EDGE, mine.global_ids(src), mine.global_ids(dst))}
                sample = ours.sample(to_global(mine, SEEDS), key=KEY, seed_time=time, exclude=found)
                assert_same_sample(sample, expected, mine)


def check_deep_halos(folder: Path, place: Place) -> None:
    graph = homogeneous(60, 200)
    seeds = {"node": torch.tensor([3, 50, 14])}
    for halo_hops in (1, 2, 3):
        with machines(graph, folder / str(halo_hops), 3, machine_of_part=[0, 0, 1], halo_hops=halo_hops) as graphs:
            for mine in graphs:
                place(mine)
            for options in ({}, {"weight": "w"}, {"time": "t"}, {"time": "et"}):
                time = seed_time(seeds, options)
                expected = NeighborSampler(graph, [3, -1], **options).sample(seeds, key=KEY, seed_time=time)
                for mine in graphs:
                    ours = NeighborSampler(mine, [3, -1], **options)
                    assert_same_sample(ours.sample(to_global(mine, seeds), key=KEY, seed_time=time), expected, mine)


LABOR = {
    "plain": ([4, 3], {}),
    "a hop of none": ([3, 0, 2], {}),
    "all neighbours": ([-1, 2], {}),
    "normalized": ([4, 3], {"normalize": True}),
    "disjoint": ([4, 3], {"disjoint": True}),
    "blocks": ([4, 3], {"expand": "frontier", "normalize": True}),
}


def check_labor(folder: Path, layout: str, place: Place) -> None:
    """LABOR of a device, halos of two hops too, and with edges that are left out."""
    num_parts, owner, used = LAYOUTS[layout]
    graph = homogeneous()
    src, dst = graph.edge_index()[:, ::3]
    whole = LaborSampler(graph, [4, 3])
    without = whole.sample(SEEDS, key=KEY, exclude={EDGE: whole.find_edges(EDGE, src, dst)})
    for halo_hops in (1, 2):
        where = folder / str(halo_hops)
        with machines(graph, where, num_parts, machine_of_part=owner, used=used, halo_hops=halo_hops) as graphs:
            for mine in graphs:
                place(mine)
            for fanouts, options in LABOR.values():
                expected = LaborSampler(graph, fanouts, **options).sample(SEEDS, key=KEY)
                for mine in graphs:
                    sampler = LaborSampler(mine, fanouts, **options)
                    assert isinstance(sampler._neighborhoods, DeviceNeighborhoods)
                    sample = sampler.sample(to_global(mine, SEEDS), key=KEY)
                    assert sample.device == mine.sampled_on
                    assert_same_sample(sample, expected, mine)
            for mine in graphs:
                ours = LaborSampler(mine, [4, 3])
                exclude = {EDGE: ours.find_edges(EDGE, mine.global_ids(src), mine.global_ids(dst))}
                assert_same_sample(ours.sample(to_global(mine, SEEDS), key=KEY, exclude=exclude), without, mine)


def check_walks(folder: Path, layout: str, place: Place) -> None:
    num_parts, owner, used = LAYOUTS[layout]
    graph, roots = homogeneous(), torch.tensor([7, 11, 80, 7, 118, 3])
    with machines(graph, folder, num_parts, machine_of_part=owner, used=used) as graphs:
        for mine in graphs:
            place(mine)
        for restart_prob in (0.0, 0.3):
            expected = random_walks(graph, roots, 8, key=3, restart_prob=restart_prob)
            for mine in graphs:
                walks = random_walks(mine, mine.global_ids(roots), 8, key=3, restart_prob=restart_prob)
                assert walks.device == mine.sampled_on
                walks = walks.cpu()
                named = mine.original_ids(walks.clamp(min=0).view(-1)).view(walks.shape)
                assert torch.equal(torch.where(walks >= 0, named, -1), expected)


SUBGRAPHS = {
    "nodes": partial(SaintNodeSampler, size=20, coverage=1),
    "edges": partial(SaintEdgeSampler, size=12, coverage=1),
    "walks": partial(SaintWalkSampler, size=6, length=3, coverage=1),
}
AROUND_SEEDS = {
    "pinsage": partial(PinSAGESampler, num_neighbors=[5, 3], num_walks=10, length=3, restart_prob=0.3),
    "shadow": partial(ShadowSampler, num_neighbors=[4, 3]),
    "one shadow": partial(ShadowSampler, num_neighbors=[4, 3], disjoint=False),
}


def check_subgraphs(folder: Path, layout: str, place: Place) -> None:
    """GraphSAINT, PinSAGE and shaDow."""
    num_parts, owner, used = LAYOUTS[layout]
    graph = homogeneous()
    with machines(graph, folder, num_parts, machine_of_part=owner, used=used) as graphs:
        for mine in graphs:
            place(mine)
        for make in SUBGRAPHS.values():
            expected = make(graph).sample(torch.tensor([1]), key=KEY)
            for mine in graphs:
                sample = make(mine).sample(torch.tensor([1]), key=KEY)
                assert sample.device == mine.sampled_on
                assert_same_sample(sample, expected, mine)
        for make_sampler in AROUND_SEEDS.values():
            expected = make_sampler(graph).sample(SEEDS, key=KEY)
            for mine in graphs:
                sample = make_sampler(mine).sample(to_global(mine, SEEDS), key=KEY)
                assert sample.device == mine.sampled_on
                assert_same_sample(sample, expected, mine)
