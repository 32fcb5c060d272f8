"""What tests of the queue share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnsys.jobs import GraphHolder, Queue, graph_holder, shared_graphs, worker_process
from tests.support.forked_popen import forking


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "queue") as made:
        yield made


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Who submits estimates in a process that is forked: it need not import torch again."""
    with forking(worker_process):
        yield


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the queue logs, a line each."""
    lines, log, handler = list[str](), logging.getLogger("gnnsys.jobs"), logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(log, "propagate", False)
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


@pytest.fixture(scope="module")
def one_holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphHolder]:
    folder = tmp_path_factory.mktemp("queue") / ("long-" * 30)  # a socket's own path may have 107 bytes
    folder.mkdir(mode=0o700)
    with forking(graph_holder):
        kept = GraphHolder(folder)
        yield kept
        kept.close()
    assert not list(folder.iterdir())


@pytest.fixture
def holder(one_holder: GraphHolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphHolder]:
    """One that keeps nothing, and that this process finds."""
    for name, value in one_holder.environment().items():
        monkeypatch.setenv(name, value)
    yield one_holder
    shared_graphs._users.clear()  # closes the connection
    gc.collect()
    one_holder.drop()
    assert one_holder.graphs() == []
