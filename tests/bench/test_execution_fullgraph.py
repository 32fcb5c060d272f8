"""Rows of `gnnsys bench execution` on the whole graph: all sides train the same model, and each has two figures."""

from __future__ import annotations

import pytest

from gnnsys.bench.case import OURS, Case
from gnnsys.bench.execution import BENCHMARKS, fullgraph
from gnnsys.bench.execution.fullgraph import DEFAULT, Race
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.workload import Sizes, Workload

SETTINGS = {"device": "cpu"}
TINY = Sizes(2_000, 20_000, dim=16, num_seeds=64, epoch_batches=2)


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch):
    monkeypatch.setattr(fullgraph, "EPOCHS", 6)


def cases(work: Workload, part: str) -> list[Case]:
    return [case for one in BENCHMARKS for case in one(work) if part in case.name]


@pytest.mark.parametrize("part", ["full graph, pubmed, 6", "pubmed, one thread, an epoch", "pubmed, PyG's SAGEConv, 6"])
def test_all_sides_train_the_same_model_and_are_timed(part):
    with Workload(TINY, settings=SETTINGS) as work:
        (case,) = cases(work, part)
        found = measure(case, RoundLimits())
    assert not found.refused and {OURS, DEFAULT} <= found.samples.keys()
    assert len(found.samples) == (4 if part.startswith("full graph") else 2)
    assert all(seconds > 0 for samples in found.samples.values() for seconds in samples)


def test_sides_that_train_another_model_are_found_out():
    race = Race({"one": lambda: lambda: 1.0, "other": lambda: lambda: 1.1}, 2)
    with pytest.raises(RuntimeError, match="sides do not train the same model"):
        race.figures("one")
