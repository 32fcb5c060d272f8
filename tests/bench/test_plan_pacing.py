"""Paced beside plain: what is made of the ranks' figures, and the job itself without a lab."""

from __future__ import annotations

import json

import pytest

from gnnsys.bench.plan.pacing import QUICK, PacingSettings, WayFigures, summarize
from gnnsys.bench.plan.pacing_rank import FIGURES, FROM_ALL, FROM_ONE, PACED, PLAIN, PacingTask
from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from tests.support.processes import run_ranks

PROGRAM = """
import sys
from pathlib import Path
from gnnsys.bench.plan.pacing_rank import main
main(Path(sys.argv[1]), sys.argv[2])
"""


def test_figures_are_medians_over_turns_of_the_slowest_rank():
    def told(turn: int, way: str, pulled: list, epoch: list) -> dict:
        return {"pattern": FROM_ONE, "way": way, "turn": turn, "pulled": pulled, "epoch": epoch}

    hub = [told(turn, way, [], []) for turn in range(3) for way in (PLAIN, PACED)]
    first = [told(turn, way, [(10.0, 11.0 + turn)], [(0.0, 5.0)]) for turn in range(3) for way in (PLAIN, PACED)]
    second = [told(turn, way, [(11.0, 14.0)], [(1.0, 5.0 + 2 * turn)]) for turn in range(3) for way in (PLAIN, PACED)]
    found = summarize([hub, first, second], 6e6)
    assert set(found) == {(FROM_ONE, PLAIN), (FROM_ONE, PACED)}
    # Pulls last from 10 to 14 s; the slowest flow takes 3 s, over means of 2, 2.5 and 3 s; epochs end at 5, 7 and 9 s.
    assert found[FROM_ONE, PACED] == WayFigures(goodput=3.0, worst_flow=pytest.approx(1.2), epoch=7.0)


def test_three_ranks_pull_and_train_in_both_patterns_and_ways(tmp_path):
    graph = sbm(600, num_classes=3, avg_degree=8.0, homophily=0.9, num_features=16)
    partition_graph(graph, 3, tmp_path / "parts", edge_ids=False)
    task = PacingTask(rate="800mbit", megabytes=0.2, batches=2, batch_size=20, turns=1)
    task.save(tmp_path)
    assert PacingTask.load(tmp_path) == task
    ended = run_ranks(PROGRAM, [1, 1, 1], tmp_path, tmp_path / "parts")
    (line,) = [line for line in ended[0].stdout.splitlines() if line.startswith(FIGURES)]
    everyone = json.loads(line.removeprefix(FIGURES))
    by_key = {(told["pattern"], told["way"]): [rank[n] for rank in everyone] for n, told in enumerate(everyone[0])}
    assert len(by_key) == 4
    for (pattern, _), ranks in by_key.items():
        assert [len(rank["pulled"]) for rank in ranks] == ([0, 1, 1] if pattern == FROM_ONE else [2, 0, 0])
        assert [len(rank["epoch"]) for rank in ranks] == ([0, 1, 1] if pattern == FROM_ONE else [1, 0, 0])
    found = summarize(everyone, 2e5)
    assert set(found) == {(pattern, way) for pattern in (FROM_ONE, FROM_ALL) for way in (PLAIN, PACED)}
    assert all(each.goodput > 0 and each.worst_flow >= 1 and each.epoch > 0 for each in found.values())


def test_the_quick_size_is_smaller_in_everything():
    quick, full = PacingSettings(**QUICK), PacingSettings()
    assert quick.hosts == 2 and full.hosts == 8
    assert all(getattr(quick, name) < getattr(full, name) for name in QUICK)
