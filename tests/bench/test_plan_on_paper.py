"""Clusters on paper: sizes of batches beside those of the whole graph, and iterations that can be told by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnnsys.bench.plan.described_jobs import DescribedGraph, DescribedJob, example_file
from gnnsys.planning import Cluster

JOB = DescribedJob(
    rows=1000.0, edges=0.0, row_bytes=992.0, core_seconds=0.0, step_seconds=0.0, gradient_bytes=0.0, byte_work=0.0
)  # a batch of 1 MB


def hosts(num: int, **changes: object) -> Cluster:
    told = {"cores": 4, "rate": "8mbit", "gpus": {"t4": 2}, **changes}  # 1 MB per second
    return Cluster.from_json([{"name": f"h{n}", **told} for n in range(num)])


def test_batches_of_a_small_graph_scaled_up_have_the_sizes_of_the_large_ones() -> None:
    graph = DescribedGraph("made", 80_000, 1_600_000, 16, 4, 8_000)
    whole = graph.batch_sizes((10, 5), 80, 10_000_000)
    scaled = graph.batch_sizes((10, 5), 80, 100_000)  # a sixteenth, five seeds
    assert whole.layers[0].destinations > 80 and scaled != whole
    for ours, theirs in zip(scaled.layers, whole.layers, strict=True):
        assert ours.sources == pytest.approx(theirs.sources, rel=0.2)
        assert ours.edges == pytest.approx(theirs.edges, rel=0.2)


def test_an_iteration_takes_what_its_busiest_resource_needs() -> None:
    # Two trainers on each of two hosts: each host sends half of two batches of 1 MB, at 1 MB per second.
    assert JOB.iteration(hosts(2), 4) == pytest.approx(1.0, rel=0.05)
    assert JOB.iteration(hosts(2, rate="80mbit"), 4) == pytest.approx(0.1, rel=0.05)
    assert replace(JOB, local=1.0).iteration(hosts(2), 4) == pytest.approx(0.0, abs=1e-6)
    # Eight core-seconds for four batches on two hosts of four cores.
    assert replace(JOB, local=1.0, core_seconds=2.0).iteration(hosts(2), 4) == pytest.approx(1.0, rel=0.05)
    assert replace(JOB, local=1.0, core_seconds=2.0).iteration(hosts(2), 1) == pytest.approx(0.5, rel=0.05)
    assert replace(JOB, step_seconds=3.0).iteration(hosts(2), 4) == pytest.approx(3.0, rel=0.05)
    with pytest.raises(ValueError, match="trainers must be 1 to 4, one for each GPU, got 5"):
        JOB.run(hosts(2), 5)


@pytest.mark.parametrize(
    ("file", "num", "gpus"), [("g4dn-metal-8", 8, 64), ("h200-8x8", 8, 64), ("h200-125x8", 125, 1000)]
)
def test_cluster_files_have_the_hosts_of_their_names(file: str, num: int, gpus: int) -> None:
    cluster = Cluster.from_file(example_file("clusters", f"{file}.json"))
    assert len(cluster) == num and sum(host.num_gpus for host in cluster) == gpus
