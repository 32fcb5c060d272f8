"""A graph is on a GPU once for all jobs: by the driver's own figure, with equal values, whoever is killed."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gnnsys
from gnnsys.graph import NODE
from gnnsys.jobs import GraphHolder, release_graphs, shared_graph, shared_graphs
from gnnsys.store import is_shared_memory
from tests.cuda.places import same_batch
from tests.jobs.graph_users import GraphUsers, made_graph
from tests.support.processes import await_true, processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ARGUMENTS = {"num_nodes": 20_000, "columns": 6000, "seed": 4}  # 480 MB of rows
SMALL = {"num_nodes": 2000, "seed": 1}
_SLACK = 64 << 20  # of the driver's figure: what modules of kernels take when they are first used


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphHolder]:
    """With a context of its own already."""
    kept = GraphHolder(tmp_path, device="cuda:0")
    for name, value in kept.environment().items():
        monkeypatch.setenv(name, value)
    shared_graph(made_graph, {"num_nodes": 10})
    yield kept
    shared_graphs._users.clear()
    kept.close()


def test_four_processes_have_one_copy_and_a_killed_one_leaves_the_others_alone(
    holder: GraphHolder, tmp_path: Path
) -> None:
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", ARGUMENTS, [holder.environment()] * 4)
        before = free_bytes()
        mapped = users.ask_all("map")
        assert users.num_made == 1 and all(each == mapped[0] for each in mapped), mapped
        assert mapped[0]["device"] == "cuda:0"
        (num_bytes,) = mapped[0]["names"].values()
        taken = before - free_bytes()
        print(f"a graph of {num_bytes:,} bytes in four processes: {taken:,} by the driver's figure")
        assert num_bytes <= taken < num_bytes + _SLACK
        values = users.ask_all("read")
        expected = made_graph(**ARGUMENTS)
        assert len(set(values)) == 1 and values[0] == _digest(expected)
        os.kill(users.pids[0], signal.SIGKILL)
        await_true(lambda: len(_held(holder, num_bytes).users) == 3, "a killed user is none", 60)
        assert users.ask_all("read", [1, 2, 3]) == values[1:]
        assert _held(holder, num_bytes).name not in holder.drop()
        assert users.ask_all("release", [1, 2, 3]) == [[[], []]] * 3
        assert _held(holder, num_bytes).users == ()
        assert holder.drop() == list(mapped[0]["names"])
        await_true(lambda: before - free_bytes() < _SLACK, "the driver has all of it back", 60)
        users.close()


def test_a_job_that_writes_to_shared_rows_is_told_and_the_next_one_gets_them_anew(
    holder: GraphHolder, tmp_path: Path
) -> None:
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", SMALL, [holder.environment()] * 2)
        (name,) = users.ask(0, "map")["names"]
        value = users.ask(0, "read")
        users.ask(0, "write")
        assert users.ask(0, "release") == [[], [name]]
        users.ask(1, "map")
        assert users.ask(1, "read") == value and users.num_made == 2
        assert users.ask(1, "release") == [[], []]
        users.close()


def test_the_end_of_the_holder_is_told_in_one_line(holder: GraphHolder, tmp_path: Path) -> None:
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", SMALL, [holder.environment()])
        users.ask(0, "map")
        assert users.ask(0, "check") is None
        os.kill(holder.pid, signal.SIGKILL)
        await_true(lambda: not holder.is_alive(), "the holder has ended", 60)
        said = users.ask(0, "check")
        assert said["error"] == "GraphHolderLost" and "\n" not in said["text"]
        assert users.ask(0, "map")["names"], "what was mapped is not asked for again"
        users.close()


def test_a_graph_too_large_for_the_device_is_refused_as_out_of_memory(holder: GraphHolder) -> None:
    large = shared_graphs.GraphSource("large", lambda: {"x": torch.empty(1, dtype=torch.uint8).expand(1 << 42)})
    user = shared_graphs._user_of(os.environ["GNNSYS_GRAPH_HOLDER"])
    with pytest.raises(torch.OutOfMemoryError, match=r"graph large takes 4,398,.* bytes of the device, where"):
        user.graph(large, torch.device("cuda:0"), 60.0)
    assert shared_graph(made_graph, SMALL).num_nodes() == 2000  # the holder goes on


def test_batches_of_a_shared_graph_are_those_of_a_graph_of_ones_own(holder: GraphHolder) -> None:
    def batches(graph):
        loader = gnnsys.NeighborLoader(graph, [5, 4], input_nodes=torch.arange(600), batch_size=64, shuffle=True)
        found = list(loader)
        loader.close()
        return found

    shared, own = shared_graph(made_graph, SMALL), made_graph(**SMALL)
    x = shared.node_data[NODE]["x"]
    assert x.device == torch.device("cuda:0") and is_shared_memory(x) and x.untyped_storage().nbytes() == x.nbytes
    for ours, theirs in zip(batches(shared), batches(own), strict=True):
        same_batch(ours, theirs)
    del ours, theirs, shared, x
    assert release_graphs() == ([], [])


def _held(holder: GraphHolder, num_bytes: int):
    (found,) = [each for each in holder.graphs() if each.bytes == num_bytes]
    return found


def _digest(graph) -> str:
    whole = hashlib.sha256()
    for array in (graph.node_data[NODE]["x"], graph.csc().indptr, graph.csc().indices):
        whole.update(array.numpy().tobytes())
    return whole.hexdigest()
