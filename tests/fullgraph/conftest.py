"""Graphs of tests are small: one thread computes them. They are cut into a few bins, or as a test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def small_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner._BIN_NODES", 6)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
