"""Bins that move between host and device: the same numbers, however late copies are, and memory that is reused."""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gnnsys.fullgraph import BinSchedule, BoundarySampling, HybridParallel, Packing
from gnnsys.fullgraph.offload.copy_streams import CopyStreams, HostStreams, copy_into, streams_between
from gnnsys.fullgraph.offload.mover import Mover, Pick, StagingBuffers
from gnnsys.fullgraph.plan import pass_planner
from gnnsys.fullgraph.plan.pass_planner import PassPlan
from gnnsys.nn import GATConv, GCNConv, SAGEConv
from gnnsys.store import MemoryBudget, capped, memory_budget
from tests.fullgraph.dense import random_graph
from tests.fullgraph.test_exact import WIDTH, N, check, gat, normed, random_ranks, skipping, unequal_sage
from tests.fullgraph.thread_ranks import run_ranks
from tests.support.grid import every_pair, every_value

CPU = torch.device("cpu")
POISON = 0xFF  # NaN, in every floating-point type


class LateMark:
    """Work that is done when somebody waits for it, and not before."""

    def __init__(self, queue: deque[LateMark], work: Callable[[], object], sources: Sequence[Tensor] = ()) -> None:
        self.queue, self.work, self.sources = queue, work, sources
        queue.append(self)

    def synchronize(self) -> None:
        while self in self.queue:
            self.queue.popleft().work()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Also where both are poisoned."""
    return not a.numel() or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


class LateStreams:
    """A device whose copies happen as late as its marks allow: what is read before, or written before, is seen.

    What is computed cannot be put off here. So a copy in that something followed may have been read until the next copy
    out is over, and its buffer must be as it was until then.
    """

    def __init__(self) -> None:
        self.queues: tuple[deque[LateMark], deque[LateMark]] = (deque(), deque())
        self.num_buffers = 0
        self._rows: set[int] = set()  # memory that copies go to and from directly
        self._read: list[tuple[Tensor, Tensor]] = []  # buffers that may still be read, and what is in them
        self._reads: list[list[tuple[Tensor, Tensor]]] = []  # the same, by copy out that is not over

    def buffer(self, num_bytes: int) -> Tensor:
        self.num_buffers += 1
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows = torch.empty(shape, dtype=dtype).fill_(torch.nan)
        self._rows.add(rows.untyped_storage().data_ptr())
        return rows

    def is_direct(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous() and tensor.untyped_storage().data_ptr() in self._rows

    def bring(self, sources: Sequence[Tensor], starts: Sequence[int], num_bytes: int) -> tuple[Tensor, LateMark]:
        block = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        return block, LateMark(self.queues[0], lambda: copy_into(block, sources, starts), sources)

    def follow(self, mark: LateMark) -> None:
        self._read += [(source, source.clone()) for source in self._sources_until(mark)]
        mark.synchronize()

    def _sources_until(self, mark: LateMark) -> list[Tensor]:
        queued = list(self.queues[0])
        before = queued[: queued.index(mark) + 1] if mark in queued else []
        return [source for each in before for source in each.sources]

    def fetch(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> LateMark:
        for place in into:
            place.view(torch.uint8).fill_(POISON)

        read, self._read = self._read, []
        self._reads.append(read)
        for each in self._reads:  # what goes back to its place with more added was read before it is written
            each[:] = [(source, then) for source, then in each if not any(overlap(source, place) for place in into)]

        def work() -> None:
            assert all(same_bytes(source, then) for source, then in read), "a buffer was written to while it was read"
            self._reads = [each for each in self._reads if each is not read]
            for tensor, place in zip(tensors, into, strict=True):
                place.copy_(tensor)

        return LateMark(self.queues[1], work)

    def drain(self) -> None:
        for queue in self.queues:
            while queue:
                queue.popleft().work()


@pytest.fixture
def late(monkeypatch) -> list[LateStreams]:
    """All bins of this test move; the streams that were made."""
    made: list[LateStreams] = []

    def between(rows_device: torch.device, device: torch.device) -> CopyStreams:
        made.append(LateStreams())
        return made[-1]

    monkeypatch.setattr(pass_planner, "streams_between", between)
    return made


OPTIONS = {
    "default": {},
    "one bin": {"schedule": BinSchedule(packing=Packing(num_bins=1))},
    "four bins": {"schedule": BinSchedule(packing=Packing(num_bins=4))},
    "bins of one node": {"schedule": BinSchedule(packing=Packing(bin_nodes=1))},
    "no pipelines": {"schedule": BinSchedule(intra_layer=False, inter_layer=False, packing=Packing(num_bins=4))},
    "recompute": {"schedule": BinSchedule(packing=Packing(num_bins=4)), "recompute": True},
    "budget": {"memory_budget": 60_000},
}


@every_value(make=[unequal_sage, gat, skipping, normed], options=OPTIONS)
def test_moving_bins_give_the_dense_answer_however_late_copies_are(make, options, late):
    check(make, random_graph(N, 300, 1), torch.zeros(N, dtype=torch.int64), 1, **options)
    assert late and all(streams.num_buffers > 0 for streams in late)


@every_pair(
    make=[unequal_sage, skipping],
    world_size=[2, 3],
    options={"four bins": OPTIONS["four bins"], "budget": OPTIONS["budget"]},
)
def test_moving_bins_of_several_ranks_give_the_dense_answer(make, world_size, options, late):
    check(make, random_graph(N, 300, 1), random_ranks(world_size), world_size, **options)
    assert len(late) == world_size


def test_moving_bins_draw_the_dropout_and_the_halo_that_others_do(monkeypatch):
    """Compared with bins that lie where they are computed, on two ranks."""
    graph, x = random_graph(N, 300, 1), torch.randn(N, WIDTH, dtype=torch.float64)
    torch.manual_seed(0)
    layers = [GATConv(WIDTH, 6), nn.Dropout(0.4), nn.ReLU(inplace=True), GCNConv(6, 5), nn.Dropout(0.2)]
    layers = [layer.double() for layer in layers]

    def train(rank, group):
        model = HybridParallel(
            copy.deepcopy(layers), graph, ranks=random_ranks(2), group=group, timeout=60, seed=5,
            approximate=BoundarySampling(0.5), schedule=BinSchedule(packing=Packing(num_bins=3)),
        )  # fmt: skip
        model(x[model.nodes]).square().sum().backward()
        return [p.grad for p in model.parameters()]

    want = run_ranks(2, train)
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: LateStreams())
    for found, expected in zip(run_ranks(2, train), want, strict=True):
        for got, grad in zip(found, expected, strict=True):
            torch.testing.assert_close(got, grad, rtol=1e-10, atol=1e-12)


def test_buffers_are_lent_again_from_pass_to_pass(late):
    layers = [SAGEConv(WIDTH, 8), nn.ReLU(), SAGEConv(8, 3)]
    model = HybridParallel(layers, random_graph(N, 300, 1), schedule=BinSchedule(packing=Packing(bin_nodes=4)))
    x = torch.randn(N, WIDTH, requires_grad=True)
    for _ in range(2):
        model(x).square().sum().backward()
    (streams,) = late
    made = streams.num_buffers
    for _ in range(3):
        model(x).square().sum().backward()
    with torch.inference_mode():
        model(x)
    model(x).square().sum().backward()
    assert 0 < made == streams.num_buffers


def test_a_buffer_is_lent_again_only_when_its_bin_is_finished():
    streams = LateStreams()
    mover, came = Mover(StagingBuffers(streams)), []
    rows = torch.arange(40.0).view(10, 4)
    index = torch.tensor([7, 2])
    for number in range(6):
        mover.load(number, [Pick(rows + number, index), Pick(rows + number, slice(3, 5))])
        load = mover.take(number)
        first, second = load.tensors
        mover.send_back([first * 2, second], lambda got: came.append([t.clone() for t in got]), [load])
        mover.finish(keep=1)
        assert mover.num_flying == 1
    mover.finish()
    for number, (first, second) in enumerate(came):
        assert torch.equal(first, (rows + number)[index] * 2) and torch.equal(second, (rows + number)[3:5])
    assert len(came) == 6 and streams.num_buffers <= 4


def test_a_pass_that_fails_waits_for_its_copies():
    streams = LateStreams()
    with pytest.raises(RuntimeError, match="stop"), Mover(StagingBuffers(streams)) as mover:
        mover.load(0, [Pick(torch.ones(3, 2))])
        raise RuntimeError("stop")
    assert not any(streams.queues)


def test_streams_of_the_cpu_copy_at_once():
    mover = Mover(StagingBuffers(HostStreams()))
    mover.load("a", [Pick(torch.ones(3, 2))])
    load, came = mover.take("a"), []
    mover.send_back([load.tensors[0] + 1], lambda got: came.append(got[0].clone()), [load])
    mover.finish()
    assert torch.equal(came[0], torch.full((3, 2), 2.0)) and streams_between(CPU, CPU) is None


@pytest.mark.parametrize("make", [unequal_sage, gat, normed], ids=["sage", "gat", "batch norm"])
def test_without_a_budget_bins_fit_into_half_of_what_is_free(make, monkeypatch):
    """All are kept where there is room for all; where there is not, they are as with that budget."""
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: HostStreams())
    graph, x = random_graph(N, 400, 1), torch.randn(N, WIDTH, dtype=torch.float64)
    torch.manual_seed(0)
    layers = [layer.double() for layer in make()]

    def trained(free: int, **options) -> tuple[PassPlan, Tensor, list[Tensor]]:
        """Of a model that is gone when it returns, and the room that its bins were promised with it."""
        monkeypatch.setattr(memory_budget, "free_device_memory", lambda device: free)
        model = HybridParallel(copy.deepcopy(layers), graph, **options)
        out = model(x)
        out.square().sum().backward()
        (plan,) = model._planner.plans.values()
        return plan, out.detach(), [p.grad for p in model.parameters()]

    of_roomy, out, grads = trained(1 << 30)
    of_tight, out_tight, grads_tight = trained(40_000)
    of_told, *_ = trained(1 << 30, memory_budget=20_000)
    torch.testing.assert_close((out_tight, grads_tight), (out, grads), rtol=1e-10, atol=1e-12)
    assert not of_roomy.recompute and of_tight.recompute
    assert [step.bounds for step in of_tight.steps] == [step.bounds for step in of_told.steps]
    with pytest.raises(
        ValueError, match=r"bytes.*No memory_budget was given, so it is half of what the device has free"
    ):
        trained(20)


def test_with_a_cap_bins_are_the_same_whatever_others_have_taken(monkeypatch):
    monkeypatch.setattr(pass_planner, "streams_between", lambda *_: HostStreams())
    graph, x = random_graph(N, 400, 1), torch.randn(N, WIDTH, dtype=torch.float64)
    layers = [layer.double() for layer in unequal_sage()]

    def bins(free: int) -> list[list[int]]:
        """Of a model that is gone when it returns, and the room that its bins were promised with it."""
        monkeypatch.setattr(memory_budget, "free_device_memory", lambda device: free)
        with capped("cpu", 40_000 + sum(use.bytes for use in MemoryBudget.of("cpu").uses())):
            model = HybridParallel(copy.deepcopy(layers), graph)
            model(x).square().sum().backward()
        (plan,) = model._planner.plans.values()
        assert plan.recompute
        return [step.bounds for step in plan.steps]

    gc.collect()  # models of other tests, with their promises
    assert bins(1 << 40) == bins(100)
