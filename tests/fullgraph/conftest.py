"""Graphs of tests are small; between ranks they are cut into a few bins, as large ones are, or as a test says."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner._BIN_NODES", 6)
