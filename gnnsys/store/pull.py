"""The client's side of a pull: one message per machine for all of them, own rows meanwhile, arrivals put in place.

Where there are several lanes to a machine, a large pull of rows that never change is cut into a message for each.
Received rows go from the message straight to their place in the caller's buffer: one copy. Everything that writes into
a buffer happens in `begin` and in `result`, in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import Kind, RemoteValueError
from gnnsys.ops import gather_parts, move_rows
from gnnsys.store.candidates import Candidate, Located, Policy
from gnnsys.store.machines import Machines, Received, ShardReply
from gnnsys.store.message_plan import NONE, REQUEST_BYTES, WIRE_DTYPES, ArrayList, columns_to_wire
from gnnsys.store.part_rows import Outdated, PartRows
from gnnsys.store.spec import TableSpec

# What the caller is told when a shard refuses to serve tables.
Refused = Callable[[Exception, Sequence[TableSpec]], ValueError]
# What messages say besides what is asked: timeout, priority, path, batch and layer, as in `Client.request`.
MessageOptions = tuple[float | None, int | None, int | None, int, int]

_END = object()


@dataclass(frozen=True, eq=False)
class Pull:
    """Rows of one table: those of `ids` (global, int64 or int32), into `out` where one is given.

    `columns` (int64) takes some values of the flattened row. `wire_dtype` is what rows of other machines travel as:
    half the bytes with bfloat16 or float16, and rounded to it. The row of ids[j] goes to out[j], or to out[at[j]].
    `policy` chooses among candidates, instead of the store's own.
    """

    table: str
    ids: Tensor
    out: Tensor | None = None
    columns: Tensor | None = None
    wire_dtype: torch.dtype | None = None
    at: Tensor | None = None
    policy: Policy | None = None


class Target:
    """Where the rows of one pull go."""

    def __init__(self, pull: Pull, spec: TableSpec, out: Tensor) -> None:
        self.spec, self.out, self.columns, self._at = spec, out, pull.columns, pull.at
        self.wire_dtype = None if pull.wire_dtype in (None, spec.dtype) else pull.wire_dtype
        self.wire_columns = columns_to_wire(pull.columns, spec.row_size)
        self.row_bytes = prod(out.shape[1:]) * out.element_size()
        dtype = spec.dtype if self.wire_dtype is None else self.wire_dtype
        self.wire_row_bytes = prod(out.shape[1:]) * dtype.itemsize
        self.left_out_bytes = prod(spec.row_shape) * dtype.itemsize - self.wire_row_bytes  # of a row, by its columns
        self._near: dict[int, tuple[PartRows, Located | None]] = {}  # parts that are read together

    def takes(self, rows: PartRows | None) -> bool:
        """Whether a part can be read together with others: whole rows, which nobody changes meanwhile."""
        return rows is not None and rows.versions is None and self.columns is None

    def takes_all(self, serving: Sequence[Candidate]) -> bool:
        """Whether all parts are at hand and can be read together; they then are, and ids need not be grouped."""
        rows = [candidate.rows for candidate in serving]
        if not all(self.takes(one) for one in rows):
            return False
        self._near = {part: (one, None) for part, one in enumerate(rows) if one is not None}
        return True

    def add(self, run: Located, rows: PartRows) -> None:
        """A part that is read together with the others that were added."""
        self._near[run.part] = (rows, run)

    def gather(self, ids: Tensor) -> None:
        """Reads what was added, in the order of the ids: faster than part by part, unless there is but one."""
        if len(self._near) == 1:
            rows, run = next(iter(self._near.values()))
            if run is not None or self._at is None:
                return rows.read(ids if run is None else run.local, self.out, None if run is None else self.order(run))
        if self._near:
            try:
                parts = {part: rows.rows for part, (rows, _) in self._near.items()}
                gather_parts(parts, ids, self.spec.bounds_tensor, self.out, self._at)
            except ValueError as error:
                raise ValueError(f"table {self.spec.name!r}: {error}") from error

    def order(self, run: Located) -> Tensor | None:
        if self._at is None:
            return run.order
        return self._at if run.order is None else self._at[run.order]


class Wanted(NamedTuple):
    """Rows of some ids: the runs of them that the target has not taken as a whole."""

    target: Target
    ids: Tensor
    runs: Sequence[Located]


class _Item(NamedTuple):
    """Rows that a message asks for: those of one run, or some of them. Where row j goes: to order[j], or first + j."""

    target: Target
    order: Tensor | None
    first: int
    num_rows: int


@dataclass
class PullMessage:
    """What one machine is asked, and where each item of its reply goes."""

    arrays: ArrayList = field(default_factory=ArrayList)
    plan: list[tuple[int, ...]] = field(default_factory=list)
    items: list[_Item] = field(default_factory=list)
    reply_bytes: int = 0

    def add(self, target: Target, part: int, local: Tensor, order: Tensor | None, first: int = 0) -> None:
        columns = self.arrays.add(target.wire_columns)
        dtype = NONE if target.wire_dtype is None else WIRE_DTYPES.index(target.wire_dtype)
        self.plan.append((target.spec.number, part, self.arrays.add(local), columns, dtype))
        self.expect(target, order, first, local.numel())
        self.reply_bytes += local.numel() * target.wire_row_bytes

    def expect(self, target: Target, order: Tensor | None, first: int, count: int) -> None:
        """The reply's next item is so many rows of `target`."""
        self.items.append(_Item(target, order, first, count))


