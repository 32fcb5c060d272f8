"""A link between two hosts that is cut: seconds are ridden out, requests in flight included; longer fails on both."""

from __future__ import annotations

import json
import threading

import pytest

from gnnsys.lab import Lab, available
from gnnsys.partition import write_parts
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.lab_host import on_host
from tests.support.nursery import forks_ranks
from tests.support.processes import await_true, processes

pytestmark = [
    pytest.mark.skipif(available() is not None, reason=str(available())),
    pytest.mark.skipif(not forks_ranks(), reason="ranks are started one by one here, and not on hosts"),
]
CUT_SECONDS, LOST_AFTER = 2.0, 20.0  # a machine may pause, too
GIVEN_UP = 100.0  # seconds: a request itself has 120

PROGRAM = """
import hashlib, json, sys, time, torch, gnnsys
told = {}

def pull(graph):  # of the other host too, whatever is kept
    began = time.monotonic()
    graph.node_data["node"]["x"][torch.arange(graph.num_nodes())]
    return time.monotonic() - began

def digests(graph, say):
    found = []
    mine = graph.from_global(torch.arange(graph.num_nodes())[session.rank :: 2])
    options = {"input_nodes": mine, "shuffle": True, "seed": 1}
    for number, batch in enumerate(gnnsys.NeighborLoader(graph, [5, 3], batch_size=1, **options)):
        if number == 3 and say:
            print(say, flush=True)
            while pull(graph) < 1:  # until one has met the cut: a machine that pauses may miss it
                print(say, flush=True)
        if say:
            pull(graph)
        found.append(hashlib.sha256(batch.n_id.numpy().tobytes() + batch.x.numpy().tobytes()).hexdigest())
    return found

session = gnnsys.init(timeout=120, lost_after=float(sys.argv[2]), process_group=False)
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
    while time.monotonic() < began + 110:
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
    graph = homogeneous(100, 600)
    write_parts(graph, random_assignment(graph, 2, 1), folder / "parts")
    (folder / "program.py").write_text(PROGRAM)
    with Lab(hosts=2) as lab, processes() as running:
        for rank, host in enumerate(lab.hosts):
            env = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
            env |= {"GROUP_WORLD_SIZE": 2, "MASTER_ADDR": lab.names[0], "MASTER_PORT": 29500}
            texts = {name: str(value) for name, value in env.items()} | on_host(lab, host)
            running.start_rank(rank, folder / "program.py", [folder / "parts", LOST_AFTER], texts)
        heals: list[threading.Timer] = []  # one for each cut so far

        def is_over() -> bool:
            """Cuts the link for a while whenever rank 0 asks for it, until both have seen enough of that."""
            if running.output(0).count("CUT\n") > len(heals):
                lab.cut(2)
                heals.append(threading.Timer(CUT_SECONDS, lab.heal, (2,)))
                heals[-1].start()
            has_ended = any(process.poll() is not None for _, process in running.processes)
            return has_ended or all("CUT FOR GOOD" in running.output(rank) for rank in range(2))

        await_true(is_over, "the end of two epochs")
        for heal in heals:
            heal.join()  # else it would end the last cut, too
        lab.cut(2)
        ended = running.wait()
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(map(str, ended))
    lines = [line for rank in ended for line in rank.stdout.splitlines() if line.startswith("TOLD")]
    return [json.loads(line.removeprefix("TOLD ")) for line in lines]


def test_a_cut_of_seconds_is_ridden_out_and_changes_no_batch(told):
    for rank in told:
        assert len(rank["unbroken"]) == 50 and rank["cut"] == rank["unbroken"]
    assert told[0]["took"] >= CUT_SECONDS / 2


def test_a_longer_cut_fails_on_both_sides_each_naming_the_other(told):
    for rank, other in ((0, 1), (1, 0)):
        machine, who, silent_for, text = told[rank]["lost"]
        assert (machine, who) == (other, rank) and LOST_AFTER <= silent_for < GIVEN_UP
        assert f"machine {other}'s shard" in text and "lost_after" in text
        assert told[rank]["ended"] < GIVEN_UP
