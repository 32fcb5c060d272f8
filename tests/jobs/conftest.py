"""What tests of the queue share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnsys.jobs import Queue


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "queue") as made:
        yield made
