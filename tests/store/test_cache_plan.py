"""Rows to cache: none spare more, and what is predicted of them is what loaders then read."""

from __future__ import annotations

import itertools

import pytest
import torch

from gnnsys.graph import NODE, Graph
from gnnsys.loader import NeighborLoader, PipelineOptions
from gnnsys.ops import rmat_edges
from gnnsys.sampling import batch_visits, part_bounds
from gnnsys.store import DeviceCache, expected_reads, remote_rows, rows_to_cache
from tests.sampling.machines import machines
from tests.support.grid import every_value

REMOTE_FIRST = torch.tensor([True] * 4 + [False] * 5)


@pytest.mark.parametrize("own_cost", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_no_other_rows_of_the_same_size_spare_more(own_cost, count):
    for seed in range(5):
        visits = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        visits[seed] = 0.0
        budget = 4 * 9 + count * 100 + 99  # room to look rows up, and not quite for one row more
        rows = rows_to_cache(visits, REMOTE_FIRST, row_bytes=100, bytes=budget, own_cost=own_cost)
        spared = visits * torch.where(REMOTE_FIRST, 1.0, own_cost)
        best = max(float(spared[list(chosen)].sum()) for chosen in itertools.combinations(range(9), count))
        assert float(spared[rows].sum()) == pytest.approx(best)
        assert rows.numel() <= count and rows.tolist() == sorted(set(rows.tolist())) and seed not in rows.tolist()
        if own_cost == 0.0:
            assert bool(REMOTE_FIRST[rows].all())


def test_a_budget_without_room_for_a_row_caches_none():
    visits = torch.ones(9, dtype=torch.float64)
    for budget in (0, 4 * 9, 4 * 9 + 99):
        assert rows_to_cache(visits, REMOTE_FIRST, row_bytes=100, bytes=budget).numel() == 0
    assert rows_to_cache(visits, REMOTE_FIRST, row_bytes=100, bytes=4 * 9 + 100).tolist() == [0]


def test_the_rows_fit_the_bytes_that_a_cache_of_them_takes():
    source, visits = torch.zeros(9, 25), torch.rand(9, dtype=torch.float64)
    for budget in range(0, 1200, 70):
        rows = rows_to_cache(visits, REMOTE_FIRST, row_bytes=100, bytes=budget)
        if rows.numel():
            assert DeviceCache(source, rows, "cpu").nbytes <= budget


def test_rows_of_other_parts_are_remote():
    bounds = torch.tensor([0, 3, 3, 7])
    for own in ([], [0], [1], [2, 0], [0, 1, 2]):
        expected = [all(not bounds[p] <= row < bounds[p + 1] for p in own) for row in range(7)]
        assert remote_rows(bounds, own).tolist() == expected
    with pytest.raises(ValueError, match=r"own_parts must be in \[0, 3\), got 3"):
        remote_rows(bounds, [3])


@every_value(share=[0.0, 0.05, 0.2], own_cost=[0.0, 0.05, 1.0])
def test_a_loader_on_parts_reads_what_is_predicted_within_five_percent(tmp_path, own_cost, share):
    num_nodes, row_bytes = 6000, 32
    edges = rmat_edges(torch.arange(num_nodes, dtype=torch.int32), 90_000, 0.57, 0.19, 0.19, key=5)
    graph = Graph.from_edge_index(edges, num_nodes, {"x": torch.randn(num_nodes, 8)})
    with machines(graph, tmp_path / "p", 3, machine_of_part=[0, 1, 1]) as graphs:
        there = graphs[0]
        seeds, batch_size = there.global_ids(torch.arange(0, num_nodes, 5)), 50
        visits = batch_visits(there, [6, 4], seeds, batch_size=batch_size)[NODE]
        is_remote = remote_rows(part_bounds(there.book, NODE), there.parts_here)
        budget = int(share * num_nodes) * row_bytes + 4 * num_nodes
        rows = rows_to_cache(visits, is_remote, row_bytes=row_bytes, bytes=budget, own_cost=own_cost)
        predicted = expected_reads(visits, is_remote, rows, row_bytes=row_bytes)
        cache = DeviceCache(there.node_data[NODE]["x"], rows, "cpu")
        there.set_node_data("x", cache)
        options = {"shuffle": True, "num_threads": 0, "pipeline": PipelineOptions(share=False)}
        loader = NeighborLoader(there, [6, 4], input_nodes=there.from_global(seeds), batch_size=batch_size, **options)
        num_batches = sum(1 for _ in loader)
        loader.close()
        counters, bytes_remote = cache.counters(), loader.counters()["fetch"].counts["bytes_remote"]
    num_read = (counters.hits + counters.misses) / num_batches
    assert num_read == pytest.approx(predicted.num_rows, rel=0.05)
    assert counters.hit_rate == pytest.approx(predicted.hit_rate, rel=0.05)
    assert bytes_remote / num_batches == pytest.approx(predicted.remote_bytes, rel=0.05)
    missed_bytes = counters.bytes / num_batches
    assert missed_bytes == pytest.approx(predicted.remote_bytes + predicted.own_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"visits": torch.ones(9)[None]}, "visits must be floats"),
        ({"visits": torch.ones(9).long()}, "visits must be floats"),
        ({"visits": torch.full((9,), float("nan"))}, "NaN"),
        ({"is_remote": torch.ones(8) > 0}, "is_remote must be bool"),
        ({"is_remote": torch.ones(9)}, "is_remote must be bool"),
        ({"row_bytes": 0}, "row_bytes must be at least 1"),
        ({"own_cost": -1.0}, "costs must be"),
        ({"remote_cost": float("nan")}, "costs must be"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, words):
    given = {"visits": torch.rand(9), "is_remote": REMOTE_FIRST, "row_bytes": 8, "bytes": 100}
    with pytest.raises(ValueError, match=words):
        rows_to_cache(**(given | change))
