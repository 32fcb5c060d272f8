"""Sessions in real processes: what ranks see, and that nothing is left after success, exception, Ctrl-C and kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import gnnsys
from gnnsys.graph import NODE
from gnnsys.partition import write_parts
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.processes import (
    alive,
    await_shared_memory_freed,
    await_true,
    descendants,
    processes,
    run_ranks,
    shared_memory,
    start_agents,
    start_ranks,
)


@pytest.fixture(scope="module")
def graph():
    return homogeneous(300, 1200)


@pytest.fixture(scope="module")
def parts(graph, tmp_path_factory):
    path = tmp_path_factory.mktemp("session") / "parts"
    write_parts(graph, random_assignment(graph, 4, 2), path)
    return path


TRAIN = """
import json, os, signal, sys, time, torch, torch.distributed as dist, gnnsys
session = gnnsys.init(timeout=120)
graph = gnnsys.open(sys.argv[1])
crash = sys.argv[2] if len(sys.argv) > 2 else None
if crash and session.rank == session.world_size - 1 and not os.path.exists(crash):
    open(crash, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)  # its machine's leader, and so its server too
seeds = gnnsys.split(graph, "train")
total = torch.tensor([session.rank + 1])
dist.all_reduce(total)
session.barrier()
told = {
    "place": [session.rank, session.world_size, session.local_rank, session.machine, session.num_machines],
    "parts": graph.parts_here,
    "seeds": graph.original_ids(seeds.ids).tolist(),
    "largest": seeds.largest,
    "sum": int(total),
    "servers": [(status["pid"], status["parts"]) for status in session.status()],
    "again": gnnsys.open(sys.argv[1]) is graph,
}
deadline = time.monotonic() + 120
while session.rank and 0 not in session.group.left():  # rank 0 leaves first, and its machine still serves
    assert time.monotonic() < deadline
    time.sleep(0.01)
everything = torch.arange(graph.num_nodes())
told["originals"] = graph.original_ids(everything).tolist()
told["x"] = graph.node_data["node"]["x"][everything].tolist()
print(json.dumps(told))
if session.rank % 2 == 0:  # the others leave it to the exit
    session.close()
    session.close()
"""


def test_ranks_under_torchrun_open_the_same_graph_after_a_kill_and_leave_nothing(graph, parts, tmp_path):
    shared = shared_memory()
    options = {"torchrun": True, "options": ["--max-restarts", "1"], "timeout": 300}
    told = [json.loads(rank.stdout) for rank in run_ranks(TRAIN, [1, 1], parts, tmp_path / "crashed", **options)]
    assert (tmp_path / "crashed").exists()
    assert [t["place"] for t in told] == [[0, 2, 0, 0, 2], [1, 2, 0, 1, 2]]
    assert [t["parts"] for t in told] == [[0, 1], [2, 3]]
    assert {t["sum"] for t in told} == {1 + 2} and all(t["again"] for t in told)
    chosen = graph.node_data[NODE]["train_mask"].nonzero().view(-1).tolist()
    assert sorted(node for t in told for node in t["seeds"]) == chosen
    assert {t["largest"] for t in told} == {max(len(t["seeds"]) for t in told)}
    for t in told:
        assert torch.equal(torch.tensor(t["x"]), graph.node_data[NODE]["x"][torch.tensor(t["originals"])])
        assert t["servers"] == told[0]["servers"]
    assert [served for _, served in told[0]["servers"]] == [[0, 1], [2, 3]]
    await_true(lambda: not any(alive(pid) for pid, _ in told[0]["servers"]), "the end of the servers")
    await_shared_memory_freed(shared)


def test_an_exception_on_one_rank_ends_all_ranks_of_all_machines(parts):
    program = """
import sys, torch.distributed as dist, gnnsys
session = gnnsys.init(timeout=120)
gnnsys.open(sys.argv[1]).store.create("table", 100, (8,))  # shared memory of the servers
print("servers", *(status["pid"] for status in session.status()))
session.barrier()
if session.rank == 1:
    raise RuntimeError("rank 1 has had enough")
