"""What is logged, as a list. pytest's own plug-in for that is off (`-p no:logging`): it takes 1.3 ms of every test.

It goes to each of torch's eighty loggers six times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What checkpoints and resumed loaders log from here on, from INFO upwards."""
    records: list[logging.LogRecord] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, levels = Keeps(), {}
    for logger in (logging.getLogger("gnnsys.checkpoint"), logging.getLogger("gnnsys.loader.resumable")):
        levels[logger] = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield records
    for logger, level in levels.items():
        logger.setLevel(level)
        logger.removeHandler(handler)
