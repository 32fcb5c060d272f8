"""What is counted without a cluster is what a run counts: the same messages, the same bytes, batch by batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnsys.graph import typed_graph
from gnnsys.nn import HeteroSAGE
from gnnsys.partition import partition_graph
from gnnsys.planning import JobProfile, MachineProfile, ShareProfile, profile_drift
from gnnsys.profiling import DryJob, count_shares, profile_of_traces, profile_parts
from gnnsys.session import GraphServer
from tests.profiling.communities import two_parts
from tests.support.processes import run_ranks

NUM_BATCHES = 12
JOB = DryJob(fanouts=(5, 4), batch_size=32, seed=3, num_threads=0)
TRAINER = """
import json, sys
import gnnsys
from itertools import islice
from gnnsys.loader import NeighborLoader, PipelineOptions

parts, threads, servers = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
with gnnsys.init(encrypt=False) as session:
    graph = gnnsys.open(parts, servers=servers or None)
    seeds = gnnsys.split(graph, "train")
    loader = NeighborLoader(
        graph, [5, 4], input_nodes=seeds, batch_size=32, shuffle=True, seed=3, num_threads=threads,
        pipeline=PipelineOptions(trace=100),
    )
    seen = 0
    while seen < 12:
        for batch in loader:
            seen += 1
            if seen == 12:
                break
    records = [record.as_dict() for record in loader.trace() if record.batch < 12]
    loader.close()
    if len(sys.argv) > 4:
        loader.save_trace(f"{sys.argv[4]}/rank{session.rank}.json")
    print("RECORDS " + json.dumps({"share": list(seeds.recipe.shares[session.rank])[:1], "records": records}))
    session.barrier()
"""

EXACTLY = """
import threading
from gnnsys.store.in_flight import InFlightWindow

depth, changed, entered, landed = DEPTH, threading.Condition(), [0], [0]
enter, land = InFlightWindow.enter, InFlightWindow.land

def meet(mine, others, least, work):  # when so many others are done: does the work, then counts it as done
    with changed:
        if least <= 12:
            assert changed.wait_for(lambda: others[0] >= least, 60), "a loader has no room for so many"
        work()
        mine[0] += 1
        changed.notify_all()

def gated_enter(window, flight, legs):
    if entered[0] < 12:
        meet(entered, landed, entered[0] - depth, lambda: enter(window, flight, legs))
    else:
        enter(window, flight, legs)

def gated_land(window, flight):
    if landed[0] + depth < 12:
        meet(landed, entered, landed[0] + 1 + depth, lambda: land(window, flight))
    else:
        land(window, flight)

InFlightWindow.enter, InFlightWindow.land = gated_enter, gated_land
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_parts(tmp_path_factory.mktemp("dry") / "parts")


def of_runs(outputs: list[str]) -> list[list[dict[str, Any]]]:
    """Records by share, in the order of shares."""
    told = [json.loads(line[8:]) for text in outputs for line in text.splitlines() if line.startswith("RECORDS ")]
    told.sort(key=lambda one: one["share"])
    return [one["records"] for one in told]


def flow_bytes(records: list[dict[str, Any]], kind: str, way: str, num_parts: int = 2) -> np.ndarray:
    found = np.zeros((len(records), num_parts))
    for record in records:
        for flow in record["flows"]:
            if flow["kind"] == kind:
                found[record["batch"], flow["machine"]] += flow[way]
    return found


def assert_same_bytes(share: ShareProfile, records: list[dict[str, Any]]) -> None:
    assert len(records) == NUM_BATCHES
    for kind, name in (("SAMPLE", "sample"), ("PULL", "pull")):
        np.testing.assert_array_equal(flow_bytes(records, kind, "bytes_in"), getattr(share, f"{name}_in"))
        np.testing.assert_array_equal(flow_bytes(records, kind, "bytes_out"), getattr(share, f"{name}_out"))
    assert share.pull_in.sum() > 0 and share.sample_in.sum() > 0


