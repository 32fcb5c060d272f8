"""Pre-transform: products of the first layer, made by host cores from the graph's own rows.

A model whose first layer multiplies rows by a narrow weight needs of a batch nothing but the products. Where rows are
in host memory and batches go to a GPU, the cores make them and a small part of the bytes crosses the bus; gradients of
products come back, and the cores make those of the weights (DAHA, section 3.2.2). A product needs the weights of its
own step, so it is made in the forward pass: training is the same. With `staleness=k` it is made from the weights of k
batches before, while the device is busy with these: `StaleProducts`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnsys.loader.batch import Batch
from gnnsys.loader.first_sums import RowsLater, SumTable
from gnnsys.loader.sampled import Sampled, UnfetchedRows
from gnnsys.observe import num_local_ranks, num_usable_cores
from gnnsys.ops import HostMultiplier, RowsOnHost, whole_table

_MULTIPLIED = (torch.float64, torch.float32)  # dtypes of rows
_LEAST_MEASURED = 1024  # rows
_MOST_MEASURED = 5e9  # multiply-adds


class WayIsNone(Exception):
    """Batches cannot be made this way after all, and another one is gone."""


class LayerProducts(NamedTuple):
    """What a model's first layer multiplies rows by. `name` is the layer's class."""

    name: str
    row_weights: Callable[[], Any]  # RowWeights, or a word where the layer was changed since

    def weights(self) -> list[Tensor]:
        """By which rows of sources are multiplied, and then destinations' own, where there is such a weight."""
        found = self.row_weights()
        return [] if isinstance(found, str) else found.all

    @property
    def width(self) -> int:
        """Of all products of a row."""
        return sum(weight.shape[0] for weight in self.weights())

    def num_bytes(self, *counts: int) -> int:
        """Of products of so many rows by each weight."""
        return sum(n * w.shape[0] * w.element_size() for w, n in zip(self.weights(), counts, strict=False))

    def why_not(self, rows: Tensor) -> str | None:
        """Why rows of a table cannot be multiplied by the weights."""
        if not rows.is_cpu:
            return "rows are on the device already"
        weights = self.weights()
        if rows.dtype not in _MULTIPLIED or any(weight.dtype != rows.dtype for weight in weights):
            return f"rows are {rows.dtype} and the first layer's weights {weights[0].dtype}"
        if any(weight.shape[1:] != rows.shape[1:] for weight in weights):
            return f"rows have {rows.shape[1]} values, and the first layer takes {weights[0].shape[1]}"
        return None


def first_products(model: nn.Module | None) -> LayerProducts | str:
    """What a model's first layer multiplies rows by; or why nothing can be made of that."""
    if model is None:
        return "model= was not given, so nobody knows what the first layer takes"
    if any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules()):
        return "the model is compiled, or a part of it"
    for module in model.modules():
        name = type(module).__name__
        if any(kind.__name__ == "MessagePassing" for kind in type(module).__mro__):
            return f"the first layer, PyG's {name}, multiplies rows itself"
        row_weights = getattr(module, "row_weights", None)
        if callable(row_weights):
            found = row_weights()
            if isinstance(found, str):
                return f"the first layer, {name}, {found}"
            return LayerProducts(name, row_weights)
    return "the model has no layer of gnnsys.nn"


def check_staleness(staleness: object, model: nn.Module | None, execution: object) -> int:
    """ValueError, in one line, where products must not be of older weights, or nobody makes any."""
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise ValueError(f"staleness must be a number of batches >= 0, got {staleness!r}: 0 is exact training")
    if staleness == 0:
        return 0
    if execution is None or model is None:
        raise ValueError(f'staleness={staleness} is for what a plan makes ahead: give execution="auto" and model=')
    is_parallel = isinstance(model, nn.parallel.DistributedDataParallel)
    is_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_parallel or (is_group and torch.distributed.get_world_size() > 1):
        raise ValueError(
            f"staleness={staleness} is not for DDP, whose all-reduce has all ranks step together: leave staleness away"
        )
    return staleness


