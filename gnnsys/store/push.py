"""The client's side of a push: rows grouped by the part that has them, in messages of bounded size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gnnsys.comm import FRAME_BYTES, RemoteError
from gnnsys.ops import BufferPool, move_rows
from gnnsys.store.candidates import Located
from gnnsys.store.machines import ShardReply
from gnnsys.store.message_plan import PUSH_MODES, ArrayList
from gnnsys.store.pull import Refused
from gnnsys.store.spec import TableSpec

_MESSAGE_BYTES = 16 << 20
_MOST_PIECES = 128  # of one step, about: a message has so many arrays, and no more


class PendingPush:
    """A push under way. `lost` is told of one whose fate is unknown: its table's rows are then, too."""

    def __init__(
        self, spec: TableSpec, answers: list[ShardReply], refused: Refused, lost: Callable[[str, Exception], None]
    ) -> None:
        self._spec, self._answers, self._refused, self._lost = spec, answers, refused, lost
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self.is_told = False  # what went wrong, if anything did, was raised to somebody
        self.is_skipped = False  # once it was answered: a step that a rank has asked to leave out

    def done(self) -> bool:
        """Whether every shard has answered."""
        return all(answer.done() for answer in list(self._answers))

    def result(self) -> None:
        """Returns when the push was applied; raises what a shard said against it."""
        error = self.settle()
        if error is not None:
            self.is_told = True
            raise error

    def settle(self) -> Exception | None:
        """Waits for every shard; what the first one that did not apply the push said."""
        with self._lock:
            while self._answers:
                error = self._wait(self._answers[0])
                self._error = self._error or error
                del self._answers[0]
            return self._error

    def _wait(self, answer: ShardReply) -> Exception | None:
        try:
            received = answer.result()
        except ValueError as error:  # the shard looked at it and changed nothing
            refused = self._refused(error, [self._spec])
            refused.__cause__ = error
            return refused
        except Exception as error:  # it never ran, was given up, broke off, or nobody knows
            self._lost(self._spec.name, error)
            if isinstance(error, RemoteError) and error.remote_type == "TimeoutError":
                late = TimeoutError(error.remote_text)
                late.__cause__ = error
                return late
            return error
        self.is_skipped = self.is_skipped or bool((received.options or {}).get("skipped"))
        return None


def push_messages(
    spec: TableSpec, runs: Sequence[Located], rows: Tensor, mode: str, buffers: BufferPool
) -> Iterator[tuple[int, list[Tensor]]]:
    """The part each message is for, and its arrays. Rows are copied: the caller may change its own at once."""
    row_bytes = max(1, spec.row_size * rows.element_size())
    per_message, code = max(1, _MESSAGE_BYTES // row_bytes), PUSH_MODES.index(mode)
    for run in runs:
        for begin in range(0, run.local.numel(), per_message):
            arrays, plan = ArrayList(), []
            end = min(begin + per_message, run.local.numel())
            for ids, piece in _pieces(run, rows, begin, end, max(1, FRAME_BYTES // row_bytes), buffers):
                plan.append((spec.number, run.part, arrays.add(ids), arrays.add(piece), code))
            yield run.part, arrays.with_plan(plan, 5)


def step_messages(
    spec: TableSpec, runs: Sequence[Located], grads: Tensor, machine_of_part: Sequence[int], buffers: BufferPool
) -> Iterator[tuple[int, list[Tensor]]]:
    """One message for every machine that has rows of the table, with gradients or without."""
    of_part = {run.part: run for run in runs}
    grads = grads.to(torch.float32)
    per_piece = max(1, FRAME_BYTES // max(1, spec.row_size * grads.element_size()), grads.shape[0] // _MOST_PIECES)
    for machine in sorted(set(machine_of_part)):
        arrays, plan = ArrayList(), []
        for part in (p for p, owner in enumerate(machine_of_part) if owner == machine and p in of_part):
            run = of_part[part]
            for ids, piece in _pieces(run, grads, 0, run.local.numel(), per_piece, buffers):
                plan.append((part, arrays.add(ids), arrays.add(piece)))
        if any(spec.part_shape(part)[0] for part, owner in enumerate(machine_of_part) if owner == machine):
            yield machine, arrays.with_plan(plan, 3)


def _pieces(
    run: Located, rows: Tensor, begin: int, end: int, per_piece: int, buffers: BufferPool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and rows from `begin` to `end` of a run, in order. A piece of one frame is not copied there."""
    for first in range(begin, end, per_piece):
        ids = run.local[first : min(first + per_piece, end)]
        yield ids, _rows_of(run, rows, first, ids.numel(), buffers)


def _rows_of(run: Located, rows: Tensor, first: int, count: int, buffers: BufferPool) -> Tensor:
    """A copy of some of a run's rows, in order."""
    out = buffers.empty((count, *rows.shape[1:]), rows.dtype)
    if run.order is None:
        return out.copy_(rows[first : first + count])
    return move_rows(rows.contiguous(), out, index=run.order[first : first + count])
