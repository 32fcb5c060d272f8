"""One graph for all processes of a queue: equal values, one copy in memory, nobody changes another's rows, and nobody's
end is another's."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gnnsys.graph import NODE, Graph, load, pack_plan, save, sbm, typed_graph, unpack
from gnnsys.jobs import (
    GraphHolder,
    GraphHolderLost,
    WaitingJob,
    check_holder,
    graph_holder,
    memory_of,
    noted_graphs,
    release_graphs,
    shared_graph,
    shared_graphs,
)
from gnnsys.jobs.graph_holder import connect
from gnnsys.jobs.holder_messages import receive, send
from gnnsys.planning.memory import estimate_memory
from gnnsys.store import is_shared_memory
from tests.jobs.graph_users import GraphUsers, made_graph
from tests.support.forked_popen import forking
from tests.support.processes import await_true, processes

ARGUMENTS = {"num_nodes": 3000, "num_features": 32, "seed": 4}


def broken_graph() -> Graph:
    raise RuntimeError("no such data")


def some_tensors(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(size, dtype=torch.bfloat16), "none": torch.empty(0, 3), "one": torch.tensor(True)}


def wrong_graph() -> list[int]:
    return [1]


def equal(ours: Graph, theirs: Graph) -> bool:
    plans = pack_plan(ours), pack_plan(theirs)
    pairs = zip(plans[0].tensors, plans[1].tensors, strict=True)
    return plans[0].description == plans[1].description and all(torch.equal(a, b) for a, b in pairs)


# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [sbm(500, seed=1), typed_graph(300, seed=2)], ids=["plain", "typed"])
def test_a_graph_of_a_block_is_the_one_that_was_packed(graph: Graph) -> None:
    plan = pack_plan(graph)
    block = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    plan.fill(lambda at, size: block[at : at + size])
    made = unpack(json.loads(json.dumps(plan.description)), lambda at, size: block[at : at + size])
    assert isinstance(made, Graph) and equal(made, graph)
    for edge_type in graph.edge_types:
        assert torch.equal(made.edge_index(edge_type), graph.edge_index(edge_type))


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_that_arrive_together_are_read_one_by_one_with_their_own_descriptors() -> None:
    ours, theirs = socket.socketpair()
    files = [os.memfd_create(name) for name in ("first", "second")]
    inodes = [os.fstat(file).st_ino for file in files]
    long = "x" * 200_000
    writer = threading.Thread(
        target=lambda: [send(ours, {"a": long}, files[0]), send(ours, {"b": 2}), send(ours, {"c": 3}, files[1])]
    )
    writer.start()
    got = [receive(theirs, 60.0) for _ in range(3)]
    writer.join(60)
    assert [message for message, _ in got] == [{"a": long}, {"b": 2}, {"c": 3}]
    came = [descriptor for _, descriptor in got]
    assert came[1] is None and [os.fstat(each).st_ino for each in (came[0], came[2])] == inodes
    ours.close()
    with pytest.raises(ConnectionError):
        receive(theirs, 60.0)
    for each in (*files, came[0], came[2]):
        os.close(each)
    theirs.close()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", b"GNh1\xff\xff\xff\xff", b"GNh1\x02\0\0\0[]", b"GNh1\x02\0\0\0{!"]
)
def test_what_is_no_message_costs_the_sender_its_connection_and_nobody_else(holder: GraphHolder, data: bytes) -> None:
    stranger = connect(Path(os.environ["GNNSYS_GRAPH_HOLDER"]), 60.0)
    stranger.sendall(data)
    assert stranger.recv(1) == b""
    stranger.close()
    assert holder.graphs() == []


@pytest.mark.parametrize(
    "message",
    [{"do": "fly"}, {}, {"do": "get"}, {"do": "ready", "name": "a", "device": "cpu"}, {"do": "leave", "left": 3}],
)
def test_a_request_that_makes_no_sense_is_answered_with_an_error(holder: GraphHolder, message: dict[str, str]) -> None:
    stranger = connect(Path(os.environ["GNNSYS_GRAPH_HOLDER"]), 60.0)
    send(stranger, {**message, "id": 5})
    answer, _ = receive(stranger, 60.0)
    assert "error" in answer and answer["id"] == 5
    stranger.close()
    assert holder.graphs() == []


# -- outside of a queue ------------------------------------------------------------------------------------------------


def test_outside_of_a_queue_it_is_simply_the_graph(tmp_path: Path) -> None:
    graph = sbm(200, seed=1)
    save(graph, tmp_path / "graph")
    assert equal(shared_graph(tmp_path / "graph", device="cpu"), graph)
    assert equal(shared_graph(sbm, {"num_nodes": 200, "seed": 1}, device="cpu"), graph)
    check_holder()
    assert release_graphs() == ([], [])


@pytest.mark.parametrize(
    ("source", "arguments", "said"),
    [
        ("nowhere", {}, "there is no graph at"),
        (7, {}, "source must be a path or a function, got a int"),
        (lambda: None, {}, "give a function of a module"),
        (sbm, {"num_nodes": {1, 2}}, "arguments of a shared graph must be JSON"),
        (wrong_graph, {}, "returned a list: return a gnnsys Graph, or a dict of tensors"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(source, arguments, said) -> None:
    with pytest.raises(ValueError, match=said) as error:
        shared_graph(source, arguments, device="cpu")
    assert "\n" not in str(error.value)


def test_a_graph_is_named_by_what_it_is_made_of(tmp_path: Path) -> None:
    def name(source, arguments=None) -> str:
        return shared_graphs.GraphSource.of(source, arguments or {}).name

    assert name(sbm, {"num_nodes": 9, "seed": 1}) == name(sbm, {"seed": 1, "num_nodes": 9})
    assert len({name(sbm, {"num_nodes": 9}), name(sbm, {"num_nodes": 8}), name(made_graph, {"num_nodes": 9})}) == 3
    save(sbm(50, seed=1), tmp_path / "graph")
    before = name(tmp_path / "graph")
    assert name(str(tmp_path / "." / "graph")) == before and before.startswith("graph#")
    save(sbm(60, seed=1), tmp_path / "graph", overwrite=True)
    assert name(tmp_path / "graph") != before


# -- the estimate ------------------------------------------------------------------------------------------------------


def whole_graph_job(hidden: int) -> dict[str, object]:
    graph = shared_graph(made_graph, ARGUMENTS, device="cpu")
    model = torch.nn.Linear(32, hidden)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": lambda model, whole: model(whole.x).square().mean(),
        "rows": graph.node_data[NODE]["x"],
        "edge_index": graph.csc(),
    }


def test_an_estimate_does_not_count_a_shared_graph_and_the_set_counts_it_once() -> None:
    graph = made_graph(**ARGUMENTS)
    alone = estimate_memory(whole_graph_job, {"hidden": 8})
    with noted_graphs() as noted:
        own = estimate_memory(whole_graph_job, {"hidden": 8})
    arrays = [graph.node_data[NODE]["x"], graph.csc().indptr, graph.csc().indices, graph.csc().edge_ids]
    assert alone.peak_bytes - own.peak_bytes == sum(each.nbytes for each in arrays if each is not None)
    assert list(noted.graphs.values()) == [pack_plan(graph).num_bytes]
    jobs = [WaitingJob(number=number, memory=own.peak_bytes, submitted=0.0, graphs=noted.graphs) for number in range(3)]
    assert memory_of(jobs) == 3 * own.peak_bytes + pack_plan(graph).num_bytes
    assert not is_shared_memory(graph.node_data[NODE]["x"])


# -- in a queue --------------------------------------------------------------------------------------------------------


def test_a_graph_is_kept_until_it_is_dropped_and_a_user_is_one_until_it_gives_it_back(holder: GraphHolder) -> None:
    with noted_graphs() as noted:
        graph = shared_graph(made_graph, ARGUMENTS)
    expected = made_graph(**ARGUMENTS)
    assert equal(graph, expected) and is_shared_memory(graph.node_data[NODE]["x"])
    ((name, num_bytes),) = noted.graphs.items()
    assert num_bytes == pack_plan(expected).num_bytes
    assert holder.graphs() == [(name, "cpu", num_bytes, True, (os.getpid(),))]
    assert holder.drop() == []  # it is in use
    kept = graph.node_data[NODE]["x"][3:5]
    del graph
    assert release_graphs() == ([name], [])  # something still refers to it
    assert torch.equal(kept, expected.node_data[NODE]["x"][3:5])
    del kept
    assert release_graphs() == ([], [])
    assert holder.graphs() == [(name, "cpu", num_bytes, True, ())]
    again = shared_graph(made_graph, ARGUMENTS)
    assert equal(again, expected)
    del again
    release_graphs()
    assert holder.drop(["another"]) == [] and holder.drop([name]) == [name] and holder.graphs() == []


def test_two_calls_of_a_job_have_one_mapping_and_graphs_of_their_own(holder: GraphHolder) -> None:
    first, second = (shared_graph(made_graph, ARGUMENTS) for _ in range(2))
    assert first.node_data[NODE]["x"].data_ptr() == second.node_data[NODE]["x"].data_ptr()
    first.set_node_data("more", torch.zeros(3000))
    assert "more" not in second.node_data[NODE]
    assert len(holder.graphs()) == 1


def test_tensors_by_name_are_shared_too_each_with_a_storage_of_its_own(holder: GraphHolder) -> None:
    tensors = shared_graph(some_tensors, {"size": 1000})
    assert {name: (each.dtype, each.shape) for name, each in tensors.items()} == {
        name: (each.dtype, each.shape) for name, each in some_tensors(1000).items()
    }
    assert torch.equal(tensors["x"], some_tensors(1000)["x"]) and tensors["one"].item() is True
    assert tensors["x"].untyped_storage().nbytes() == 2000  # what torch.save writes


def test_a_saved_graph_stays_in_its_files_and_is_read_once_for_its_checksums(
    holder: GraphHolder, tmp_path: Path
) -> None:
    save(sbm(300, seed=1), tmp_path / "graph")
    graph = shared_graph(tmp_path / "graph")
    assert equal(graph, load(tmp_path / "graph"))
    assert is_shared_memory(graph.csc().indices)
    (held,) = holder.graphs()
    assert held.bytes == pack_plan(graph).num_bytes and held.users == (os.getpid(),)
    maps = Path("/proc/self/maps").read_text()
    assert any(str(each) in maps for each in (tmp_path / "graph").glob("*.npy"))
    assert "gnnsys-graph" not in maps  # no copy of it in memory


def test_a_function_that_fails_says_so_to_each_who_asks_and_leaves_nothing(holder: GraphHolder) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such data"):
            shared_graph(broken_graph)
    with pytest.raises(RuntimeError, match="graphs are kept on cpu and on the host, not on meta"):
        shared_graph(made_graph, ARGUMENTS, device="meta")
    assert holder.graphs() == []


def test_four_processes_map_one_copy_and_none_changes_the_rows_of_another(holder: GraphHolder, tmp_path: Path) -> None:
    expected = made_graph(**ARGUMENTS)
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", ARGUMENTS, [holder.environment()] * 4)
        mapped = users.ask_all("map")
        assert users.num_made == 1  # the others waited for it
        assert all(each == mapped[0] for each in mapped)
        (held,) = holder.graphs()
        assert {held.name: held.bytes} == mapped[0]["names"] and held.users == tuple(sorted(users.pids))
        inodes = {
            line.split()[4]
            for pid in users.pids
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if "memfd:gnnsys-graph" in line
        }
        assert len(inodes) == 1  # pages of one file, which is nowhere on a disk
        before = users.ask_all("read")
        assert len(set(before)) == 1
        assert users.ask(0, "write") and users.ask(0, "read") != before[0]
        assert users.ask_all("read", [1, 2, 3]) == before[1:]
        os.kill(users.pids[0], signal.SIGKILL)
        await_true(lambda: len(holder.graphs()[0].users) == 3, "a killed user is none", 60)
        assert users.ask_all("read", [1, 2, 3]) == before[1:]
        assert equal(shared_graph(made_graph, ARGUMENTS), expected)  # who comes later finds it as it was
        users.close()


def test_the_end_of_the_holder_is_told_in_one_line(tmp_path: Path) -> None:
    with forking(graph_holder):
        holder = GraphHolder(tmp_path)
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", ARGUMENTS, [holder.environment()])
        users.ask(0, "map")
        assert users.ask(0, "check") is None
        before = users.ask(0, "read")
        os.kill(holder.pid, signal.SIGKILL)
        await_true(lambda: not holder.is_alive(), "the holder has ended", 60)
        said = users.ask(0, "check")
        assert said["error"] == "GraphHolderLost" and "\n" not in said["text"]
        assert said["text"].startswith("the process that keeps graphs for jobs has ended")
        assert users.ask(0, "read") == before  # on the host its pages are still there
        with pytest.raises(GraphHolderLost, match="ended"):
            holder.graphs()
        users.close()
    holder.close()


def test_a_graph_for_which_the_host_has_no_memory_is_refused_before_it_is_packed(
    holder: GraphHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_graphs, "free_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"takes .* bytes, 1,000 are free here"):
        shared_graph(made_graph, ARGUMENTS)
    monkeypatch.undo()
    assert holder.graphs() == []


MAKER = """
import os, sys, time
from gnnsys.jobs import shared_graph
import tests.jobs.graph_users as tests

