"""Servers that need not import torch. `make fuzz` and `make soak` have fresh ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz import served
from tests.support.forked_popen import forking


@pytest.fixture
def forked_servers() -> Iterator[None]:
    with forking(served):
        yield
