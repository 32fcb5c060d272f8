"""Servers that are killed or stopped under a job of two machines: what is ridden out, what is lost, and who says so."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import threading

import pytest

from gnnsys.comm import Client, Kind, Reply, Server, ShardLost
from gnnsys.comm.address import LOOPBACK, endpoint
from gnnsys.partition import write_parts
from gnnsys.session import server_process
from gnnsys.session.server_process import ServerProcess
from gnnsys.session.server_supervisor import ServerSupervisor, reserve
from tests.partition.part_graphs import random_assignment
from tests.sampling.machines import homogeneous
from tests.support.forked_popen import forking
from tests.support.processes import processes, start_ranks
from tests.support.spare_servers import SPARES

GIVEN_UP = 100.0  # seconds: who is not told waits for the end of the time that a request has, which is 120

PRELUDE = """
import hashlib, json, os, select, signal, sys, threading, time, torch, gnnsys
told = {}

def caught(act):
    began = time.monotonic()
    try:
        act()
    except (gnnsys.ShardLost, gnnsys.TrainerLost) as error:
        facts = {key: getattr(error, key, None) for key in ("machine", "rank", "silent_for")}
        return {"type": type(error).__name__, "text": str(error), "took": time.monotonic() - began, **facts}

def until_lost():
    for _ in range(100_000):  # a signal takes a moment
        session.status()

def server(machine):
    return session.status()[machine]["pid"]
"""

LIVES = """
session = gnnsys.init(timeout=120, process_group=False)
graph = gnnsys.open(sys.argv[1])

def digests(disturb):  # of every batch of two epochs, drawn uniformly and by weight
    mine = graph.from_global(torch.arange(graph.num_nodes())[session.rank :: 2])
    options = {"input_nodes": mine, "batch_size": 15, "seed": 3}
    uniform = gnnsys.NeighborLoader(graph, [6, 4], shuffle=True, **options)
    weighted = gnnsys.NeighborLoader(graph, [6, 4], shuffle=True, weight_attr="w", **options)
    found = []
    for epoch in range(2):
        for number, batches in enumerate(zip(uniform, weighted)):
            if (epoch, number) == (0, 1):
                meet(disturb)
            for batch in batches:
                whole = hashlib.sha256()
                for array in (batch.n_id, batch.edge_index, batch.e_id, batch.x):
                    whole.update(array.contiguous().numpy().tobytes())
                found.append(whole.hexdigest())
    return found

def meet(act):
    session.barrier()
    if session.rank == 0:
        act()
    session.barrier()

def kill():
    process = os.pidfd_open(server(1))
    os.kill(server(1), signal.SIGKILL)
    assert select.select([process], [], [], 120)[0]  # it has ended
    os.close(process)

def stop_for_five_seconds():
    pid = server(1)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(5.0, os.kill, (pid, signal.SIGCONT)).start()

told["unbroken"] = digests(lambda: None)
told["killed"] = digests(kill)
began = time.monotonic()
told["stopped"] = digests(stop_for_five_seconds)
told["stop_took"] = time.monotonic() - began

everything = torch.arange(graph.num_nodes())
table = graph.store.create("e", graph.num_nodes(), (2,), init=1.0)
told["rows"] = float(table[everything].sum())
graph.store.push("e", everything, torch.ones(everything.numel(), 2)).result()
meet(kill)
told["read"] = caught(lambda: table[everything])
told["push"] = caught(lambda: graph.store.push("e", everything, torch.ones(everything.numel(), 2)).result())
told["made again"] = caught(lambda: graph.store.create("e", graph.num_nodes(), (2,), init=1.0))
told["x"] = float(graph.node_data["node"]["x"][everything].sum())
told["lives"] = [status["life"] for status in session.status()]
session.barrier()
session.close()
print(json.dumps(told))
"""

SILENCE = """
session = gnnsys.init(timeout=120, lost_after=4, process_group=False)
graph = gnnsys.open(sys.argv[1])
embedding = gnnsys.DistEmbedding(graph.store, graph.num_nodes(), 4, "users")
optimizer = gnnsys.SparseAdagrad([embedding], lr=0.1)
pids = session.group.gather("pids", os.getpid())

