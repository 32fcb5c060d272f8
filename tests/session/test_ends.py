"""What a session must not wait for, must not leave in the store, and must tell instead of hanging."""

from __future__ import annotations

from tests.processes import run_ranks

FORKED = """
import os, signal, sys, time, gnnsys
from datetime import timedelta
import torch, torch.distributed as dist
from gnnsys.comm.keys import Keys
session = gnnsys.init(timeout=20)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
assert backend.options._timeout == timedelta(minutes=30), backend.options._timeout
if session.rank == 0:
    store, nonce = session.group._store, session.group.nonce
    assert store.check([f"gnnsys/{nonce}/endpoints/0/all"]), "the store is not laid out as this test expects"
    assert not store.check([f"gnnsys/{nonce}/key/0"]), "the key is still in the store"
session.barrier()
child = os.fork()
if not child:
    signal.pause()
began = time.monotonic()
session.close()
print(time.monotonic() - began, session._server and session._server._process.returncode)
os.kill(child, signal.SIGKILL)
"""


def test_the_key_leaves_the_store_and_closing_does_not_wait_for_forked_children():
    took, code = run_ranks(FORKED, 2)[0].stdout.split()
    assert float(took) < 5 and code == "0"


DIFFERENT = """
import os, gnnsys
try:
    gnnsys.init(timeout=20, process_group=os.environ["RANK"] == "0")
except ValueError as error:
    print(error)
"""


def test_ranks_that_differ_about_the_process_group_are_told_instead_of_waiting():
    for rank in run_ranks(DIFFERENT, 2):
        assert "rank 0 and ranks 1 differ: init makes a process group" in rank.stdout
        assert "init makes no process group on rank 1" in rank.stdout


SERVER_DIES = """
import os, signal, time, gnnsys
session = gnnsys.init(timeout=20, process_group=False)
session.barrier()
if session.rank == 0:
    os.kill(session.status()[0]["pid"], signal.SIGKILL)
    began = time.monotonic()
    try:
        session.status()
    except gnnsys.comm.PeerLost as error:
        print(time.monotonic() - began, error)
session.close(wait=False)
"""


def test_a_machine_learns_at_once_that_its_own_server_has_ended():
    took, _, text = run_ranks(SERVER_DIES, 2)[0].stdout.partition(" ")
    assert float(took) < 5 and "the graph server of machine 0" in text and "exit code -9" in text