def slow(**arguments):
    print("makes", flush=True)
    time.sleep(300)

tests.sbm = slow
shared_graph(tests.made_graph, {"num_nodes": 100})
"""


def test_a_maker_that_is_killed_leaves_the_graph_to_the_next_one(holder: GraphHolder) -> None:
    with processes() as running:
        number = running.start_code("maker", MAKER, environment=holder.environment())
        running.await_output(number, "makes")
        (held,) = holder.graphs()
        assert not held.is_ready and held.users == ()
        assert holder.drop() == []
        with pytest.raises(TimeoutError, match="to be made: another job makes it still"):
            shared_graph(made_graph, {"num_nodes": 100}, timeout=0.1)
        os.kill(running.pid(number), signal.SIGKILL)
        assert shared_graph(made_graph, {"num_nodes": 100}).num_nodes() == 100


SERVICE = """
import sys, time
from gnnsys.jobs import GraphHolder
holder = GraphHolder(sys.argv[1])
holder.graphs()
print(holder.pid, "holds", flush=True)
time.sleep(300)
"""


def test_the_holder_ends_with_a_service_that_is_killed_and_the_next_one_has_its_own(tmp_path: Path) -> None:
    with processes() as running:
        number = running.start_code("service", SERVICE, tmp_path)
        pid = int(running.await_output(number, "holds").split()[0])
        ended = os.pidfd_open(pid)
        os.kill(running.pid(number), signal.SIGKILL)

        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
    with forking(graph_holder):
        holder = GraphHolder(tmp_path)
    assert holder.graphs() == []
    holder.close()
    holder.close()


def test_a_holder_whose_service_has_gone_ends_without_a_word(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    orders = json.dumps({"socket": str(tmp_path / "graphs"), "device": "cpu"})
    with os.fdopen(writing, "w") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "gnnsys.jobs.holder_process"], input=orders + "\n", stdout=out,
            stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "") and not (tmp_path / "graphs").exists()