class FirstProducts:
    """`run(sampled)`: leaves the rows of a batch on the host, where it is its turn by `pattern` over positions.

    `give_out(batch)` is called by the consumer's thread with every batch. WayIsNone there, where the rows of a batch
    were asked for before they were multiplied: this model does something else to them.
    """

    def __init__(
        self, table: SumTable, layer: LayerProducts, pattern: Sequence[bool], *, for_device: bool, staleness: int = 0
    ) -> None:
        self.table, self.layer, self._pattern = table, layer, tuple(pattern) or (True,)
        self.multiplier = HostMultiplier(table.rows, product_threads() if for_device or staleness else None)
        self._stale = StaleProducts(layer, self.multiplier, self._is_turn, staleness) if staleness else None
        self._was_read = False

    def _is_turn(self, position: int) -> bool:
        return position >= 0 and self._pattern[position % len(self._pattern)]

    def run(self, sampled: Sampled) -> Sampled:
        if not self._is_turn(sampled.position):
            return sampled
        later = RowsLater(self.table.source, self.table.rows)
        ids = sampled.sample.node[self.table.node_type].to("cpu")
        host = RowsOnHost(self.multiplier, ids, later.check)
        if self._stale is not None:
            self._stale.add(sampled.position, host, self.counts(sampled))

        def read(ids: Tensor) -> Tensor:
            self._was_read |= not host.is_multiplied
            return later(ids)

        sampled.kept = UnfetchedRows(self.table.node_type, self.table.name, host, read)
        return sampled

    def counts(self, sampled: Sampled) -> tuple[int, ...]:
        """How many rows each weight multiplies, as far as a sample can tell: layers above may need fewer own ones."""
        sample, node_type = sampled.sample, self.table.node_type
        num_rows = sample.node[node_type].numel()
        num_own = num_rows
        if sample.blocks:
            num_own = sample.blocks[0].num_dst[node_type]
        elif sample.num_sampled_nodes.get(node_type):
            num_own = num_rows - sample.num_sampled_nodes[node_type][-1]
        return (num_rows, num_own)[: max(1, len(self.layer.weights()))]

    def give_out(self, batch: Batch) -> Batch:
        if self._was_read:
            self._was_read = False
            raise WayIsNone(
                f"rows were asked for before {self.layer.name} multiplied them: dropout on rows, say, or another layer "
                "before it"
            )
        self.multiplier.start()
        if self._stale is not None:
            self._stale.give_out(getattr(batch, "_position", -1))  # a transform may return something else
        return batch

    def measure(self, ids: Tensor, num_own: int) -> tuple[float, float]:
        """Seconds of a batch's products, and of the gradients, by the cores that would make them. Of many rows some are
        multiplied, and say what all take."""
        weights = [weight.detach().cpu() for weight in self.layer.weights()]
        values = sum(weight.numel() for weight in weights)
        counts, rows = [ids.numel(), num_own][: len(weights)], self.table.rows
        is_whole = bool(whole_table(counts, rows.shape[0]))  # then a part of the table says what all of it takes
        num_rows = rows.shape[0] if is_whole else ids.numel()
        share = min(1.0, max(_LEAST_MEASURED, _MOST_MEASURED / max(1, values)) / max(1, num_rows))
        counts = [round(share * count) for count in counts]
        multiplier = self.multiplier
        if is_whole:
            multiplier = HostMultiplier(rows[: max(round(share * num_rows), *counts)], multiplier.threads)
            ids = torch.arange(multiplier.table.shape[0], device="cpu")
        grads = [w.new_ones(count, w.shape[0]) for w, count in zip(weights, counts, strict=True)]
        try:
            return (
                _fastest(lambda: multiplier.products(ids, weights, counts)) / share,
                _fastest(lambda: multiplier.gradients(ids, grads, counts)) / share,
            )
        finally:
            if is_whole:
                multiplier.close()

    def close(self) -> None:
        """Ends the thread that multiplies; nothing that was made ahead is used any more."""
        if self._stale is not None:
            self._stale.forget()
        self.multiplier.close()


