"""Products of rows that stay in host memory: rows times weights, and the gradient of the weights, made by host cores.

Rows are read where they lie, by id, a chunk at a time that stays in the processor's cache: no copy of a batch's rows is
made. Where a batch has most rows of the table, all of it is multiplied as it lies, and products are gathered, which are
narrow. Work: rows x features x width multiply-adds, and as many for the gradient. Bytes: every row once, each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

_CHUNK_BYTES = 32 << 20  # with fewer rows, packing the weights for each chunk takes as long as the product
_MOST_OF_IT = 0.7  # of the table's rows: gathering them takes longer than to multiply the others as well
_HALF_OF_IT = 0.5  # the same, where all rows are read anyway
_GRADIENT_ROWS = 4096  # at a time: by 15 threads MKL takes 150 ms for 34,493 rows of 8,415 at once, and so 23
R = TypeVar("R")


class _Segment(NamedTuple):
    """Rows [begin, end) of a batch, which all weights in `whose` multiply."""

    begin: int
    end: int
    whose: list[int]


def _segments(counts: Sequence[int]) -> Iterator[_Segment]:
    """Weight i multiplies the first `counts[i]` rows."""
    begin = 0
    for end in sorted({count for count in counts if count > 0}):
        yield _Segment(begin, end, [i for i, count in enumerate(counts) if count >= end])
        begin = end


def whole_table(counts: Sequence[float], num_rows: float) -> list[int]:
    """Which weights a whole table is multiplied by, where each is to multiply so many of its rows.

    >>> whole_table([80, 60], 100), whole_table([60, 60], 100)
    ([0, 1], [])
    """
    if not any(0 < count >= _MOST_OF_IT * num_rows for count in counts):
        return []
    return [i for i, count in enumerate(counts) if 0 < count >= _HALF_OF_IT * num_rows]


def _without(counts: Sequence[int], some: Sequence[int]) -> list[int]:
    return [0 if i in some else count for i, count in enumerate(counts)]


class HostMultiplier:
    """Multiplies rows of `table` [num_rows, features], which is in host memory, by weights that are there too.

    `threads` are a thread's of its own, which others wait for: where batches are on a device, whoever asks has torch's
    threads for other things, or only one. None: the thread that asks does the work.
    """

    def __init__(self, table: Tensor, threads: int | None = None) -> None:
        if not table.is_cpu or table.dim() != 2 or table.requires_grad:
            raise ValueError(f"rows that are multiplied are a constant table of the host's, got {list(table.shape)}")
        self.table, self.threads = table, threads
        self._local = threading.local()
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Starts the thread, where there is to be one. To be called by a thread that has the process's own number of
        torch's threads: what later ones begin with is set to that again. Idempotent."""
        with self._lock:
            if self.threads is not None and self._worker is None:
                self._worker = _start(self.threads)

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Has `work` done by our own thread; at once, where there is none."""
        self.start()
        with self._lock:
            if self._worker is not None:
                return self._worker.submit(work)
        done: Future[R] = Future()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        return done

    def products(
        self, ids: Tensor, weights: Sequence[Tensor], counts: Sequence[int], *, pin: bool = False
    ) -> list[Tensor]:
        """table[ids[:counts[i]]] @ weights[i].T for each i, by our thread; in pinned memory where it says `pin`."""
        return self.submit(lambda: self.multiply(ids, weights, counts, pin=pin)).result()

    def gradients(
        self, ids: Tensor, grads: Sequence[Tensor], counts: Sequence[int], *, pin: bool = False
    ) -> list[Tensor]:
        """grads[i].T @ table[ids[:counts[i]]] for each i: of each weight, where `grads` are those of its product."""
        return self.submit(lambda: self._sum_gradients(ids, grads, counts, pin)).result()

    def close(self) -> None:
        """Ends the thread. Idempotent; who asks for more starts another."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    @torch.inference_mode(False)
    @torch.no_grad()
    def multiply(
        self, ids: Tensor, weights: Sequence[Tensor], counts: Sequence[int], *, pin: bool = False
    ) -> list[Tensor]:
        """`products`, by the thread that calls."""
        made = [
            torch.empty(count, weight.shape[0], dtype=weight.dtype, device="cpu", pin_memory=pin)
            for weight, count in zip(weights, counts, strict=True)
        ]
        whole = whole_table(counts, self.table.shape[0])
        if whole:
            products = self.table @ torch.cat([weights[i] for i in whole]).t()
            for i, product in zip(whole, products.split([weights[i].shape[0] for i in whole], 1), strict=True):
                torch.index_select(product, 0, ids[: counts[i]], out=made[i])
        for begin, end, whose in _segments(_without(counts, whole)):
            together = weights[whose[0]] if len(whose) == 1 else torch.cat([weights[i] for i in whose])
            widths = [weights[i].shape[0] for i in whose]
            for first, last, rows in self._chunks(ids, begin, end):
                if len(whose) == 1:
                    torch.mm(rows, together.t(), out=made[whose[0]][first:last])
                    continue
                for i, product in zip(whose, (rows @ together.t()).split(widths, 1), strict=True):
                    made[i][first:last] = product
        return made

    @torch.inference_mode(False)
    @torch.no_grad()
    def _sum_gradients(self, ids: Tensor, grads: Sequence[Tensor], counts: Sequence[int], pin: bool) -> list[Tensor]:
        features = self.table.shape[1]
        found = [torch.zeros(grad.shape[1], features, dtype=grad.dtype, device="cpu", pin_memory=pin) for grad in grads]
        whole = whole_table(counts, self.table.shape[0])
        if whole:
            widths = [grads[i].shape[1] for i in whole]
            by_row = grads[whole[0]].new_zeros(self.table.shape[0], sum(widths))
            for i, part in zip(whole, by_row.split(widths, 1), strict=True):
                part.index_add_(0, ids[: counts[i]], grads[i])
            total = by_row.new_zeros(sum(widths), features)
            for begin in range(0, by_row.shape[0], _GRADIENT_ROWS):
                total.addmm_(by_row[begin : begin + _GRADIENT_ROWS].t(), self.table[begin : begin + _GRADIENT_ROWS])
            for i, sums in zip(whole, total.split(widths), strict=True):
                found[i].copy_(sums)
        for begin, end, whose in _segments(_without(counts, whole)):
            widths = [grads[i].shape[1] for i in whose]
            alone = len(whose) == 1
            total = found[whose[0]] if alone else found[0].new_zeros(sum(widths), features)
            for first, last, rows in self._chunks(ids, begin, end):
                here = [grads[i][first:last] for i in whose]
                total.addmm_((here[0] if alone else torch.cat(here, 1)).t(), rows)
            if not alone:
                for i, part in zip(whose, total.split(widths), strict=True):
                    found[i] += part
        return found

    def _chunks(self, ids: Tensor, begin: int, end: int) -> Iterator[tuple[int, int, Tensor]]:
        """First, last and rows of each chunk, in a buffer of this thread's."""
        row_bytes = max(1, self.table.shape[1] * self.table.element_size())
        most = max(64, _CHUNK_BYTES // row_bytes)
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.shape[0] < min(most, end - begin):
            buffer = self._local.buffer = self.table.new_empty(min(most, end - begin), self.table.shape[1])
        most = buffer.shape[0]
        for first in range(begin, end, most):
            last = min(end, first + most)
            rows = buffer[: last - first]
            torch.index_select(self.table, 0, ids[first:last], out=rows)
            yield first, last, rows


def _start(threads: int) -> ThreadPoolExecutor:
    """A thread in which torch has so many."""
    before = torch.get_num_threads()

    def begin() -> None:
        torch.get_num_threads()  # a thread takes the process's number when it first asks, and no later
        torch.set_num_threads(threads)

    worker = ThreadPoolExecutor(1, "gnnsys-products", begin)
    worker.submit(lambda: None).result()
    torch.set_num_threads(before)  # what later threads begin with
    return worker