def test_two_machines_ask_for_the_bytes_that_were_counted_without_them(parts: Path, tmp_path: Path) -> None:
    ranks = run_ranks(TRAINER, [1, 1], parts, 0, "[]", tmp_path, timeout=120)
    counted = count_shares(parts, JOB, trainers=2, num_batches=NUM_BATCHES)
    runs = of_runs([rank.stdout for rank in ranks])
    assert [share.home for share in counted.shares] == [(0,), (1,)]
    for share, records in zip(counted.shares, runs, strict=True):
        assert_same_bytes(share.at_home(), records)
    check_profile_of_traces(parts, [tmp_path / "rank1.json", tmp_path / "rank0.json"], counted.shares)


def made_of(parts: Path) -> JobProfile:
    return profile_parts(parts, JOB, hidden=8, num_batches=2)


def check_profile_of_traces(parts: Path, traces: list[Path], counted: Sequence[ShareProfile]) -> None:
    """What the run has saved is a profile: flows to the other machine are those that were counted without a run."""
    profile = profile_of_traces(parts, traces)
    assert profile.source == "run" and profile.num_parts == 2
    for measured, share in zip(profile.shares, counted, strict=True):
        assert measured.home == share.home
        assert measured.num_batches == NUM_BATCHES - 1  # the loop was left at the last one
        for name in ("sample_in", "pull_in", "sample_out", "pull_out"):
            np.testing.assert_array_equal(
                getattr(measured.at_home(), name), getattr(share.at_home(), name)[: NUM_BATCHES - 1]
            )
        np.testing.assert_allclose(measured.rows.sum(1), share.rows.sum(1)[: NUM_BATCHES - 1], rtol=0.35)
        assert (measured.serving.sum(1) > 0).all() and (measured.sampling > 0).all() and (measured.fetching > 0).all()
    drift = profile_drift(replace(made_of(parts), shares=tuple(counted)), profile)
    assert len(drift) == 5
    sent = next(line for line in drift if line.startswith("bytes that parts send"))
    assert abs(float(sent.split("(")[1].rstrip("%)"))) <= 5  # of one batch less
    with pytest.raises(ValueError, match=r"the run had ranks 0 to 1, and there are traces of \[1\]"):
        profile_of_traces(parts, traces[:1])
    told = json.loads(traces[0].read_text())
    traces[0].write_text(json.dumps({**told, "records": []}))
    with pytest.raises(ValueError, match=r"rank1.json: it has no batch that was trained on"):
        profile_of_traces(parts, traces)
    traces[0].write_text(json.dumps({**told, "parts_digest": 7}))
    with pytest.raises(ValueError, match="is of parts with the digest 00000007"):
        profile_of_traces(parts, traces)
    traces[0].write_text("{}")
    with pytest.raises(ValueError, match="it is no trace of a run"):
        profile_of_traces(parts, traces)


def test_typed_parts_are_asked_for_the_bytes_that_were_counted_without_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "typed"
    graph = typed_graph(1200, num_features=8)
    partition_graph(graph, 2, folder)
    ranks = run_ranks(TRAINER, [1, 1], folder, 0, "[]", timeout=120)
    profile = profile_parts(folder, JOB, hidden=8, num_batches=NUM_BATCHES, encrypt=False)
    assert profile.about["features"] == {"paper": 8, "author": 8, "institution": 8}
    for share, records in zip(profile.shares, of_runs([rank.stdout for rank in ranks]), strict=True):
        assert_same_bytes(share.at_home(), records)
        nodes = [sum(sum(counts) for counts in record["nodes"].values()) for record in records]
        edges = [sum(sum(counts) for counts in record["edges"].values()) for record in records]
        np.testing.assert_array_equal(share.nodes, nodes)
        np.testing.assert_array_equal(share.edges.sum(1), edges)
        assert (share.computing > 0).all()
    model = HeteroSAGE(8, 8, 2, profile.about["classes"], metadata=graph, targets=["paper"])
    assert profile.gradients.dense == sum(4 * parameter.numel() for parameter in model.parameters())


