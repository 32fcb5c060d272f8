"""Ranks that a benchmark starts on this machine: each is told who it is, and one that fails is a failure of all."""

from __future__ import annotations

import json
import subprocess

import pytest

from gnnsys.bench.local_ranks import run_local_ranks

SECONDS = 120.0
PROGRAM = """
import json, os, sys
names = ["RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
print(json.dumps({name: os.environ[name] for name in names}))
sys.exit(int(os.environ["RANK"]) * int(os.environ["FAILS"]))
"""


def test_every_rank_is_a_machine_of_its_own_in_one_job():
    told = [json.loads(text) for text in run_local_ranks(["-c", PROGRAM], 2, SECONDS, {"FAILS": "0"})]
    for rank, each in enumerate(told):
        assert each["RANK"] == each["GROUP_RANK"] == str(rank)
        assert each["WORLD_SIZE"] == each["GROUP_WORLD_SIZE"] == "2"
        assert (each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]


def test_a_rank_that_fails_fails_the_job():
    with pytest.raises(RuntimeError, match=r"a rank failed: \[0, 1\]"):
        run_local_ranks(["-c", PROGRAM], 2, SECONDS, {"FAILS": "1"})


def test_all_ranks_share_one_deadline_and_none_outlives_it(monkeypatch: pytest.MonkeyPatch):
    """A clock that a second passes on at every look: the second rank has less left than the first."""
    looks, left, started = iter(range(1000)), [], []

    class Asked(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

        def communicate(self, input=None, timeout=None):
            left.append(timeout)
            if len(left) == 2:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return "", None

    clock = type("Clock", (), {"monotonic": staticmethod(lambda: float(next(looks)))})
    monkeypatch.setattr("gnnsys.bench.local_ranks.time", clock)
    monkeypatch.setattr("gnnsys.bench.local_ranks.subprocess.Popen", Asked)
    with pytest.raises(subprocess.TimeoutExpired):
        run_local_ranks(["-c", "input()"], 2, SECONDS)
    assert left == [SECONDS - 1, SECONDS - 2]
    assert all(process.returncode is not None for process in started)
