"""Servers and ranks that are killed under a job of two machines whose ranks sample and gather on a GPU."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from gnnsys.partition import write_parts
from tests.partition.part_graphs import random_assignment
from tests.sampling.machines import homogeneous
from tests.support.processes import processes, start_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GIVEN_UP = 100.0  # seconds: who is not told waits for the end of the time that a request has, which is 120

JOB = """
import hashlib, json, os, select, signal, sys, time, torch, gnnsys
session = gnnsys.init(timeout=120, lost_after=10, process_group=False)
graph = gnnsys.open(sys.argv[1], **({} if sys.argv[2] == "cpu" else {"device": "cuda:0"}))
loader = gnnsys.NeighborLoader(
    graph, [6, 4], input_nodes=graph.from_global(range(session.rank, graph.num_nodes(), 2)), batch_size=8,
    shuffle=True, seed=3,
)
pids = session.group.gather("pids", os.getpid())

def server():
    return session.status()[1]["pid"]

def end(pid):
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([ended], [], [], 120)[0]

def digests(disturb=None):
    found = []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            if (epoch, number) == (0, 2) and disturb is not None:
                session.barrier()
                if session.rank == 0:
                    disturb()
                session.barrier()
            assert batch.x.device.type == sys.argv[2]
            whole = hashlib.sha256()
            for array in (batch.n_id, batch.edge_index, batch.e_id, batch.x):
                whole.update(array.cpu().contiguous().numpy().tobytes())
            found.append(whole.hexdigest())
    return found

unbroken = digests()
told = {"batches": len(unbroken)}
loader.close()
loader = gnnsys.NeighborLoader(
    graph, [6, 4], input_nodes=graph.from_global(range(session.rank, graph.num_nodes(), 2)), batch_size=8,
    shuffle=True, seed=3,
)
told["is equal"] = digests(lambda: end(server())) == unbroken
session.barrier()
if session.rank == 1:
    print(json.dumps(told), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    while True:  # a batch or two may have all that it needs
        digests()
except (gnnsys.ShardLost, gnnsys.TrainerLost) as error:
    told["lost"] = type(error).__name__, time.monotonic() - began
print(json.dumps(told), flush=True)
os._exit(0)
"""


def test_a_killed_server_costs_no_batch_and_a_killed_rank_is_named_to_the_other(tmp_path) -> None:
    graph = homogeneous()
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "parts")
    with processes() as running:
        start_ranks(running, JOB, [1, 1], tmp_path / "parts", "cuda", environment={"OMP_NUM_THREADS": "1"})
        ended = running.wait(240)
    assert [rank.returncode for rank in ended] == [0, -signal.SIGKILL], "\n".join(map(str, ended))
    told = [json.loads(rank.stdout.splitlines()[-1]) for rank in ended]
    for rank in told:
        assert rank["batches"] == 2 * 8 and rank["is equal"]
    kind, seconds = told[0]["lost"]
    assert kind in ("ShardLost", "TrainerLost") and seconds < GIVEN_UP
