"""The cases of `bench gpu` run on a tiny graph: on the GPU where there is one, else on the host, without meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gnnsys.bench import OURS, Case, Report, Side, Workload, load_suite, milliseconds
from gnnsys.bench.gpu.inputs import copies, graph_sizes, large_graph
from gnnsys.bench.measure import RoundLimits, clock, device_seconds_of, measure, seconds_of, synced_seconds_of
from gnnsys.bench.workload import FULL, Sizes
from gnnsys.cli.main import main
from tests.bench.verdicts import judged

HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
TINY = Sizes(500, 5_000, num_seeds=8)
WORKLOAD = Workload(TINY, settings={"device": "cuda:0" if HAS_GPU else "cpu"})
ON_HOST = (  # one of each kind; torch's CSR has no bf16 there, and pinned memory is as any other
    "spmm/forward/0.0005M/fp32/32",
    "spmm/backward/0.0005M/bf16/100",
    "spmm/scatter/0.001225M/fp32/100",
    "spmm/mean/0.0005M/fp32/128",
    "spmm/weighted/0.0005M/fp32/128",
    "spmm/max/0.001225M/fp32/128",
    "compact/5,500,000 int64 ids",
    "sampling/device memory",
    "labor/three hops",
    "labor/one hop",
    "labor/three hops, LABOR-1",
    "labor/one hop, LABOR-1",
    "walks/8 steps",
    "induced/nodes of a batch",
    "gather/512B/pinned host memory",
    "gather/512B/device memory",
    "gather/512B/90% cached",
    "epoch/device memory",
    "epoch/device memory, kernels",
    "epoch/device memory, captured",
    "epoch/pinned host memory, 20% cached",
    "fullgraph/epoch",
    "fullgraph/beside messages",
    "fullgraph/making",
    "fullgraph/rows on the host/0.0005M/bytes",
    pytest.param("fullgraph/rows on the host/0.0005M/epoch", marks=pytest.mark.long),  # the same job as for its bytes
    pytest.param("fullgraph/rows on the host/0.001225M/peak", marks=pytest.mark.long),
)
CASES = {case.name: case for benchmark in load_suite("gpu") for case in benchmark(WORKLOAD)}


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    WORKLOAD.close()


@pytest.mark.parametrize("name", CASES if HAS_GPU else ON_HOST)
def test_a_case_runs_and_fills_its_rows(name: str):
    case = CASES[name]
    report = Report("gpu", quick=True)
    measured = measure(case, RoundLimits(least=1, most=1))
    rows = report.add(case, measured)
    missing = {*(case.missing or {}), *measured.refused}
    for row, versus in zip(rows, case.versus, strict=True):
        assert row.ours is not None and row.ours > 0
        assert (row.ratio is None) == (set(versus.peers) <= missing)
    assert (rows[0].limit is None) == (case.limit is None)
    assert all(peer in missing for peer in report.absent)


def test_every_promise_about_the_gpu_is_a_target_that_check_judges():
    promised = {f"spmm/forward/{n}/fp32/{w}": t for n in ("1M", "2.45M") for w, t in ((32, 1.7), (100, 1.25), (128, 1))}
    promised |= {f"spmm/forward/{n}/fp32/256": 1 for n in ("1M", "2.45M")}
    promised |= {f"spmm/forward/{n}/bf16/{w}": 1.5 for n in ("1M", "2.45M") for w in (32, 100, 128, 256)}
    promised |= {f"spmm/backward/{n}/fp32/{w}": 1 / 1.15 for n in ("1M", "2.45M") for w in (32, 100, 128, 256)}
    promised |= {f"spmm/scatter/1M/fp32/{w}": 10 for w in (32, 128, 256)} | {"spmm/scatter/2.45M/fp32/100": 10}
    sizes = ("110,000", "1,100,000", "5,500,000")
    promised |= {f"compact/{n} {dtype} ids": 2 for n in sizes for dtype in ("int32", "int64")}
    promised |= {"sampling/device memory": 1, "sampling/pinned host memory": 8}
    promised |= {"labor/three hops": 0.25, "labor/one hop": 0.25}
    promised |= {"gather/512B/pinned host memory": 0.85, "gather/512B/90% cached": 5}
    promised |= {f"fullgraph/rows on the host/{n}/epoch": 0.5 for n in ("1M", "2.45M")}
    promised |= {f"epoch/{where}": 1 / 1.15 for where in ("device memory", "pinned host memory")}
    promised |= {"epoch/device memory, kernels": 1 / 1.10, "epoch/device memory, captured": 1 / 1.05}
    cases = [case for benchmark in load_suite("gpu") for case in benchmark(Workload(FULL))]
    written = {case.name: case.versus[0].target for case in cases}
    assert promised.items() <= written.items() and promised.items() <= judged(cases)
    assert all(case.versus[1].target == 5 for case in cases if case.name.startswith("epoch/") and "," not in case.name)


def test_case_names_are_unique():
    names = [case.name for benchmark in load_suite("gpu") for case in benchmark(Workload(FULL))]
    assert len(set(names)) == len(names)


def test_full_size_graphs_are_as_large_as_promised():
    small, large = graph_sizes(Workload(FULL))
    assert (small.num_nodes, small.num_edges) == (1_000_000, 20_000_000)
    assert (large.num_nodes, large.num_edges) == (2_450_000, 123_700_000)


def test_a_graph_has_the_size_that_was_told_before_it_was_made():
    graph, (_, size) = large_graph(WORKLOAD), graph_sizes(WORKLOAD)
    assert (graph.num_nodes(), graph.num_edges()) == (size.num_nodes, size.num_edges)


@pytest.mark.parametrize("num_bytes", [2_000, 3 << 30])
def test_copies_move_the_bytes_asked_for(num_bytes: int, monkeypatch):
    monkeypatch.setattr("gnnsys.bench.gpu.inputs._COPIED_BYTES", 1 << 20)
    moved = sum(source.nbytes + target.nbytes for source, target in copies(WORKLOAD, num_bytes))
    assert num_bytes * 0.999 < moved <= num_bytes


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "gpu", "--scale", "small"]) == 2
    error = capsys.readouterr().err
    assert "bench gpu needs a GPU" in error and torch.__version__ in error


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
def test_without_a_gpu_all_clocks_are_the_hosts():
    assert [clock(kind) for kind in ("host", "device", "synced")] == [seconds_of] * 3


@needs_gpu
def test_each_side_is_timed_by_its_own_clock():
    assert [clock(kind) for kind in ("host", "device", "synced")] == [seconds_of, device_seconds_of, synced_seconds_of]


@needs_gpu
def test_the_devices_clock_sees_work_that_the_hosts_does_not():
    rows = torch.ones(1 << 28, device="cuda")

    def copy_often() -> None:
        for _ in range(8):
            rows.clone()

    copy_often()
    torch.cuda.synchronize()
    assert device_seconds_of(copy_often) == pytest.approx(synced_seconds_of(copy_often), rel=0.5)
    assert device_seconds_of(copy_often) > 5e-4


@needs_gpu
def test_a_cases_memory_is_given_back():
    before = torch.cuda.memory_reserved()

    def sides() -> dict[str, Side]:
        rows = torch.ones(1 << 28, device="cuda")
        return {OURS: Side(lambda: rows.sum(), clock="device")}

    measure(Case("memory", milliseconds(), sides, (), repeats=1), RoundLimits())
    assert torch.cuda.memory_reserved() <= before


@needs_gpu
def test_the_json_names_the_gpu(tmp_path: Path):
    target = tmp_path / "rows.json"
    assert main(["bench", "gpu", "--scale", "small", "--only", "compact/110", "--json", str(target)]) == 0
    written = json.loads(target.read_text())
    assert written["quick"] is True
    assert written["environment"]["gpu"]["name"] == torch.cuda.get_device_name()
    assert {"driver", "cuda", "memory", "l2"} <= set(written["environment"]["gpu"])