def test_what_is_not_known_of_typed_parts_without_a_run_is_one_line(tmp_path: Path) -> None:
    graph = typed_graph(400, num_features=8)
    partition_graph(graph, 1, tmp_path / "typed")
    gpu = MachineProfile.from_rates(
        cores=1, host_gbs_per_core=1.0, host_gflops_per_core=1.0, bus_gbs=1.0, device_gbs=1.0, device_tflops=1.0
    )
    del graph.node_data["author"]["x"]
    partition_graph(graph, 1, tmp_path / "bare")
    for folder, options, told in (
        ("typed", {"model": "gin"}, "a model of typed parts is one of sage, gat, rgcn, got 'gin'"),
        ("typed", {"machine": gpu}, "steps of typed parts are timed on a core"),
        ("bare", {}, "has no features 'x' of author, whose rows would be trained: profile a run"),
    ):
        with pytest.raises(ValueError, match=told) as caught:
            profile_parts(tmp_path / folder, JOB, hidden=8, num_batches=2, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_trainers_without_a_part_ask_for_the_bytes_that_were_counted(parts: Path) -> None:
    servers = [GraphServer(part, alone=True) for part in range(2)]
    try:
        endpoints = []
        for part, server in enumerate(servers):
            endpoints.append(server.start()[0])
            server.open(str(parts), [part])
        ranks = run_ranks(TRAINER, [2], parts, 0, json.dumps(endpoints), timeout=120)
    finally:
        for server in servers:
            server.close()
    counted = count_shares(parts, JOB, trainers=2, num_batches=NUM_BATCHES)
    for share, records in zip(counted.shares, of_runs([rank.stdout for rank in ranks]), strict=True):
        assert_same_bytes(share, records)


def test_a_loader_with_threads_asks_for_about_what_a_full_pipeline_does(parts: Path) -> None:
    """Which batches are in flight together depends on when threads run: more where rows come late."""
    ranks = run_ranks(TRAINER, [1, 1], parts, 3, "[]", timeout=120)
    full = count_shares(parts, replace(JOB, num_threads=3), trainers=2, num_batches=NUM_BATCHES)
    alone = count_shares(parts, JOB, trainers=2, num_batches=NUM_BATCHES)
    assert (full.ahead, alone.ahead) == (
        8,
        0,
    )  # three with threads that sample, two behind them, one fetched, two ready
    for number, records in enumerate(of_runs([rank.stdout for rank in ranks])):
        least, most = full.shares[number].at_home(), alone.shares[number].at_home()
        np.testing.assert_array_equal(flow_bytes(records, "SAMPLE", "bytes_in"), least.sample_in)
        asked = flow_bytes(records, "PULL", "bytes_in").sum()
        assert 0.9 * least.pull_in.sum() <= asked <= 1.02 * most.pull_in.sum()


@pytest.mark.parametrize("is_late", [False, True])
def test_rows_in_time_and_rows_that_come_late_are_the_bytes_that_were_counted_of_each(
    parts: Path, is_late: bool
) -> None:
    """A run whose rows are held back until as many batches are under way as a loader has room for, which is what a slow
    link does; or until as many are as there are where only room holds them back."""
    counted = count_shares(parts, replace(JOB, num_threads=1), trainers=2, num_batches=NUM_BATCHES)
    depth = counted.in_flight + is_late
    assert counted.in_flight == 2
    ranks = run_ranks(EXACTLY.replace("DEPTH", str(depth)) + TRAINER, [1, 1], parts, 1, "[]", timeout=120)
    for share, records in zip(counted.shares, of_runs([rank.stdout for rank in ranks]), strict=True):
        seen = share.seen_from(share.home, late=float(is_late))
        assert_same_bytes(seen, records)
        assert seen.pull_in.sum() == (share.home_late_pull_in if is_late else share.home_pull_in).sum()
        assert share.home_late_pull_in.sum() < share.home_pull_in.sum()
