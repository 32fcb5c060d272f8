"""Graphs of tests are small: one thread computes them. They are cut into a few bins, or as a test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fullgraph.tried_once import TriedOnce

NUMBERS = (  # files about the numbers that plain layers give: how layers are tried is for others
    "test_accuracy",
    "test_approximate",
    "test_attention",
    "test_dropout",
    "test_edges",
    "test_embedding",
    "test_exact",
    "test_execution_choice",
    "test_execution_kept",
    "test_execution_results",
    "test_inference",
    "test_memory",
    "test_moves",
    "test_norm",
    "test_parts",
    "test_passes",
    "test_pieces",
    "test_staleness",
    "test_sweeps",
    "test_trace",
    "test_typed",
)


@pytest.fixture(autouse=True)
def small_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner._BIN_NODES", 6)


@pytest.fixture(autouse=True)
def few_rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which boundary nodes are grouped: results do not depend on the order of nodes, and rounds took a tenth."""
    if request.path.stem != "test_plan":
        monkeypatch.setattr("gnnsys.fullgraph.plan.halo._ROUNDS", 2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plans, whatever the machine has."""
    monkeypatch.setattr("gnnsys.fullgraph.plan.propose_ways.num_usable_cores", lambda: 1)


@pytest.fixture(scope="session")
def tried_once() -> TriedOnce:
    return TriedOnce()


@pytest.fixture(autouse=True)
def try_layers_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tried_once: TriedOnce) -> None:
    if request.path.stem in NUMBERS:
        monkeypatch.setattr("gnnsys.fullgraph.plan.pass_planner.check_layers", tried_once)
