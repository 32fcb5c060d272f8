"""What tests of the queue share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnsys.jobs import Queue, worker_process
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
