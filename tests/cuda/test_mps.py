"""The real daemon of MPS: clients are served, kept to their memory, ended one by one, and share a graph."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gnnsys.jobs import GraphHolder
from gnnsys.jobs.mps import DeviceSharing, MpsUnavailable, start_sharing
from tests.jobs.graph_users import GraphUsers
from tests.support.processes import await_true, processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GB = 1 << 30
ON_DEVICE = {"GNNSYS_JOB_DEVICE": "cuda:0"}
SMALL = {"num_nodes": 2000, "seed": 1}
SUM = 512.0**3


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[DeviceSharing]:
    try:
        found = start_sharing(tmp_path, "mps")
    except MpsUnavailable as error:
        pytest.skip(str(error))
    yield found
    assert found.mps is not None
    found.close()
    assert not found.mps._processes() and not found.mps.folder.exists()


def test_clients_are_served_and_one_that_asks_for_more_than_its_memory_is_refused(sharing, tmp_path: Path) -> None:
    assert sharing.said == "jobs share the device by MPS" and sharing.mps.servers()
    capped = {**sharing.environment(memory=3 * GB), **ON_DEVICE}
    with processes() as running:
        users = GraphUsers(
            running,
            tmp_path / "users",
            SMALL,
            [{**capped, "TEST_BYTES": str(GB)}, {**capped, "TEST_BYTES": str(6 * GB)}],
        )
        assert set(users.pids) <= set(sharing.mps.clients())
        assert users.ask_all("work") == [SUM, SUM]
        assert users.ask(0, "allocate") is True
        assert users.ask(1, "allocate")["error"] == "OutOfMemoryError"
        assert users.ask_all("work") == [SUM, SUM]
        users.close()


def test_a_client_that_is_ended_leaves_the_others_alone(sharing, tmp_path: Path) -> None:
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", SMALL, [{**sharing.environment(), **ON_DEVICE}] * 3)
        assert sharing.terminate_client(users.pids[0])
        ended = users.ask(0, "work")
        assert isinstance(ended, dict) and "error" in ended, ended
        assert users.ask_all("work", [1, 2]) == [SUM, SUM]
        os.kill(users.pids[0], signal.SIGKILL)
        await_true(lambda: users.pids[0] not in sharing.mps.clients(), "it is no client any more", 20)
        assert not sharing.terminate_client(users.pids[0])
        os.kill(users.pids[1], signal.SIGKILL)
        await_true(lambda: users.pids[1] not in sharing.mps.clients(), "a killed one is none either", 20)
        assert users.ask(2, "work") == SUM
        users.close()


@pytest.mark.parametrize("own", [None, 2 * GB], ids=["without a cap", "with a cap"])
def test_clients_share_a_graph(sharing, tmp_path: Path, own: int | None) -> None:
    """What a client maps may count as its own: the queue gives it its memory and that of its graphs."""
    arguments = {"num_nodes": 10_000, "columns": 40_000, "seed": 1}  # 1.6 GB of rows
    memory = None if own is None else own + 10_000 * 40_000 * 4 + (1 << 20)
    holder = GraphHolder(tmp_path, device="cuda:0", environment=sharing.environment())
    environment = {**sharing.environment(memory=memory), **holder.environment(), "TEST_BYTES": str(GB)}
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", arguments, [environment] * 2)
        first, second = users.ask_all("map")
        assert "names" in first and first == second and users.num_made == 1, (first, second)
        assert users.ask_all("allocate") == [True, True]  # beside the graph
        values = users.ask_all("read")
        assert values[0] == values[1]
        os.kill(users.pids[0], signal.SIGKILL)
        await_true(lambda: holder.graphs()[0].users == (users.pids[1],), "a killed user is none", 20)
        assert users.ask(1, "read") == values[1]
        users.close()
    holder.close()


def test_a_daemon_of_a_service_that_is_gone_is_adopted_with_its_clients(sharing, tmp_path: Path) -> None:
    with processes() as running:
        users = GraphUsers(running, tmp_path / "users", SMALL, [{**sharing.environment(), **ON_DEVICE}])
        before = sharing.mps._processes()
        second = start_sharing(tmp_path, "mps")
        assert second.said.endswith("whose daemon of an earlier service goes on")
        assert second.mps is not None and second.mps._processes() == before
        assert users.ask(0, "work") == SUM
        users.close()
