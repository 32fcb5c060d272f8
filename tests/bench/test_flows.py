"""The suite of flows: its rows and goals, without a lab, and its program with a server and clients of this host."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gnnsys.bench import SuiteOptions, run_suite
from gnnsys.bench.flows.urgent import GOAL, MORE, QUICK, SUM, WAYS, UrgentSettings, urgent_behind_bulk
from gnnsys.bench.flows.urgent_peer import ALONE, AUTO, BULK, BULK_ALONE, FIFO, FIGURES, OTHERS, SAME
from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.bench.workload import Sizes, Workload
from tests.bench.verdicts import judged


def test_every_rate_and_way_has_its_goals_and_a_missing_lab_is_a_reason(monkeypatch):
    with Workload(Sizes(2_000, 20_000)) as work:
        cases = list(urgent_behind_bulk(work))
    rows = judged(cases)
    for way in WAYS:
        of = f"urgent behind bulk at 100mbit, {way}"
        assert (f"{of}/to the same process", 1.0) in rows and (f"{of}/bulk and urgent", 1 / MORE) in rows
    peers = {peer for case in cases for versus in case.versus for peer in versus.peers}
    assert peers == {FIFO, GOAL, SUM}
    monkeypatch.setattr("gnnsys.bench.flows.urgent.check_lab", missing_lab)
    report = run_suite("flows", [urgent_behind_bulk], SuiteOptions(quick=True), show=lambda line: None)
    assert {(row.ours, row.reason) for row in report.rows} == {(None, "the lab needs root")}
    assert report.failures() == []


def missing_lab():
    from gnnsys.bench.case import NotHere

    raise NotHere("the lab needs root")


@pytest.mark.parametrize("encrypts", [True, False])
def test_a_server_is_asked_in_both_orders(encrypts, tmp_path):
    UrgentSettings(**{**QUICK, "bulk": 300_000, "turns": 1}).task(encrypts).save(tmp_path)
    command = [sys.executable, "-m", "gnnsys.bench.flows.urgent_peer", str(tmp_path)]
    started = []
    try:
        for words in (["serve", "127.0.0.1"], ["bulk", "10"]):
            started.append(subprocess.Popen([*command, *words], env=trainer_environment()))
        asked = subprocess.run(
            [*command, "ask"], env=trainer_environment(), capture_output=True, text=True, timeout=120, check=True
        )
    finally:
        for process in started:
            process.kill()
            process.wait(30)
    (line,) = asked.stdout.splitlines()
    found = json.loads(line.removeprefix(FIGURES))
    assert found.keys() == {AUTO, FIFO}
    for figures in found.values():
        assert {name: len(seconds) for name, seconds in figures.items()} == {
            ALONE: 1, SAME: 1, OTHERS: 2, BULK: 1, BULK_ALONE: 1,
        }  # fmt: skip
