"""Shared by the tests of DGL's face."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small layers of DGL's, whose teams of threads take longer to meet than to compute."""
    import dgl

    before = torch.get_num_threads(), dgl.utils.get_num_threads()
    torch.set_num_threads(1)
    dgl.utils.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    dgl.utils.set_num_threads(before[1])