def step():
    embedding(torch.arange(10)).sum().backward()
    optimizer.step()

step()
session.barrier()
if session.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 has seen enough
told["step"] = caught(step)
told["again"] = caught(step)
told["barrier"] = caught(session.barrier)
if session.rank == 0:
    os.kill(pids[1], signal.SIGCONT)

session.group.barrier("awake")
if session.rank == 0:
    pid = server(1)
    os.kill(pid, signal.SIGSTOP)
    told["stopped"] = caught(until_lost)
    os.kill(pid, signal.SIGCONT)
    told["back"] = server(1) == pid
session.group.barrier("seen")
if session.rank == 1:
    print(json.dumps(told), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # and with the leader its server
told["killed"] = caught(until_lost)
told["gone"] = caught(session.barrier)
session.close(wait=False)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def graph():
    return homogeneous()


@pytest.fixture(scope="module")
def seen(graph, tmp_path_factory):
    """What the ranks of two jobs saw; the jobs run side by side, because both spend their time waiting."""
    parts = tmp_path_factory.mktemp("lives") / "parts"
    write_parts(graph, random_assignment(graph, 2, 1), parts)
    with processes() as lives, processes() as silence:
        for running, program in ((lives, LIVES), (silence, SILENCE)):
            start_ranks(running, PRELUDE + program, [1, 1], parts, environment={SPARES: "3"})
        ended = [running.wait(240) for running in (lives, silence)]
    codes = [[rank.returncode for rank in job] for job in ended]
    assert codes == [[0, 0], [0, -signal.SIGKILL]], "\n".join(str(rank) for job in ended for rank in job)
    return [[json.loads(rank.stdout) for rank in job] for job in ended]


@pytest.fixture(scope="module")
def told(seen):
    """By two ranks on two machines while machine 1's server was killed twice and stopped once."""
    return seen[0]


@pytest.fixture(scope="module")
def silence(seen):
    """What two ranks saw of each other's silence, and of a server's, where four seconds of it count as death."""
    return seen[1]


def test_a_killed_server_is_rejoined_and_no_batch_is_lost_or_repeated(told):
    for rank in told:
        assert len(rank["unbroken"]) == 2 * 2 * 4 == len(set(rank["unbroken"]))
        assert rank["killed"] == rank["unbroken"]


def test_a_server_stopped_for_five_seconds_costs_five_seconds_and_no_error(told):
    assert all(rank["stopped"] == rank["unbroken"] for rank in told)
    assert max(rank["stop_took"] for rank in told) >= 5


@pytest.mark.parametrize("touch", ["read", "push", "made again"])
def test_tables_made_at_run_time_are_lost_with_their_server_and_everybody_who_touches_them_is_told(told, touch):
    for number, rank in enumerate(told):  # rank 1 has read them through memory that it shared with the dead server
        lost = rank[touch]
        assert (lost["type"], lost["machine"], lost["rank"]) == ("ShardLost", 1, number)
        assert lost["took"] < GIVEN_UP
        assert lost["text"] == told[0]["read"]["text"]  # the same words for the same fact
        for part in ("machine 1's shard was restarted", "made at run time are gone", "from the last checkpoint"):
            assert part in lost["text"]


def test_what_is_in_files_is_still_there_after_its_server_was_restarted(told, graph):
    assert [rank["lives"] for rank in told] == [[0, 2]] * 2
    assert [rank["rows"] for rank in told] == [240.0] * 2
    for rank in told:
        assert rank["x"] == pytest.approx(float(graph.node_data["node"]["x"].sum()), abs=1e-3)


def test_a_step_that_waits_for_a_silent_rank_ends_when_that_counts_as_dead(silence):
    lost = silence[0]["step"]
    assert (lost["type"], lost["rank"]) == ("TrainerLost", 1)
    assert 4 <= lost["silent_for"] <= lost["took"] + 4 and lost["took"] < GIVEN_UP
    for part in ("rank 1 was not heard of", "table 'users'", "from the last checkpoint", "lost_after"):
        assert part in lost["text"]
    assert silence[0]["again"]["text"] == lost["text"]
    assert silence[1]["step"]["type"] == "TrainerLost"  # who was thought dead learns it, and does not go on alone


def test_a_meeting_that_waits_for_a_silent_rank_ends_too_and_says_the_same_to_all(silence):
    lost = silence[0]["barrier"]
    assert (lost["type"], lost["rank"]) == ("TrainerLost", 1) and lost["took"] < GIVEN_UP
    assert silence[1]["barrier"]["text"] == lost["text"]


def test_a_server_stopped_for_longer_than_it_may_be_silent_is_lost_and_found_again(silence):
    lost = silence[0]["stopped"]
    assert (lost["type"], lost["machine"], lost["rank"]) == ("ShardLost", 1, 0)
    assert (
        lost["silent_for"] >= 4 and lost["took"] < GIVEN_UP and "start again from the last checkpoint" in lost["text"]
    )
    assert silence[0]["back"]


def test_a_killed_leader_takes_its_server_along_and_both_are_named_to_the_others(silence):
    server, rank = silence[0]["killed"], silence[0]["gone"]
    assert (server["type"], server["machine"]) == ("ShardLost", 1) and server["took"] < GIVEN_UP
    assert (rank["type"], rank["rank"]) == ("TrainerLost", 1) and rank["took"] < GIVEN_UP


@pytest.fixture
def forked_servers():
    with forking(server_process):
        yield


def test_a_restart_that_meets_the_end_of_the_session_raises_nothing(monkeypatch, forked_servers):
    supervisor = ServerSupervisor()
    supervisor._orders = {"machine": 0, "bind": [], "keys": None, "threads": 1, "lost_after": 1.0}

    def closed(*_, **__):
        supervisor._is_closing = True
        raise ValueError("write to closed file")

    monkeypatch.setattr(ServerProcess, "order", closed)
    try:
        supervisor._begin()
        assert supervisor.returncode is not None
    finally:
        supervisor.close()


THIEF = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
for options in ((), ("SO_REUSEADDR",), ("SO_REUSEPORT",), ("SO_REUSEADDR", "SO_REUSEPORT")):
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as thief:
            for option in options:
                thief.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            try:
                thief.bind((host, int(sys.argv[1])))
                thief.listen()
                print("stolen at", host, "by", options)
            except OSError:
                pass
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another account is needed")
def test_no_other_account_takes_the_port_of_a_server_that_has_died():
    with reserve(LOOPBACK) as place:
        arguments = [str(place.getsockname()[1]), str(pwd.getpwnam("nobody").pw_uid)]
        command = [sys.executable, "-c", THIEF, *arguments]
        stolen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd="/")
        assert stolen.stdout == ""
        with Server({Kind.STATUS: lambda request: Reply()}, bind=[endpoint(*place.getsockname())], is_reserved=True):
            pass  # its next life does


def test_a_server_that_ends_too_often_stays_dead(forked_servers):
    ended, why = threading.Event(), []
    supervisor = ServerSupervisor(max_restarts=1)
    try:
        where = supervisor.order(4, LOOPBACK, keys=None, threads=1, lost_after=60)
        with Client({4: where}, sender=0, incarnation=1, timeout=120, ping_interval=0.2, lost_after=60) as client:
            supervisor.keep(lambda text: (why.append(text), client.lose(4, text), ended.set()))
            for life in range(2):
                status = client.request(4, Kind.STATUS).result().options
                assert status["life"] == life
                os.kill(status["pid"], signal.SIGKILL)
            assert ended.wait(120)
            with pytest.raises(ShardLost) as raised:
                client.request(4, Kind.STATUS).result()
            assert str(raised.value) == why[0] and raised.value.machine == 4
            for part in ("machine 4", "exit code -9", "started again 1 times within 10 minutes", "last checkpoint"):
                assert part in why[0]
    finally:
        supervisor.close()
    assert supervisor.returncode == -9
