"""The client's side of a pull of few rows: its messages are written and read as bytes.

They are the messages of any other pull (`message_plan`). But for few rows the tensors, and torch's calls, that stand
between the bytes of a message and the rows take many times as long as the rows. So whole rows of one table go straight
to their place. Whatever is unusual is left to the ordinary way (`pull`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import CODE_OF, HEADER_BYTES, Client, Kind, Pending, RemoteValueError
from gnnsys.ops import address_of, place_bytes, split_ids
from gnnsys.store.candidates import Candidate
from gnnsys.store.machines import Machines
from gnnsys.store.message_plan import ASK_ROWS, COUNT_AT, NONE, SMALL_BYTES, SMALL_ROWS, RowFormat
from gnnsys.store.part_rows import Outdated, PartRows
from gnnsys.store.pull import PendingPull, Pull, PullMessage, Refused, Target
from gnnsys.store.spec import TableSpec

_ID_DTYPES = (torch.int64, torch.int32)
_COUNT = struct.Struct("<q")


class StartPull:
    """Starts a pull in the ordinary way. `refused` is what its caller is told where a shard refuses it."""

    __slots__ = ("_start", "of_messages", "pulls", "refused")

    def __init__(
        self, start: Callable[[Sequence[Pull], Mapping[str, Any]], PendingPull], pulls: Sequence[Pull],
        of_messages: Mapping[str, Any], refused: Refused,
    ) -> None:  # fmt: skip
        self._start, self.pulls, self.of_messages, self.refused = start, pulls, of_messages, refused

    def __call__(self) -> PendingPull:
        return self._start(self.pulls, self.of_messages)


class _SmallAnswer(NamedTuple):
    """Rows that one machine was asked for: the next `count` from `first` on, of those that are grouped by part."""

    answer: Pending
    first: int
    num_rows: int


class _Route(NamedTuple):
    """Where rows of one part come from: `rows` at hand, or `client` asks `machine` by a message that begins so."""

    rows: PartRows | None
    client: Client | None
    machine: int
    front: bytes


class SmallTable:
    """What small pulls of one table have in common, for as long as its candidates stay."""

    def __init__(self, spec: TableSpec, candidates: Sequence[Sequence[Candidate]], machines: Machines) -> None:
        self.spec, self.candidates = spec, candidates
        self.form = RowFormat(spec)
        self.max_rows = min(SMALL_ROWS, SMALL_BYTES // self.form.row_bytes) if self.form.row_bytes else 0
        self.at_hand = [of_part[0].rows for of_part in candidates if of_part[0].rows is not None]
        self._bounds, self._row_shape, self._dtype = spec.bounds_tensor, spec.row_shape, spec.dtype
        self._local_dtype = torch.int32 if spec.narrow else torch.int64
        code, plan = CODE_OF[self._local_dtype], (1, NONE, NONE)  # of array 1, all columns, as they are
        self._routes = []
        for part, (nearest, *_) in enumerate(candidates):
            front = bytes(HEADER_BYTES)
            front += ASK_ROWS.pack(CODE_OF[torch.int64], 2, code, 1, 1, 5, 0, spec.number, part, *plan)
            self._routes.append(_Route(nearest.rows, machines.client_for(nearest.machine), nearest.machine, front))

    def fits(self, ids: Tensor, out: Tensor) -> bool:
        """Whether these can be read and written as they lie in memory."""
        return (
            ids.is_cpu
            and ids.dtype in _ID_DTYPES
            and ids.dim() == 1
            and ids.is_contiguous()
            and out.shape == (*ids.shape, *self._row_shape)
            and out.dtype is self._dtype
            and out.is_cpu
            and out.is_contiguous()
            and not out.requires_grad
        )

    def begin(self, ids: Tensor, out: Tensor, start: StartPull) -> SmallPull | None:
        """Asks for rows of other machines, then reads those at hand; None where the ordinary way is to do it.

        `start` is called in the end where the table turns out to be another by now.
        """
        width, row_bytes = self._local_dtype.itemsize, self.form.row_bytes
        split = split_ids(ids, self._bounds, width)
        if split is None:
            return None
        counts, order, local = split
        away: dict[int, tuple[_Route, int, int]] = {}  # by machine: the route, the first row, how many
        near, first = [], 0
        for route, count in zip(self._routes, counts, strict=True):
            if count:
                if route.rows is not None:
                    near.append((route.rows, first, count))
                elif route.client is None or route.machine in away:
                    return None
                else:
                    away[route.machine] = (route, first, count)
                first += count
        if not away:
            return None
        asked = []
        for machine, (route, first, count) in away.items():
            assert route.client is not None
            front = bytearray(route.front)
            _COUNT.pack_into(front, COUNT_AT, count)
            front += local if order is None else local[first * width : (first + count) * width]
            answer = route.client.request_encoded(machine, Kind.PULL, front, 2, count * row_bytes, **start.of_messages)
            asked.append(_SmallAnswer(answer, first, count))
        for rows, first, count in near:
            assert order is not None, "ids of two parts"
            index = torch.frombuffer(local, dtype=self._local_dtype, count=count, offset=first * width)
            rows.read(index, out, torch.frombuffer(order, dtype=torch.int64, count=count, offset=8 * first))
        return SmallPull(self, ids, out, asked, order, start)


class SmallPull(PendingPull):
    """A small pull under way; `result()` once, by one thread."""

    def __init__(
        self, table: SmallTable, ids: Tensor, out: Tensor, asked: list[_SmallAnswer], order: bytearray | None,
        start: StartPull,
    ) -> None:  # fmt: skip
        self._table, self._ids, self._outs, self._asked, self._order = table, ids, [out], asked, order
        self._start = start
        self.bytes_remote = self.bytes_left_out = self.rows_remote = 0
        for each in asked:
            self.rows_remote += each.num_rows
        self.bytes_local = (ids.numel() - self.rows_remote) * table.form.row_bytes

    def done(self) -> bool:
        return all(each.answer.done() for each in self._asked)

    def result(self) -> list[Tensor]:
        try:
            for each in self._asked:
                self._take(each)
        except RemoteValueError as error:
            refused = self._start.refused(error, [self._table.spec])
            if not isinstance(refused, Outdated):
                raise refused from error
            return self._begin_anew()
        self._asked = []
        return self._outs

    def _begin_anew(self) -> list[Tensor]:
        """The same pull of a table that was dropped and made anew since this process looked at it."""
        instead = self._start()
        rows = instead.result()
        self.bytes_remote, self.rows_remote = instead.bytes_remote, instead.rows_remote
        self.bytes_local = instead.bytes_local
        return rows

    def _take(self, asked: _SmallAnswer) -> None:
        """Puts the rows of one answer in place."""
        answer, first, count = asked
        form, order, out = self._table.form, self._order, self._outs[0]
        arrival = answer.arrival()
        if arrival is not None:
            rows = form.find_rows(*arrival, count)
            where = 0 if order is None else address_of(order) + 8 * first
            if rows is not None and place_bytes(address_of(rows), count, form.row_bytes, where, out):
                self.bytes_remote += count * form.row_bytes
                return
        chunks = answer.chunks() if arrival is None else [answer.read(arrival)]
        places = None if order is None else torch.frombuffer(order, dtype=torch.int64, count=count, offset=8 * first)
        message = PullMessage()
        message.expect(Target(Pull(self._table.spec.name, self._ids), self._table.spec, out), places, 0, count)
        missing = [count]
        for chunk in chunks:
            self._place(chunk, message, missing)
        self._check_all_came(missing)