class PendingPull:
    """A pull under way; `result()` once, by one thread."""

    def __init__(
        self, outs: list[Tensor], answers: list[tuple[ShardReply, PullMessage]], refused: Refused, num_bytes: int
    ) -> None:
        self._outs, self._answers, self._refused = outs, answers, refused
        self.bytes_remote = 0  # of rows that came from other processes; complete after result()
        asked = [(count, target.row_bytes) for _, message in answers for target, _, _, count in message.items]
        self.rows_remote = sum(count for count, _ in asked)
        self.bytes_left_out = sum(item.num_rows * item.target.left_out_bytes for _, m in answers for item in m.items)
        self.bytes_local = num_bytes - sum(count * row_bytes for count, row_bytes in asked)  # read by this process

    def done(self) -> bool:
        """Whether everything has arrived; `result` then does not wait."""
        return all(answer.done() for answer, _ in self._answers)

    def result(self) -> list[Tensor]:
        """The rows of every pull, when they have come."""
        arriving = [self._place_all(answer, message) for answer, message in self._answers]
        while arriving:  # a chunk of each in turn: they come at the same time, on different lanes or from machines
            arriving = [each for each in arriving if next(each, _END) is not _END]
        self._answers = []
        return self._outs

    def _place_all(self, answer: ShardReply, message: PullMessage) -> Iterator[None]:
        """Puts the rows of one answer in place, a chunk at a time."""
        missing = [item.num_rows for item in message.items]
        try:
            for chunk in answer.chunks():
                self._place(chunk, message, missing)
                yield
        except RemoteValueError as error:
            raise self._refused(error, [item.target.spec for item in message.items]) from error
        self._check_all_came(missing)

    def _check_all_came(self, missing: Sequence[int]) -> None:
        if any(missing):
            raise RuntimeError(f"a shard left {sum(missing)} rows of a pull away")

    def _place(self, chunk: Received, message: PullMessage, missing: list[int]) -> None:
        pieces, *arrays = chunk.arrays
        for (number, first, count), rows in zip(pieces.tolist(), arrays, strict=True):
            target, order, begin_at, _ = message.items[number]
            if order is None:
                move_rows(rows, target.out[begin_at + first : begin_at + first + count])
            else:
                move_rows(rows, target.out, order=order[first : first + count])
            missing[number] -= count
            self.bytes_remote += rows.nbytes


class RenewedPull(PendingPull):
    """A pull of tables that may have been dropped and made anew since this process looked at them.

    It is `pending`, or what `start` starts in its place where the tables that `pending` asks for are gone.
    """

    def __init__(self, pending: PendingPull, start: Callable[[], PendingPull]) -> None:
        self._pending, self._start = pending, start
        self.bytes_remote = 0
        self.rows_remote, self.bytes_local = pending.rows_remote, pending.bytes_local
        self.bytes_left_out = pending.bytes_left_out

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> list[Tensor]:
        try:
            rows = self._pending.result()
        except Outdated:
            self._pending = self._start()
            rows = self._pending.result()
        self.bytes_remote = self._pending.bytes_remote
        self.rows_remote, self.bytes_local = self._pending.rows_remote, self._pending.bytes_local
        self.bytes_left_out = self._pending.bytes_left_out
        return rows


def begin(wanted: Sequence[Wanted], machines: Machines, of_messages: MessageOptions, refused: Refused) -> PendingPull:
    """Asks every machine for what it alone has, then gathers what is at hand."""
    timeout, priority, path, batch, layer = of_messages
    asked: dict[int, list[tuple[Target, Located]]] = {}  # by machine
    at_hand = []
    for target, _, runs in wanted:
        for run in runs:
            serving = run.serving
            if serving.rows is None:
                asked.setdefault(serving.machine, []).append((target, run))
            elif target.takes(serving.rows):
                target.add(run, serving.rows)
            else:
                at_hand.append((target, run, serving.rows))
    answers: list[tuple[ShardReply, PullMessage]] = []
    for machine, items in asked.items():
        for message in _messages(items, machines.num_lanes(machine)):
            answer = machines.ask(
                machine, Kind.PULL, message.arrays.with_plan(message.plan, 5), timeout=timeout, priority=priority,
                path=path, batch=batch, layer=layer, reply_bytes=message.reply_bytes,
            )  # fmt: skip
            answers.append((answer, message))
    for target, run, rows in at_hand:
        rows.read(run.local, target.out, target.order(run), target.columns)
    for target, ids, _ in wanted:
        target.gather(ids)
    num_bytes = sum(ids.numel() * target.row_bytes for target, ids, _ in wanted)
    return PendingPull([target.out for target, _, _ in wanted], answers, refused, num_bytes)


def _messages(items: Sequence[tuple[Target, Located]], num_lanes: int) -> list[PullMessage]:
    """What one machine is asked: one message, or up to one per lane, each for an equal share of the rows.

    Rows that may change are read by one message, as one lane would have it. An array of row numbers that several
    tables share is cut once, and still travels once.
    """
    num_bytes = sum(run.local.numel() * target.wire_row_bytes for target, run in items if not target.spec.mutable)
    messages = [PullMessage() for _ in range(max(1, min(num_lanes, num_bytes // REQUEST_BYTES)))]
    shares_of: dict[int, Sequence[Tensor]] = {}  # by the array's identity
    for target, run in items:
        local, order = run.local, target.order(run)
        if len(messages) == 1 or target.spec.mutable:
            messages[0].add(target, run.part, local, order)
            continue
        shares = shares_of.setdefault(id(local), local.tensor_split(len(messages)))
        first = 0
        for message, share in zip(messages, shares, strict=True):
            if share.numel():
                message.add(target, run.part, share, None if order is None else order[first:], first)
            first += share.numel()
    return [message for message in messages if message.items]
