"""Table 4 of `gnnsys bench execution`: all rows train on the same batches, and each is timed in the same way."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gnnsys.bench.case import NotHere
from gnnsys.bench.execution import BENCHMARKS
from gnnsys.bench.execution.table4 import (
    APART,
    AT_LEAST,
    DGL,
    DGL_PLUS,
    H_INTER,
    H_INTRA,
    OURS_OF_TABLE,
    PAPER,
    SALIENT,
    SaintRun,
    TableRun,
    TimedLoader,
    all_closed,
    one_thread,
    table4,
)
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.workload import Sizes, Workload
from gnnsys.graph import NODE
from gnnsys.planning import WayTrial
from gnnsys.store import MemoryBudget
from tests.bench.verdicts import judged

TINY = Sizes(1_000, 10_000, num_seeds=8)
SETTINGS = {"device": "cpu"}


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    monkeypatch.setattr("gnnsys.planning.execution.plan.WayTrial", partial(WayTrial, warm=1, measured=1, rounds=1))


@pytest.fixture
def work():
    with Workload(TINY, settings=SETTINGS) as work:
        yield work


def test_rows_of_a_graph_are_timed_in_one_run_and_have_the_papers_beside_them(work, capsys):
    cases = [case for case in table4(work) if case.name.startswith("execution/table 4/arxiv/")]
    assert [case.ours for case in cases] == list(OURS_OF_TABLE)
    found = [measure(case, RoundLimits()).samples for case in cases]
    for case, samples in zip(cases, found, strict=True):
        assert samples.keys() == {case.ours, DGL, DGL_PLUS, SALIENT, APART}
        assert all(seconds > 0 for of in samples.values() for seconds in of)
        assert samples[DGL] == found[0][DGL]
    told = capsys.readouterr().err
    assert PAPER["arxiv"] in told and told.count("all of it took") == 1


def test_subgraphs_are_timed_where_they_are_sampled(work):
    (case,) = [case for case in table4(work) if "GraphSAINT" in case.name]
    samples = measure(case, RoundLimits()).samples
    assert samples.keys() == {H_INTRA, DGL, DGL_PLUS, SALIENT}


@pytest.mark.parametrize("make", [lambda work: TableRun(work, "arxiv"), SaintRun], ids=["SAGE", "SAINT"])
def test_all_rows_have_the_same_batches(work, make):
    with all_closed(make(work).loaders()) as loaders:
        plain = loaders[DGL].loader
        for timed in loaders.values():
            at = timed.loader.state_dict()  # of a trial, some epochs are over
            epoch = at["epoch"] + (at["batch"] > 0)
            batch = next(iter(timed.loader))
            plain.load_state_dict({**plain.state_dict(), "epoch": epoch, "batch": 0})
            expected = next(iter(plain))
            assert torch.equal(batch.n_id, expected.n_id) and torch.equal(batch.x, expected.x)


def test_the_device_has_less_room_than_the_graph_takes(work):
    run, budget = TableRun(work, "arxiv"), MemoryBudget.of("cpu")
    with run.room():
        assert budget.limit == run.graph().node_data[NODE]["x"].nbytes


class Listed:
    """Batches that are there, with a note of what was done."""

    def __init__(self, count: int) -> None:
        self.count, self.closed = count, 0

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("is_ahead", "expected"), [(True, [0, 1, 2] * 2), (False, [0, 1, 2])])
def test_epochs_in_a_row_are_timed_where_batches_are_made_ahead(is_ahead, expected):
    seen, loader = [], Listed(3)
    assert TimedLoader(loader, seen.append, is_ahead).epoch_seconds() > 0
    assert seen == expected and loader.closed == 1


def test_training_alone_sees_each_batch_once_and_loading_alone_trains_on_none():
    seen, loader = [], Listed(20)
    timed = TimedLoader(loader, seen.append)
    assert timed.loading_seconds() > 0 and seen == []
    assert timed.training_seconds() > 0 and seen == list(range(8))


def test_one_thread_is_given_back():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_what_the_paper_has_at_least_is_asked_of_the_last_of_its_rows():
    assert table4 in BENCHMARKS
    cases = list(table4(Workload(TINY)))
    expected = {(f"execution/table 4/{name}/{H_INTER}", least) for name in PAPER for least in AT_LEAST.values()}
    assert judged(cases) == expected and len(cases) == 16
    assert AT_LEAST[DGL] == 4.0 and AT_LEAST[SALIENT] == pytest.approx(1.786, abs=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_missing():
    with Workload(TINY) as work, pytest.raises(NotHere, match="it needs a GPU"):
        TableRun(work, "arxiv")
