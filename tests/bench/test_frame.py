"""The frame of all benchmarks: turns, rows, ratios, verdicts. Sides here count their calls instead of doing work."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gnnsys.bench import (
    OURS,
    Case,
    Report,
    Side,
    SuiteOptions,
    Versus,
    Workload,
    megabytes,
    milliseconds,
    rate,
    run_suite,
    score,
)
from gnnsys.bench.case import NotHere, of_peer
from gnnsys.bench.measure import Measured, RoundLimits, measure, peak_extra_bytes
from gnnsys.bench.suite import few_names

ROW_FIELDS = ["name", "unit", "ours", "peer", "peer_name", "ratio", "limit", "target", "met", "reason"]


def case_of(
    samples: dict[str, float], *versus: Versus, unit=None, refused: dict[str, str] | None = None, **options
) -> tuple[Case, Measured]:
    """A case and one round of samples for it, as if measured."""
    sides = {name: Side(lambda: None) for name in samples}
    case = Case("case", unit or milliseconds(), lambda: sides, versus, **options)
    return case, Measured({name: [value] for name, value in samples.items()}, refused or {})


def row_of(samples: dict[str, float], *versus: Versus, **options):
    return Report("test", quick=False).add(*case_of(samples, *versus, **options))[0]


def test_sides_take_turns_after_one_warm_up_each():
    order: list[str] = []
    sides = {name: Side(lambda name=name: order.append(name)) for name in (OURS, "peer", "other")}
    samples = measure(Case("turns", milliseconds(), lambda: sides, (), repeats=2), RoundLimits()).samples
    assert order == [OURS, "peer", "other"] * 3
    assert {name: len(values) for name, values in samples.items()} == {OURS: 2, "peer": 2, "other": 2}


def test_each_side_runs_on_its_own_number_of_threads_and_the_old_number_comes_back():
    before = torch.get_num_threads()
    seen: dict[str, int] = {}
    sides = {
        OURS: Side(lambda: seen.__setitem__("ours", torch.get_num_threads()), threads=2),
        "peer": Side(lambda: seen.__setitem__("peer", torch.get_num_threads()), threads=1),
    }
    measure(Case("threads", milliseconds(), lambda: sides, (), repeats=1), RoundLimits())
    assert seen == {"ours": 2, "peer": 1}
    assert torch.get_num_threads() == before


def test_a_side_that_takes_longer_gets_a_larger_figure():
    sides = {OURS: Side(lambda: None), "peer": Side(lambda: time.sleep(0.02))}
    report = Report("test", quick=False)
    case = Case("sleep", milliseconds(), lambda: sides, (Versus(("peer",), target=2.0),), repeats=3)
    [row] = report.add(case, measure(case, RoundLimits()))
    assert row.peer is not None and 20 <= row.peer < 20_000
    assert row.met is True


def test_rounds_stop_when_the_time_is_spent():
    sides = {OURS: Side(lambda: time.sleep(0.01))}
    measured = measure(Case("budget", milliseconds(), lambda: sides, ()), RoundLimits(least=2, most=1000, seconds=0.05))
    assert 2 <= len(measured.samples[OURS]) < 100


def test_results_that_differ_from_ours_stop_the_case():
    sides = {OURS: Side(lambda: torch.ones(3)), "peer": Side(lambda: torch.full((3,), 1.5))}
    case = Case("disagree", milliseconds(), lambda: sides, (), agree=1e-3, repeats=1)
    with pytest.raises(RuntimeError, match=r"peer and gnnsys are 0\.5 of the result apart"):
        measure(case, RoundLimits())


def test_less_time_is_a_bigger_ratio():
    assert row_of({OURS: 0.1, "peer": 0.3}, Versus(("peer",))).ratio == pytest.approx(3.0)


def test_more_work_per_second_is_a_bigger_ratio():
    row = row_of({OURS: 0.1, "peer": 0.3}, Versus(("peer",)), unit=rate("GB/s", 6.0))
    assert (row.ours, row.peer) == (pytest.approx(60.0), pytest.approx(20.0))
    assert row.ratio == pytest.approx(3.0)


def test_a_score_is_what_a_side_returns_and_more_of_it_is_better():
    sides = {OURS: Side(lambda: 60.0), "peer": Side(lambda: 20.0), "bound": Side(lambda: 80.0)}
    case = Case("score", score("samples/s"), lambda: sides, (Versus(("peer", "bound"), pick="worst"),), repeats=1)
    [row] = Report("test", quick=False).add(case, measure(case, RoundLimits()))
    assert (row.ours, row.peer_name, row.ratio) == (60.0, "peer", pytest.approx(3.0))


def test_less_memory_is_a_bigger_ratio():
    row = row_of({OURS: 10e6, "peer": 20e6}, Versus(("peer",)), unit=megabytes())
    assert (row.ours, row.ratio) == (pytest.approx(10.0), pytest.approx(2.0))


def test_the_best_of_several_peers_is_the_one_to_beat():
    row = row_of({OURS: 1.0, "slow": 9.0, "fast": 2.0}, Versus(("slow", "fast"), target=3.0))
    assert (row.peer_name, row.met) == ("fast", False)


def test_a_bound_made_of_parts_is_the_worst_of_them():
    row = row_of({"epoch": 1.1, "load": 1.0, "compute": 0.4}, Versus(("load", "compute"), pick="worst"), ours="epoch")
    assert (row.peer_name, row.ratio) == ("load", pytest.approx(1 / 1.1))


def test_the_limit_is_the_figure_of_the_side_it_names():
    row = row_of({OURS: 2.0, "peer": 3.0, "memcpy": 1.5}, Versus(("peer",)), limit="memcpy")
    assert row.limit == pytest.approx(1500.0)


def test_a_missed_target_is_a_failure_and_a_met_one_is_not():
    report = Report("test", quick=False)
    report.add(*case_of({OURS: 1.0, "peer": 1.1}, Versus(("peer",), target=1.2), Versus(("peer",), target=1.05)))
    assert [row.met for row in report.rows] == [False, True]
    assert report.failures() == ["case beside peer: ratio 1.10, target 1.20"]


def test_a_required_peer_that_is_not_installed_is_named_as_a_failure():
    report = Report("test", quick=False)
    versus = (Versus(("dgl",), target=1.2), Versus(("torch-sparse",), required=False))
    missing = {"dgl": "dgl is not installed", "torch-sparse": "torch-sparse is not installed"}
    report.add(*case_of({OURS: 1.0}, *versus, missing=missing))
    assert report.failures() == ["did not run: case beside dgl: dgl is not installed"]
    assert report.absent == missing
    assert [(row.ours, row.peer, row.ratio, row.met) for row in report.rows] == [(1000.0, None, None, None)] * 2


def raising(error: Exception, after: int = 0) -> Callable[[], None]:
    """A call that works so many times, and then raises."""
    calls = iter(range(after))

    def call() -> None:
        if next(calls, None) is None:
            raise error

    return call


REFUSALS = {
    "DGL's own": (
        ValueError("[10:14:09] /opt/dgl/spmm.h:81: Check  notnull: edges \nStack trace:"),
        "/opt/dgl/spmm.h:81",
    ),
    "no memory": (MemoryError("Unable to allocate 3 TiB"), "out of memory: Unable to allocate 3 TiB"),
    "no memory on the device": (torch.OutOfMemoryError("Tried to allocate"), "out of memory: Tried to allocate"),
    "not made": (NotImplementedError(), "NotImplementedError"),
}


@pytest.mark.parametrize("after", [0, 2])
def test_a_peer_that_raises_is_a_row_with_the_reason_and_neither_a_miss_nor_a_win(after: int):
    for error, reason in REFUSALS.values():
        sides = {
            OURS: Side(lambda: None),
            "dgl": of_peer(lambda error=error: raising(error, after)),
            "pyg": Side(lambda: None),
        }
        versus = (Versus(("dgl",), target=1e9), Versus(("dgl", "pyg")), Versus(("pyg", "dgl"), pick="worst"))
        case = Case("attention", milliseconds(), lambda sides=sides: sides, versus, repeats=5)
        shown: list[str] = []
        report = run_suite("test", [lambda _, case=case: iter([case])], SuiteOptions(), show=shown.append)
        alone, best, bound = report.rows
        assert report.failures() == [] and alone.met is None
        assert (alone.ours is not None, alone.peer, alone.ratio) == (True, None, None)
        assert best.peer_name == "pyg" and best.ratio is not None, "the best of those that can"
        assert bound.ratio is None, "half a bound is none"
        assert all(row.reason and reason in row.reason for row in report.rows)
        assert reason in report.to_json()["refused"]["attention"]["dgl"]
        assert sum(reason in line for line in shown) == 4 and "Stack trace" not in "".join(shown)


def test_a_peer_that_cannot_be_built_is_a_reason_too():
    def make() -> Callable[[], None]:
        raise RuntimeError("no kernel for this processor")

    case = Case("built", milliseconds(), lambda: {OURS: Side(lambda: None), "peer": of_peer(make)}, (), repeats=1)
    assert measure(case, RoundLimits()).refused == {"peer": "RuntimeError: no kernel for this processor"}


def test_what_a_side_of_ours_raises_is_a_failure_though_it_stands_as_a_peer():
    sides = {OURS: Side(lambda: None), "one thread": Side(raising(RuntimeError("broken")))}
    with pytest.raises(RuntimeError, match="broken"):
        measure(Case("ours", milliseconds(), lambda: sides, (Versus(("one thread",)),)), RoundLimits())


def test_quick_runs_judge_nothing():
    report = Report("test", quick=True)
    report.add(*case_of({OURS: 9.0, "peer": 1.0}, Versus(("peer",), target=1.2)))
    assert report.rows[0].met is None
    assert report.failures() == []


def two_cases(work: Workload) -> Iterator[Case]:
    for name in ("alpha/one", "beta/two"):
        sides = {OURS: Side(lambda: None), "peer": Side(lambda: None)}
        yield Case(name, milliseconds(), lambda sides=sides: sides, (Versus(("peer",)),), repeats=1)


def broken_case(work: Workload) -> Iterator[Case]:
    yield Case("gamma", milliseconds(), lambda: {OURS: Side(lambda: 1 // 0)}, (Versus(("peer",)),))


def test_only_selects_by_part_of_the_name():
    report = run_suite("test", [two_cases], SuiteOptions(only="two"), show=lambda line: None)
    assert [row.name for row in report.rows] == ["beta/two"]
    report = run_suite("test", [two_cases], SuiteOptions(only="beta|alpha"), show=lambda line: None)
    assert [row.name for row in report.rows] == ["alpha/one", "beta/two"]


def test_only_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="'delta' matches none of: alpha/one, beta/two"):
        run_suite("test", [two_cases], SuiteOptions(only="delta"), show=lambda line: None)


def test_of_many_names_an_error_has_how_they_begin():
    names = [f"jobs/{group}/case {number}, {what}" for group in "ab" for number in range(30) for what in ("s", "MB")]
    assert few_names(names[:24]) == ", ".join(names[:24])
    assert few_names(names) == "jobs/a..., jobs/b... (120 cases in all)"
    assert len(few_names([f"case{number}" for number in range(99)])) < 300


def test_lab_selects_what_runs_on_the_lab_and_only_among_it():
    def with_lab(work: Workload) -> Iterator[Case]:
        yield from two_cases(work)
        for name in ("lab/one", "lab/two"):
            sides = {OURS: Side(lambda: None), "peer": Side(lambda: None)}
            yield Case(name, milliseconds(), lambda sides=sides: sides, (Versus(("peer",)),), repeats=1)

    report = run_suite("test", [with_lab], SuiteOptions(lab=True), show=lambda line: None)
    assert [row.name for row in report.rows] == ["lab/one", "lab/two"]
    report = run_suite("test", [with_lab], SuiteOptions(lab=True, only="two"), show=lambda line: None)
    assert [row.name for row in report.rows] == ["lab/two"]
    with pytest.raises(ValueError, match="--lab: no case of this suite begins with lab/"):
        run_suite("test", [two_cases], SuiteOptions(lab=True), show=lambda line: None)


def test_a_case_that_raises_is_reported_and_the_others_still_run():
    report = run_suite("test", [broken_case, two_cases], SuiteOptions(), show=lambda line: None)
    assert [row.name for row in report.rows] == ["gamma", "alpha/one", "beta/two"]
    assert [line.split(":")[:3] for line in report.failures()] == [["did not run", " gamma", " ZeroDivisionError"]]


def lab_case(work: Workload) -> Iterator[Case]:
    def no_lab() -> None:
        raise NotHere("the lab needs root")

    for name, required in (("wanted", True), ("welcome", False)):
        yield Case(name, milliseconds(), lambda: {OURS: Side(no_lab)}, (Versus(("peer",), required=required),))


def test_a_case_that_this_machine_cannot_run_is_missing_and_checked_for_where_it_is_required():
    report = run_suite("test", [lab_case], SuiteOptions(), show=lambda line: None)
    assert [(row.name, row.reason) for row in report.rows] == [
        (name, "the lab needs root") for name in ("wanted", "welcome")
    ]
    assert report.failures() == ["did not run: wanted: the lab needs root"]


def test_the_json_has_the_rows_and_what_they_depend_on(tmp_path: Path):
    report = run_suite("test", [two_cases], SuiteOptions(), show=lambda line: None)
    report.write(tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [list(row) for row in written["rows"]] == [ROW_FIELDS, ROW_FIELDS]
    assert written["environment"]["versions"]["torch"] == torch.__version__
    assert written["environment"]["cores"] >= 1
    assert set(written["samples"]["alpha/one"]) == {OURS, "peer"}


def test_every_row_is_shown_with_its_verdict():
    shown: list[str] = []
    run_suite("test", [two_cases], SuiteOptions(), show=shown.append)
    assert any(line.startswith("alpha/one") for line in shown)
    assert "bigger is better" in shown[-1]


def test_peak_memory_counts_what_was_freed_before_the_call_returned():
    def allocate_and_free() -> None:
        torch.ones(16 << 20).sum()

    assert 60e6 < peak_extra_bytes(allocate_and_free) < 120e6
    assert peak_extra_bytes(lambda: None) < 8e6


def test_what_a_run_made_is_made_once_and_ends_with_it():
    made: list[str] = []

    @contextmanager
    def server() -> Iterator[str]:
        made.append("begun")
        yield "server"
        made.append("ended")

    with Workload() as work:
        folder = work.folder
        for _ in range(2):
            assert work.once("server", lambda: work.enter(server())) == "server"
        assert made == ["begun"] and folder.is_dir()
    assert made == ["begun", "ended"] and not folder.exists()


def test_a_cache_outlives_the_run(tmp_path: Path):
    with Workload(cache=tmp_path / "cache") as work:
        (work.folder / "parts").write_text("kept")
    assert (tmp_path / "cache" / "parts").read_text() == "kept"


def test_what_could_not_be_made_is_not_tried_twice():
    tries: list[int] = []

    def make() -> None:
        tries.append(1)
        raise RuntimeError("no lab here")

    work = Workload()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no lab here"):
            work.once("job", make)
    assert len(tries) == 1
