"""What a session must not wait for, must not leave in the store, and must tell instead of hanging."""

from __future__ import annotations

import json

import pytest

from tests.processes import run_ranks

PROGRAM = """
import json, os, signal, time, torch, torch.distributed as dist, gnnsys
told = {}

try:
    gnnsys.init(timeout=30, process_group=os.environ["RANK"] == "0")
except ValueError as error:
    told["different"] = str(error)

session = gnnsys.init(timeout=30)
told["collectives"] = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
store, nonce = session.group._store, session.group.nonce
session.barrier()
told["stored"] = [name for name in ("endpoints/0/all", "key/0") if store.check([f"gnnsys/{nonce}/{name}"])]
session.barrier()
child = os.fork()
if not child:
    signal.pause()
began = time.monotonic()
session.close()
told["closed"] = [time.monotonic() - began, session._server and session._server.returncode]
os.kill(child, signal.SIGKILL)

print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told():
    """What both ranks saw of two sessions, one after the other."""
    return [json.loads(rank.stdout) for rank in run_ranks(PROGRAM, 2)]


def test_ranks_that_differ_about_the_process_group_are_told_instead_of_waiting(told):
    for rank in told:
        assert "rank 0 and ranks 1 differ: init makes a process group" in rank["different"]
        assert "init makes no process group on rank 1" in rank["different"]


def test_collectives_have_the_time_that_torch_gives_them_not_that_of_init(told):
    assert [rank["collectives"] for rank in told] == [1800, 1800]


def test_the_key_of_a_job_does_not_stay_in_the_store(told):
    assert [rank["stored"] for rank in told] == [["endpoints/0/all"]] * 2


def test_closing_does_not_wait_for_forked_children(told):
    took, code = told[0]["closed"]
    assert took < 9 and code == 0
