"""What a session must not wait for, must not leave in the store, and must tell instead of hanging."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

import gnnsys
from gnnsys.session import current
from tests.support.processes import run_ranks
from tests.support.spare_servers import SPARES

PROGRAM = """
import json, os, signal, threading, torch, torch.distributed as dist, gnnsys
told = {}

try:
    gnnsys.init(timeout=120, process_group=os.environ["RANK"] == "0")
except ValueError as error:
    told["different"] = str(error)

session = gnnsys.init(timeout=120)
told["collectives"] = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
store, nonce = session.group._store, session.group.nonce
session.barrier()
told["stored"] = [name for name in ("endpoints/0/all", "key/0") if store.check([f"gnnsys/{nonce}/{name}"])]
session.barrier()
reader, writer = os.pipe()
child = os.fork()
if not child:
    said = []
    for act in (session.barrier, session.status, lambda: session.open("."), session.close):
        try:
            act()
        except ValueError as error:
            said.append(str(error))
    os.write(writer, json.dumps(said).encode())
    signal.pause()
told["forked"] = json.loads(os.read(reader, 65536))

other = gnnsys.init(timeout=120)
session.barrier()
closing = [threading.Thread(target=session.close) for _ in range(2)]  # rank by rank, and from wherever
for thread in closing:
    thread.start()
for thread in closing:
    thread.join()
told["closed"] = session._servers.own and session._servers.own.returncode
os.kill(child, signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
told["other"] = [float(total), gnnsys.session.current() is other, len(other.status())]
other.close()
told["other"] += [dist.is_initialized()]

print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told():
    """What both ranks saw of three sessions, the last of which was begun before the one before it was closed."""
    return [json.loads(rank.stdout) for rank in run_ranks(PROGRAM, 2, environment={SPARES: "4"})]


def test_ranks_that_differ_about_the_process_group_are_told_instead_of_waiting(told):
    for rank in told:
        assert "rank 0 and ranks 1 differ: init makes a process group" in rank["different"]
        assert "init makes no process group on rank 1" in rank["different"]


def test_collectives_have_the_time_that_torch_gives_them_not_that_of_init(told):
    assert [rank["collectives"] for rank in told] == [1800, 1800]


def test_the_key_of_a_job_does_not_stay_in_the_store(told):
    assert [rank["stored"] for rank in told] == [["endpoints/0/all"]] * 2


def test_closing_does_not_wait_for_forked_children(told):
    """A server that waits for its pipe, of which the child has a copy, is killed in the end: its code says so."""
    assert told[0]["closed"] == 0


def test_a_forked_child_is_told_that_the_session_is_its_parents(told):
    for rank in told:
        assert len(rank["forked"]) == 3  # and may close it, which is nothing
        assert all("this session belongs to process" in text and "Fork before" in text for text in rank["forked"])


def test_a_session_that_is_closed_leaves_the_process_group_to_one_that_was_begun_meanwhile(told):
    assert [rank["other"] for rank in told] == [[2.0, True, 1, False]] * 2


def test_a_close_that_is_interrupted_ends_everything_all_the_same():
    def interrupt(wait):
        raise KeyboardInterrupt

    before = current()  # of another test of this process, perhaps
    session = gnnsys.init()
    session.before_close.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert current() is before and session.is_closed and not dist.is_initialized()
