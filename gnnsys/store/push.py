"""The client's side of a push: rows grouped by the part that has them, in messages of bounded size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import FRAME_BYTES, RemoteError
from gnnsys.ops import BufferPool, move_rows
from gnnsys.store.candidates import Located
from gnnsys.store.lent_memory import LEAST_BYTES, Lender, StepWriter
from gnnsys.store.machines import ShardReply
from gnnsys.store.message_plan import PUSH_MODES, ArrayList
from gnnsys.store.pull import Refused
from gnnsys.store.spec import TableSpec

_MESSAGE_BYTES = 16 << 20
_MOST_PIECES = 128  # of one step, about: a message has so many arrays, and no more


class Outgoing(NamedTuple):
    """One message of a push: the machine it is for, and what it says.

    `ended(ok)` is called once, when its push has ended; `ok` where every shard has applied it.
    """

    machine: int
    arrays: list[Tensor]
    options: dict[str, Any] | None = None  # beside those of the push
    ended: Callable[[bool], None] | None = None


class PendingPush:
    """A push under way. `lost` is told of one whose fate is unknown: its table's rows are then, too.

    `ended` are those of its messages.
    """

    def __init__(
        self, spec: TableSpec, answers: list[ShardReply], refused: Refused, lost: Callable[[str, Exception], None],
        ended: Sequence[Callable[[bool], None]] = (),
    ) -> None:  # fmt: skip
        self._spec, self._answers, self._refused, self._lost = spec, answers, refused, lost
        self._ended = list(ended)
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
            while self._ended:
                self._ended.pop()(self._error is None)
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
    spec: TableSpec, runs: Sequence[Located], rows: Tensor, mode: str, machine_of_part: Sequence[int],
    buffers: BufferPool,
) -> Iterator[Outgoing]:  # fmt: skip
    """Rows are copied: the caller may change its own at once."""
    row_bytes = max(1, spec.row_size * rows.element_size())
    per_message, code = max(1, _MESSAGE_BYTES // row_bytes), PUSH_MODES.index(mode)
    for run in runs:
        for begin in range(0, run.local.numel(), per_message):
            arrays, plan = ArrayList(), []
            end = min(begin + per_message, run.local.numel())
            for ids, piece in _pieces(run, rows, begin, end, max(1, FRAME_BYTES // row_bytes), buffers):
                plan.append((spec.number, run.part, arrays.add(ids), arrays.add(piece), code))
            yield Outgoing(machine_of_part[run.part], arrays.with_plan(plan, 5))


def step_messages(
    spec: TableSpec, runs: Sequence[Located], grads: Tensor, machine_of_part: Sequence[int], buffers: BufferPool,
    lenders: Mapping[int, Lender],
) -> Iterator[Outgoing]:  # fmt: skip
    """One message for every machine that has rows of the table, with gradients or without.

    Machines with a lender read gradients where they lie; to the others they are sent. The former come first: to lend
    may fail, and a step of which one machine has its share and another does not is lost.
    """
    of_part = {run.part: run for run in runs}
    grads = grads.to(torch.float32)
    for machine in sorted(set(machine_of_part), key=lambda machine: (machine not in lenders, machine)):
        parts = [part for part, owner in enumerate(machine_of_part) if owner == machine]
        mine = [of_part[part] for part in parts if part in of_part]
        lender = lenders.get(machine)
        lent = None if lender is None else _lent_step(spec, machine, mine, grads, lender)
        if lent is not None:
            yield lent
        elif any(spec.part_shape(part)[0] for part in parts):
            yield _sent_step(spec, machine, mine, grads, buffers)


def _sent_step(spec: TableSpec, machine: int, runs: Sequence[Located], grads: Tensor, buffers: BufferPool) -> Outgoing:
    per_piece = max(1, FRAME_BYTES // max(1, spec.row_size * grads.element_size()), grads.shape[0] // _MOST_PIECES)
    arrays, plan = ArrayList(), []
    for run in runs:
        for ids, piece in _pieces(run, grads, 0, run.local.numel(), per_piece, buffers):
            plan.append((run.part, arrays.add(ids), arrays.add(piece)))
    return Outgoing(machine, arrays.with_plan(plan, 3))


def _lent_step(
    spec: TableSpec, machine: int, runs: Sequence[Located], grads: Tensor, lender: Lender
) -> Outgoing | None:
    """None where a message is as good, or no memory can be had."""
    row_bytes = spec.row_size * grads.element_size()
    num_bytes = StepWriter.num_bytes((run.local.numel(), row_bytes) for run in runs)
    memory = lender.lend(num_bytes) if num_bytes >= LEAST_BYTES else None
    if memory is None:
        return None
    writer = StepWriter(memory)
    for run in runs:
        out = writer.add(run.part, run.local, spec.row_shape)
        _copy_rows(run, grads, 0, out)
    return Outgoing(machine, [writer.plan()], {"memory": memory.address()}, partial(lender.take_back, memory))


def _pieces(
    run: Located, rows: Tensor, begin: int, end: int, per_piece: int, buffers: BufferPool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and rows from `begin` to `end` of a run, in order. A piece of one frame is not copied there."""
    for first in range(begin, end, per_piece):
        ids = run.local[first : min(first + per_piece, end)]
        yield ids, _rows_of(run, rows, first, ids.numel(), buffers)


def _rows_of(run: Located, rows: Tensor, first: int, count: int, buffers: BufferPool) -> Tensor:
    """A copy of some of a run's rows, in order."""
    return _copy_rows(run, rows, first, buffers.empty((count, *rows.shape[1:]), rows.dtype))


def _copy_rows(run: Located, rows: Tensor, first: int, out: Tensor) -> Tensor:
    """Fills `out` with a run's rows from `first` on, in order."""
    end = first + out.shape[0]
    if run.order is None:
        return out.copy_(rows[first:end])
    return move_rows(rows.contiguous(), out, index=run.order[first:end])
