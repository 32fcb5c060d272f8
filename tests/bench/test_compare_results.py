"""Verdicts on generated samples of realistic noise: many seeds, false alarms and misses counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gnnsys.bench import compare_results, read_results
from gnnsys.bench.compare_results import LEAST_REPEATS, ratio_interval
from gnnsys.bench.results import CaseSamples, Results
from gnnsys.cli import main

REPEATS = 10
SEEDS = 50


def times(rng: np.random.Generator, kind: str, spread: float, count: int = REPEATS) -> np.ndarray:
    """Milliseconds around 100. kind: what disturbs them beside the usual noise."""
    noise = rng.normal(0, spread, count)
    if kind == "outliers":  # another process, now and then
        noise += (rng.random(count) < 0.1) * np.abs(rng.normal(0, 0.08, count))
    elif kind == "drift":  # a machine that gets warm
        noise += np.linspace(0, 0.02, count)
    elif kind == "waves":  # a noise that lasts for more than one repeat
        for i in range(1, count):
            noise[i] = 0.4 * noise[i - 1] + np.sqrt(1 - 0.16) * noise[i]
    return 100 * np.exp(noise)


def results(samples: dict[str, np.ndarray], others: dict[str, np.ndarray] | None = None, more: bool = False) -> Results:
    controls = {name: list(values) for name, values in (others or {}).items()}
    unit = "seeds/s" if more else "ms"
    cases = {name: CaseSamples(name, unit, more, list(values), controls) for name, values in samples.items()}
    return Results(Path("made"), cases)


def count_verdicts(kind: str, spread: float, factor: float) -> dict[str, int]:
    """Of a case whose second result takes `factor` times as long."""
    found: dict[str, int] = {}
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        before, after = times(rng, kind, spread), factor * times(rng, kind, spread)
        (change,) = compare_results(results({"case": before}), results({"case": after}), resamples=500)
        found[change.verdict] = found.get(change.verdict, 0) + 1
    return found


@pytest.mark.parametrize(
    ("kind", "spread"), [("noise", 0.005), ("noise", 0.015), ("outliers", 0.015), ("drift", 0.015), ("waves", 0.015)]
)
def test_ten_repeats_tell_five_percent_from_noise(kind: str, spread: float):
    same, slower, faster = (count_verdicts(kind, spread, factor) for factor in (1.0, 1.05, 1 / 1.05))
    assert SEEDS - same.get("no difference", 0) <= 0.03 * SEEDS
    least = 0.8 if kind == "outliers" else 0.9
    assert slower.get("slower", 0) >= least * SEEDS and "faster" not in slower
    assert faster.get("faster", 0) >= least * SEEDS and "slower" not in faster


def test_a_table_of_many_cases_has_few_false_alarms():
    """Forty cases of the same code: of twenty tables hardly one says anything but "no difference"."""
    wrong = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        before, after = ({f"case {i}": times(rng, "noise", 0.02) for i in range(40)} for _ in range(2))
        changes = compare_results(results(before), results(after), resamples=500)
        wrong += any(change.verdict != "no difference" for change in changes)
    assert wrong <= 2


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    held = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        pair = times(rng, "noise", 0.02, 20), 1.1 * times(rng, "noise", 0.02, 20)
        interval = ratio_interval(*pair, more_is_better=False, level=0.05, resamples=500, seed=seed)
        held += interval.low <= 1 / 1.1 <= interval.high
    assert held >= 0.93 * 150


def test_a_machine_that_slows_down_all_sides_is_no_change_of_ours():
    found: dict[str, int] = {}
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        before, after = (
            results({"case": factor * times(rng, "noise", 0.01)}, {"dgl": factor * times(rng, "noise", 0.01)})
            for factor in (1.0, 1.15)
        )
        (change,) = compare_results(before, after, resamples=500)
        assert change.machine == pytest.approx(1 / 1.15, rel=0.03)
        found[change.verdict] = found.get(change.verdict, 0) + 1
    assert found["no difference"] >= 0.98 * SEEDS


def test_a_slow_down_of_ours_is_seen_on_a_machine_that_got_faster():
    rng = np.random.default_rng(0)
    before = results({"case": times(rng, "noise", 0.01)}, {"pyg": times(rng, "noise", 0.01)})
    after = results({"case": 0.95 * times(rng, "noise", 0.01)}, {"pyg": 0.85 * times(rng, "noise", 0.01)})
    (change,) = compare_results(before, after)
    assert change.verdict == "slower" and change.interval.ratio == pytest.approx(0.85 / 0.95, rel=0.02)


def test_more_is_better_where_the_unit_says_so_and_tolerance_decides_what_is_a_difference():
    rng = np.random.default_rng(0)
    rates = times(rng, "noise", 0.002)
    pair = results({"case": rates}, more=True), results({"case": rates[::-1] * 1.03}, more=True)
    (change,) = compare_results(*pair)
    assert (change.verdict, change.is_worse) == ("faster", False)
    assert compare_results(*pair, tolerance=0.05)[0].verdict == "no difference"
    assert compare_results(*pair[::-1])[0].is_worse
    with pytest.raises(ValueError, match="--tolerance must be from 0 to less than 1, got 3"):
        compare_results(*pair, tolerance=3)


def test_no_difference_in_noise_says_what_would_not_be_seen():
    rng = np.random.default_rng(0)
    quiet, noisy = ({"case": times(rng, "noise", spread)} for spread in (0.005, 0.15))
    (change,) = compare_results(results(noisy), results({"case": times(rng, "noise", 0.15)}))
    assert change.verdict == "no difference" and "may not be seen)" in change.line()
    assert 0.05 < change.interval.reach < 1.0 and f"noise: less than {change.interval.reach:.0%}" in change.line()
    (change,) = compare_results(results(quiet), results({"case": times(rng, "noise", 0.005)}))
    assert change.verdict == "no difference" and change.reason is None


def test_counts_that_are_the_same_each_time_and_few_repeats():
    same, zero, more = np.full(5, 12.0), np.zeros(5), np.full(5, 13.0)
    before = results({"same": same, "zero": zero, "more": same, "few": same[:4], "gone": same})
    after = results({"same": same, "zero": zero, "more": more, "few": more[:4]})
    verdicts = {change.name: change.verdict for change in compare_results(before, after)}
    assert verdicts == {
        "same": "no difference", "zero": "no difference", "more": "slower", "few": "too few repeats",
        "gone": "did not run",
    }  # fmt: skip


def report(path: Path, factor: float, seed: int, **more: object) -> Path:
    """As `gnnsys bench SUITE --json` writes it; without more_is_better as it did before."""
    rng = np.random.default_rng(seed)
    ours, peer = 1000 / (factor * times(rng, "noise", 0.005)), 1000 / times(rng, "noise", 0.005)
    row = {"name": "gather/1t", "unit": "GB/s", "ours": 10.0, "peer": 5.0, "ratio": 2.0, "reason": None}
    made = {
        "suite": "ops",
        "environment": {"versions": {"torch": "2.13"}, "processor": "one"},
        "rows": [row],
        "samples": {"gather/1t": {"gnnsys": list(ours), "memcpy": list(peer)}},
    }
    path.write_text(json.dumps(made | more))
    return path


def test_the_command_reads_reports_and_says_by_its_exit_code_that_something_is_slower(tmp_path: Path, capsys):
    before, same = report(tmp_path / "before.json", 1.0, 0), report(tmp_path / "same.json", 1.0, 1)
    slow = report(tmp_path / "slow.json", 1.05, 2, environment={"versions": {"torch": "2.14"}, "processor": "two"})
    assert main(["bench", "compare", str(before), str(same)]) == 0
    said = capsys.readouterr().out
    assert "no difference" in said and "note" not in said
    assert main(["bench", "compare", str(before), str(slow), "--json", str(tmp_path / "out.json")]) == 1
    said = capsys.readouterr().out
    assert "slower" in said and "another version of torch: 2.13 before, 2.14 after" in said
    (change,) = json.loads((tmp_path / "out.json").read_text())
    assert change["verdict"] == "slower" and change["interval"][0] < change["ratio"] < change["interval"][1] < 1
    assert main(["bench", "compare", str(before), str(slow), "--tolerance", "0.1"]) == 0


def test_a_folder_is_all_of_its_files_and_repeats_of_a_case_add_up(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    for number in range(3):
        report(tmp_path / "runs" / f"{number}.json", 1.0, number)
    (case,) = read_results(tmp_path / "runs").cases.values()
    assert len(case.ours) == 3 * REPEATS == len(case.others["memcpy"]) and case.more_is_better


def test_what_is_written_today_can_be_compared(tmp_path: Path, capsys):
    file = tmp_path / "ops.json"
    assert main(["bench", "ops", "--quick", "--only", "gather_rows/512B/1t", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["more_is_better"] == {"gather_rows/512B/1t": True}
    assert main(["bench", "compare", str(file), str(file)]) == 0
    repeats = len(json.loads(file.read_text())["samples"]["gather_rows/512B/1t"]["gnnsys"])
    assert ("1 no difference" if repeats >= LEAST_REPEATS else "1 too few repeats") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (["gone.json", "gone.json"], "gone.json is not there: give a file of"),
        (["good.json"], "write `gnnsys bench compare BEFORE AFTER`; got 1 files"),
        (["good.json", "text.json"], "text.json is not JSON"),
        (["good.json", "other.json"], "other.json is not a result of"),
        (["good.json", "empty"], "empty holds no results of a benchmark"),
        (["good.json", "foreign.json"], "have no case in common"),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(tmp_path: Path, monkeypatch, capsys, told, message):
    monkeypatch.chdir(tmp_path)
    report(Path("good.json"), 1.0, 0)
    report(Path("foreign.json"), 1.0, 0, rows=[{"name": "x", "unit": "ms", "ours": 1, "peer": None, "ratio": None}])
    Path("text.json").write_text("not json")
    Path("other.json").write_text("{}")
    Path("empty").mkdir()
    assert main(["bench", "compare", *told]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
