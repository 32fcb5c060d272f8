"""Whatever a job leaves behind in its process: the next job computes there what it computes in a fresh one."""

from __future__ import annotations

import json

import pytest
import torch

from tests.jobs.polluters import IDIOMS, POLLUTERS
from tests.support.processes import run_code

# Processes are forked from one that has trained, which torch with CUDA refuses.
pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA cannot train after a fork")

REPORT = "import sys; from tests.jobs.polluters import report; report(*sys.argv[1:])"


def check(*arguments: str) -> None:
    ended = run_code(REPORT, *arguments)
    assert ended.returncode == 0, ended
    seen, wrong = list[str](), list[str]()
    for line in ended.stdout.splitlines():
        told = json.loads(line)
        seen += told["names"]
        is_kept = POLLUTERS[told["names"][0]][1]
        if told.get("error") or told["other"] or (is_kept is not None and bool(told["changed"]) == is_kept):
            wrong.append(line)
    assert sorted(seen) == sorted(POLLUTERS) and len(POLLUTERS) >= 128 and len(IDIOMS) >= 34
    assert not wrong, "\n".join(wrong)


def test_what_a_job_leaves_behind_changes_no_bit_of_the_next_one_or_its_worker_is_replaced() -> None:
    check()


@pytest.mark.long  # all that is put back goes through one process above
def test_each_thing_that_is_put_back_is_put_back_by_itself() -> None:
    check("whole")