dist.barrier()
"""
    shared = shared_memory()
    ranks = run_ranks(program, [1, 1], parts, check=False)
    assert "rank 1 has had enough" in ranks[1].stderr and [rank.returncode for rank in ranks] == [1, 1]
    servers = {int(pid) for pid in ranks[1].stdout.split()[1:]}
    assert len(servers) == 2
    await_true(lambda: not any(map(alive, servers)), "the end of the servers")
    await_shared_memory_freed(shared)


REFUSED = """
import sys, torch, gnnsys
session = gnnsys.init(timeout=120, process_group=False)
graph = gnnsys.open(sys.argv[1])
session.barrier()
if session.rank == 0:  # the one that serves; nobody asks what became of this push
    x = graph.node_data[graph.node_types[0]]["x"]
    graph.store.push(x.name, torch.tensor([0]), torch.zeros(1, *x.shape[1:], dtype=x.dtype))
else:
    print(sum(len(session.status()) for _ in range(200)))
session.close()
"""


def test_a_push_that_was_refused_does_not_take_the_server_from_the_others(parts):
    first, second = run_ranks(REFUSED, 2, parts)
    assert "is never written" in first.stderr and second.stdout.split() == ["200"]


WAIT = """
import sys, threading, gnnsys
session = gnnsys.init(timeout=120)
graph = gnnsys.open(sys.argv[1])
graph.store.create("table", 100, (8,))
session.barrier()
print("ready", *(status["pid"] for status in session.status()), flush=True)
threading.Event().wait(600)
"""


def test_ctrl_c_ends_everything(parts):
    shared = shared_memory()
    with processes() as running:
        start_agents(running, WAIT, [2], parts)
        outputs = [running.folder / f"rank-{rank}.out" for rank in range(2)]
        await_true(lambda: all(out.exists() and "ready" in out.read_text() for out in outputs), "both ranks")
        started = descendants(running.pid(0))
        servers = [int(pid) for pid in outputs[0].read_text().split()[1:]]
        assert len(servers) == 1 and servers[0] in started
        # What a terminal does: everyone in the foreground, which a server is not.
        foreground = [pid for pid in (running.pid(0), *started) if os.getpgid(pid) != servers[0]]
        for pid in foreground:
            with contextlib.suppress(ProcessLookupError):  # the first may have ended others
                os.kill(pid, signal.SIGINT)
        running.wait()
        await_true(lambda: not any(map(alive, started)), "the end of all processes")
    await_shared_memory_freed(shared)


def test_a_server_ends_with_the_trainer_that_started_it_even_when_that_is_killed(parts):
    with processes() as running:
        start_ranks(running, WAIT, [2], parts)
        server = int(running.await_output(0, "ready").split()[1])
        running.await_output(1, "ready")
        assert alive(server)
        os.kill(running.pid(0), signal.SIGKILL)
        await_true(lambda: not alive(server), "the end of the server")


def test_alone_there_is_no_server_and_no_thread_left(parts, graph):
    threads, children = set(threading.enumerate()), set(descendants(os.getpid()))
    with gnnsys.init() as session:
        assert (session.rank, session.world_size, session.num_machines, session.client) == (0, 1, 1, None)
        assert dist.is_initialized() and dist.get_world_size() == 1
        opened = gnnsys.open(parts)
        assert opened is session.open(str(parts)) and opened.parts_here == [0, 1, 2, 3]
        ids = torch.arange(300)
        assert torch.equal(opened.node_data[NODE]["x"][ids], graph.node_data[NODE]["x"][opened.original_ids(ids)])
        session.barrier()
        assert set(descendants(os.getpid())) <= children and session.status() == []
    assert not dist.is_initialized() and set(threading.enumerate()) <= threads
    session.close()
    with pytest.raises(ValueError, match="this session is closed"):
        session.open(parts)


def test_a_process_group_of_the_script_is_used_and_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gnnsys.init().close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_opening_without_init_works_alone_and_is_refused_under_torchrun(parts, monkeypatch):
    opened = gnnsys.open(parts)
    assert opened.num_nodes() == 300
    gnnsys.session.current().close()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"call gnnsys\.init\(\) before gnnsys\.open\(\)"):
        gnnsys.open(parts)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"join_timeout": -1}, {"server_threads": 0}])
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        gnnsys.init(**options)


def test_two_jobs_on_one_host_do_not_meet(parts, graph, tmp_path):
    other = homogeneous(50, 100, seed=1)
    write_parts(other, random_assignment(other, 2, 1), tmp_path / "parts")
    with processes() as first, processes() as second:
        start_ranks(first, TRAIN, [2], parts)
        start_ranks(second, TRAIN, [2], tmp_path / "parts")
        for running, num_nodes in ((first, 300), (second, 50)):
            for ended in running.wait():
                assert ended.returncode == 0, ended
                assert sorted(json.loads(ended.stdout)["originals"]) == list(range(num_nodes))