def product_threads() -> int:
    """Of this rank's cores all but one: who trains waits for a product."""
    return max(1, num_usable_cores() // num_local_ranks(os.environ) - 1)


def _fastest(call: Callable[[], object], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class _Snapshot(NamedTuple):
    """Weights as they were when a batch was given out: on the host once `event` has happened."""

    weights: list[Tensor]
    here: list[Tensor]
    event: torch.cuda.Event | None


class _Begun:
    """Products of a batch that are made ahead: a `MadeAhead`."""

    def __init__(self, of: list[Tensor], counts: Sequence[int], made: Future[list[Tensor]]) -> None:
        self._of, self._counts, self._made = of, tuple(counts), made
        self._versions: list[int] | None = None  # of the weights when the batch was given out

    def give_out(self) -> None:
        self._versions = [_version(weight) for weight in self._of]

    def take(self, weights: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor] | None:
        """Where no step was made since the batch was given out: one that was kept would be older than it may."""
        versions, self._versions = self._versions, None
        is_same = len(weights) == len(self._of) and all(a is b for a, b in zip(weights, self._of, strict=True))
        if versions is None or not is_same or tuple(counts) != self._counts:
            return None
        return self._made.result() if [_version(weight) for weight in weights] == versions else None


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


class StaleProducts:
    """Products of batch p from the weights with which batch p - k was given out: k steps old, and never older.

    Which weights depends on positions alone, so a run repeats. The first k batches of a run, and those behind a jump,
    are multiplied in their own step.
    """

    def __init__(
        self, layer: LayerProducts, multiplier: HostMultiplier, is_turn: Callable[[int], bool], staleness: int
    ) -> None:
        self._layer, self._multiplier, self._is_turn, self._staleness = layer, multiplier, is_turn, staleness
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[RowsOnHost, Sequence[int]]] = {}  # by position: rows that were sampled
        self._snapshots: dict[int, _Snapshot] = {}  # by the position whose products are made of it
        self._begun: dict[int, _Begun] = {}  # of batches that were not given out yet
        self._next = -1  # the position of the next batch

    def add(self, position: int, rows: RowsOnHost, counts: Sequence[int]) -> None:
        """By a loading thread: a batch was sampled."""
        with self._lock:
            if position in self._begun:  # sampled anew, as an epoch was left: its rows are the same
                rows.ahead = self._begun[position]
                return
            self._waiting[position] = rows, counts
            self._begin(position)

    def give_out(self, position: int) -> None:
        """By the consumer, before it sees the next batch."""
        with self._lock:
            if position != self._next:  # batches that do not follow each other: weights may be of any age
                self._snapshots.clear()
                self._begun.clear()
            self._next = position + 1
            for waiting in (self._waiting, self._snapshots, self._begun):
                for old in [p for p in waiting if p < position]:
                    waiting.pop(old)
            self._waiting.pop(position, None)
            begun = self._begun.pop(position, None)
            if begun is not None:
                begun.give_out()
            later = position + self._staleness
            weights = self._layer.weights()
            if weights and self._is_turn(later):
                self._snapshots[later] = _snapshot(weights)
                self._begin(later)

    def forget(self) -> None:
        """Batches that were made ahead are made anew."""
        with self._lock:
            for known in (self._waiting, self._snapshots, self._begun):
                known.clear()
            self._next = -1

    def _begin(self, position: int) -> None:
        """Where rows and weights are both there."""
        snapshot, waiting = self._snapshots.get(position), self._waiting.get(position)
        if snapshot is None or waiting is None:
            return
        rows, counts = waiting
        del self._waiting[position], self._snapshots[position]

        def make() -> list[Tensor]:
            if snapshot.event is not None:
                snapshot.event.synchronize()
            return self._multiplier.multiply(rows.ids, snapshot.here, counts, pin=snapshot.event is not None)

        rows.ahead = self._begun[position] = _Begun(snapshot.weights, counts, self._multiplier.submit(make))


def _snapshot(weights: list[Tensor]) -> _Snapshot:
    """Queued on the current stream, which the step before has its weights from."""
    with torch.no_grad():
        if weights[0].is_cuda:
            here = [weight.detach().to("cpu", non_blocking=True) for weight in weights]
            return _Snapshot(weights, here, torch.cuda.current_stream(weights[0].device).record_event())
        return _Snapshot(weights, [weight.detach().clone() for weight in weights], None)
