"""Estimates before the work: which way is chosen, and what sizes look like."""

from __future__ import annotations

import pytest

from gnnsys.graph import load, save, sbm
from gnnsys.partition import (
    estimate_in_memory,
    estimate_streaming,
    format_size,
    least_memory,
    parse_size,
    plan_assignment,
    plan_memory,
)
from gnnsys.partition.memory import graph_bytes


@pytest.mark.parametrize(
    "text,size",
    [("4G", 4 << 30), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("64 kb", 64 << 10), ("123", 123), (77, 77),
     ("2T", 2 << 40)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "4X", "-1G", "1e9", "four"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="a size must look like"):
        parse_size(text)


def test_a_size_that_is_shown_can_be_read_again():
    for size in (0, 1, 1000, 1 << 20, 3 << 29, 5 << 40):
        assert abs(parse_size(format_size(size)) - size) <= 0.05 * size


def test_what_is_expected_counts_a_graph_in_memory_and_not_one_that_is_mapped(tmp_path):
    graph = sbm(2000, num_features=512)
    size = graph_bytes(graph)
    assert size > graph.node_data["node"]["x"].nbytes
    plan = plan_assignment(graph, 2)
    text = f"expected peak {format_size(size + plan.in_memory.peak)} in memory: the graph {format_size(size)}, part"
    assert str(plan).startswith(text)
    save(graph, tmp_path / "graph")
    mapped = load(tmp_path / "graph")
    assert graph_bytes(mapped) == 0 and "the graph" not in str(plan_assignment(mapped, 2))


def test_without_a_limit_and_with_a_large_one_the_work_is_in_memory():
    assert not plan_memory(10**6, 10**7, 8).is_streaming
    plan = plan_memory(10**6, 10**7, 8, memory_limit=parse_size("64G"))
    assert not plan.is_streaming and "in memory" in str(plan)


def test_a_limit_below_the_in_memory_peak_means_streaming_within_it():
    for num_nodes, num_edges in [(10**5, 10**7), (10**7, 10**9)]:
        limit = estimate_in_memory(num_nodes, num_edges).peak // 4
        plan = plan_memory(num_nodes, num_edges, 8, memory_limit=limit)
        assert plan.is_streaming and plan.streaming is not None and plan.streaming.peak <= limit
        assert "streaming from files" in str(plan) and format_size(plan.streaming.peak) in str(plan)


def test_a_limit_that_is_too_small_for_the_nodes_is_refused_with_one_that_is_not():
    with pytest.raises(ValueError, match=r"too small for 1,000,000,000 nodes: give at least"):
        plan_memory(10**9, 10**10, 8, memory_limit=parse_size("4G"))
    assert plan_memory(10**9, 10**10, 8, memory_limit=least_memory(10**9)).is_streaming


def test_metis_is_estimated_by_what_it_takes_and_refused_under_less():
    """Measured: 841 MiB for 200,000 nodes and 4,000,000 edges of a power-law graph, 512 MiB for communities."""
    plan = plan_memory(200_000, 4_000_000, 8, method="metis", loads=False)
    assert not plan.is_streaming and 841 << 20 < plan.in_memory.peak < 1200 << 20
    assert plan.in_memory.peak > 3 * plan_memory(200_000, 4_000_000, 8, loads=False).in_memory.peak
    assert not plan_memory(200_000, 4_000_000, 8, method="metis", memory_limit=2 << 30, loads=False).is_streaming
    with pytest.raises(ValueError, match=r"METIS would take .* more than the limit of 512\.0 MiB: use"):
        plan_memory(200_000, 4_000_000, 8, method="metis", memory_limit=512 << 20, loads=False)


def test_estimates_grow_with_the_graph_and_streaming_stays_within_its_limit():
    limit = parse_size("8G")
    small, large = (estimate_in_memory(n, 20 * n).peak for n in (10**6, 10**7))
    assert 9 * small < large < 11 * small
    for num_nodes in (10**4, 10**6, 10**8):
        for num_edges in (num_nodes, 30 * num_nodes):
            estimate = estimate_streaming(num_nodes, num_edges, 64, 5, memory_limit=limit)
            assert 0 < estimate.peak <= limit and set(estimate.stages) == {"sorting", "clustering", "refining"}
