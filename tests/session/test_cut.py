"""A link between two hosts that is cut: seconds are ridden out, requests in flight included; longer fails on both."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from gnnsys.lab import Lab, available
from gnnsys.lab.lab import wait_all
from gnnsys.partition import write_parts
from tests.partition.part_graphs import homogeneous, random_assignment

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
ROOT = Path(__file__).resolve().parents[2]
CUT_SECONDS, LOST_AFTER = 2.0, 9.0

PROGRAM = """
import hashlib, json, sys, time, torch, gnnsys
told = {}

def pull(graph):  # of the other host too, whatever is kept
    began = time.monotonic()
    graph.node_data["node"]["x"][torch.arange(graph.num_nodes())]
    return time.monotonic() - began

def digests(graph, say):
    found = []
    options = {"input_nodes": torch.arange(graph.num_nodes())[session.rank :: 2], "shuffle": True, "seed": 1}
    for number, batch in enumerate(gnnsys.NeighborLoader(graph, [5, 3], batch_size=1, **options)):
        if number == 3 and say:
            print(say, flush=True)
            deadline = time.monotonic() + 30
            while pull(graph) < 1:  # until one has met the cut
                assert time.monotonic() < deadline
        if say:
            pull(graph)
        found.append(hashlib.sha256(batch.n_id.numpy().tobytes() + batch.x.numpy().tobytes()).hexdigest())
    return found

session = gnnsys.init(timeout=60, lost_after=float(sys.argv[2]), process_group=False)
graph = gnnsys.open(sys.argv[1])
told["unbroken"] = digests(graph, "")
session.barrier()
began = time.monotonic()
told["cut"] = digests(graph, "CUT" if session.rank == 0 else "")
told["took"] = time.monotonic() - began
session.barrier()
print("CUT FOR GOOD", flush=True)
began = time.monotonic()
try:
    while time.monotonic() < began + 50:
        pull(graph)
except gnnsys.ShardLost as error:
    told["lost"] = [error.machine, error.rank, error.silent_for, str(error)]
session.close(wait=False)
told["ended"] = time.monotonic() - began
print("TOLD", json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the ranks of two hosts saw of a link that was cut for two seconds, and later for good."""
    folder = tmp_path_factory.mktemp("cut")
    graph = homogeneous(200, 1200)
    write_parts(graph, random_assignment(graph, 2, 1), folder / "parts")
    (folder / "program.py").write_text(PROGRAM)
    with Lab(hosts=2) as lab:
        ready = threading.Barrier(2, action=lambda: lab.cut(2))

        def heard(line: str) -> None:
            if line.strip() == "CUT":
                lab.cut(2)
                threading.Timer(CUT_SECONDS, lab.heal, (2,)).start()
            elif line.strip() == "CUT FOR GOOD":
                ready.wait(60)  # for the other host's

        commands = []
        for rank, host in enumerate(lab.hosts):
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            env = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
            env |= {"GROUP_WORLD_SIZE": 2, "MASTER_ADDR": lab.names[0], "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
            arguments = [sys.executable, str(folder / "program.py"), str(folder / "parts"), str(LOST_AFTER)]
            texts = {name: str(value) for name, value in env.items()} | {"PYTHONPATH": path}
            commands.append(lab.start(host, arguments, env=texts, heard=heard))
        results = wait_all(commands, 150)
    lines = [line for result in results for line in result.output.splitlines() if line.startswith("TOLD")]
    return [json.loads(line.removeprefix("TOLD ")) for line in lines]


def test_a_cut_of_seconds_is_ridden_out_and_changes_no_batch(told):
    for rank in told:
        assert len(rank["unbroken"]) == 100 and rank["cut"] == rank["unbroken"]
    assert CUT_SECONDS <= told[0]["took"] < 30


def test_a_longer_cut_fails_on_both_sides_each_naming_the_other(told):
    for rank, other in ((0, 1), (1, 0)):
        machine, who, silent_for, text = told[rank]["lost"]
        assert (machine, who) == (other, rank) and LOST_AFTER <= silent_for < LOST_AFTER + 13
        assert f"machine {other}'s shard" in text and "lost_after" in text
        assert told[rank]["ended"] < 45
