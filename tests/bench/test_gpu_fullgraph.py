"""What `bench gpu` says of full-graph training: bounds that count what is done, losses that agree, peers that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gnnsys.bench import OURS, Report, Workload
from gnnsys.bench.gpu import fullgraph
from gnnsys.bench.gpu.fullgraph import PYG_MESSAGES, bytes_moved
from gnnsys.bench.gpu.fullgraph_sides import AGREE, NUM_CHECKED, Epoch, Widths, agreeing, by_hand, ours, widths_of
from gnnsys.bench.gpu.inputs import GraphSize, graph_sizes
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.workload import Sizes

FIRST = 3.85


@pytest.fixture
def work():
    with Workload(Sizes(200, 2_000), settings={"device": "cuda:0" if torch.cuda.is_available() else "cpu"}) as made:
        yield made


def trained(*losses: float) -> Callable[[], Epoch]:
    """A side that gives these losses, one per epoch, and then the last again."""

    def make() -> Epoch:
        left = iter(losses)
        return lambda: torch.tensor(next(left, losses[-1]))

    return make


def failing(error: Exception) -> Callable[[], Epoch]:
    def make() -> Epoch:
        raise error

    return make


class Gathered(TorchDispatchMode):
    """Counts the numbers that our aggregations gather: edges times width."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []
        self.num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("gnnsys::spmm", "gnnsys::spmm_add"):
            _, indices, _, rows = args[:4]
            self.widths.append(rows.shape[1])
            self.num_values += indices.numel() * rows.shape[1]
        return func(*args, **(kwargs or {}))


def test_an_epoch_gathers_the_rows_that_its_bound_counts(work: Workload):
    train = ours(work)
    train()  # sums of features are made once
    with Gathered() as found:
        train()
    widths, (_, size) = widths_of(work), graph_sizes(work)
    assert sorted(found.widths) == [widths.classes] * 2 + [widths.hidden] * 2
    least, gathered = bytes_moved(size, widths)
    once_per_node = size.num_nodes * sum(found.widths)
    assert gathered - least == 4 * (found.num_values - once_per_node)


def test_a_graph_with_an_edge_per_node_gathers_no_more_than_the_least():
    least, gathered = bytes_moved(GraphSize(1_000, 1_000, True), Widths(100, 256, 47))
    assert least == gathered


def test_bounds_of_the_full_size_are_what_is_written_about_them():
    least, gathered = bytes_moved(GraphSize(2_450_000, 123_700_000, True), Widths(100, 256, 47))
    assert least == pytest.approx(51.2e9, rel=0.01)  # 5,013 numbers per node, and the ids of four aggregations
    assert gathered == pytest.approx(345e9, rel=0.01)  # four aggregations of 606 numbers per edge in all


@pytest.mark.parametrize("ordered", [False, True])
def test_both_ways_of_torch_sparse_train_as_ours(work: Workload, ordered: bool):
    found = agreeing({OURS: lambda: ours(work), "peer": lambda: by_hand(work, ordered=ordered)}, {})
    later = [float(found[name]()) for name in (OURS, "peer")]
    assert later[0] == pytest.approx(later[1], rel=1e-4)


def test_the_checked_losses_change_by_more_than_they_may_be_apart(work: Workload):
    train = ours(work)
    first, *_, last = [float(train()) for _ in range(NUM_CHECKED)]
    assert abs(first - last) > 5 * AGREE * first


def test_sides_whose_losses_agree_are_kept():
    near = FIRST * (1 + AGREE / 2)
    assert list(agreeing({OURS: trained(FIRST, 3.8, 3.7), "peer": trained(near, 3.8, 3.7)}, {})) == [OURS, "peer"]


@pytest.mark.parametrize("loss", [FIRST * (1 + 2 * AGREE), FIRST * (1 - 2 * AGREE), float("nan")])
def test_a_side_whose_last_loss_is_another_is_refused(loss: float):
    with pytest.raises(RuntimeError, match="losses of peer and gnnsys"):
        agreeing({OURS: trained(3.9, 3.8, FIRST), "peer": trained(3.9, 3.8, loss)}, {})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("Tried to allocate 118.0 GiB.\nMore"), "out of memory: Tried to allocate 118.0 GiB."),
        (NotImplementedError("no such kernel"), "does not run: no such kernel"),
    ],
)
def test_a_peer_that_cannot_run_is_named_with_the_reason(error: Exception, reason: str):
    missing: dict[str, str] = {}
    found = agreeing({OURS: trained(FIRST), "peer": failing(error), "other": trained(FIRST)}, missing)
    assert list(found) == [OURS, "other"]
    assert missing == {"peer": reason}


def test_that_ours_cannot_run_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        agreeing({OURS: failing(torch.OutOfMemoryError("none left")), "peer": trained(FIRST)}, {})


def test_a_peer_out_of_memory_leaves_its_row_empty_and_ours_full(work: Workload, monkeypatch: pytest.MonkeyPatch):
    def none_left(_: Workload) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    pytest.importorskip("torch_geometric")
    monkeypatch.setattr(fullgraph, "pyg_with_messages", none_left)
    (case,) = (case for case in fullgraph.epoch(work) if case.name == "fullgraph/beside messages")
    report = Report("gpu", quick=False)
    (row,) = report.add(case, measure(case, RoundLimits(least=1, most=1)))
    assert row.ours is not None and row.ours > 0 and row.ratio is None
    assert report.refused == {"fullgraph/beside messages": {PYG_MESSAGES: "out of memory: none left"}}
    assert report.failures() == []
