"""The client's side of a pull of few rows: its messages are written and read as bytes.

They are the messages of any other pull (`message_plan`). But for few rows the tensors, and torch's calls, that stand
between the bytes of a message and the rows take many times as long as the rows. So whole rows of one table go straight
to their place. Whatever is unusual is left to the ordinary way (`pull`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import CODE_OF, HEADER_BYTES, Client, Kind, Pending, RemoteValueError
from gnnsys.ops import Bounds, split_ids
from gnnsys.store.candidates import Candidate
from gnnsys.store.machines import Machines, Received
from gnnsys.store.message_plan import ASK_ROWS, COUNT_AT, NONE, SMALL_BYTES, SMALL_ROWS, RowFormat
from gnnsys.store.part_rows import Outdated, PartRows
from gnnsys.store.pull import MessageOptions, PendingPull, Pull, PullMessage, Refused, Target
from gnnsys.store.spec import TableSpec

_ID_DTYPES = (torch.int64, torch.int32)
_PULL = int(Kind.PULL)

Asked = tuple[Pending, int, int]  # rows that one machine was asked for: the next so many, from the second number on


class _Route(NamedTuple):
    """Where rows of one part come from: `rows` at hand, or `client` asks `machine`."""

    rows: PartRows | None
    client: Client | None
    machine: int


class SmallTable:
    """What small pulls of one table have in common, for as long as its candidates stay.

    `refused` is what a caller is told where a shard refuses a pull.
    """

    def __init__(
        self, spec: TableSpec, candidates: Sequence[Sequence[Candidate]], machines: Machines, refused: Refused
    ) -> None:
        self.spec, self.candidates, self.refused = spec, candidates, refused
        self.form = RowFormat(spec)
        self.max_rows = min(SMALL_ROWS, SMALL_BYTES // self.form.row_bytes) if self.form.row_bytes else 0
        self.at_hand = [of_part[0].rows for of_part in candidates if of_part[0].rows is not None]
        self._bounds, self._row_shape, self._dtype = Bounds.of(spec.bounds_tensor), spec.row_shape, spec.dtype
        self._local_dtype = torch.int32 if spec.narrow else torch.int64
        self._local_bytes = self._local_dtype.itemsize
        nearest = [of_part[0] for of_part in candidates]
        self._routes = [_Route(one.rows, machines.client_for(one.machine), one.machine) for one in nearest]
        self._fronts = tuple(
            b"" if route.rows is not None else self._front(part) for part, route in enumerate(self._routes)
        )

    def _front(self, part: int) -> bytes:
        """How a message begins that asks for rows of a part: of array 1, all columns, as they are."""
        kinds = CODE_OF[torch.int64], 2, CODE_OF[self._local_dtype], 1
        return bytes(HEADER_BYTES) + ASK_ROWS.pack(*kinds, 1, 5, 0, self.spec.number, part, 1, NONE, NONE)

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

    def begin(
        self, ids: Tensor, out: Tensor, of_messages: MessageOptions, start: Callable[[], PendingPull]
    ) -> SmallPull | None:
        """Asks for rows of other machines, then reads those at hand; None where the ordinary way is to do it.

        `start` is called in the end where the table turns out to be another by now.
        """
        split = split_ids(ids, self._bounds, self._local_bytes, COUNT_AT, self._fronts)
        if split is None:
            return None
        runs, order = split
        routes = self._routes
        if order is not None and not self._is_simple([routes[part] for part, _, _, _ in runs]):
            return None
        asked: list[Asked] = []
        num_asked, row_bytes = 0, self.form.row_bytes
        for part, first, count, message in runs:
            rows, client, machine = routes[part]
            if rows is None and client is not None:
                answer = client.request_encoded(machine, _PULL, message, 2, count * row_bytes, *of_messages)
                asked.append((answer, first, count))
                num_asked += count
        if not asked:
            return None
        if order is not None:
            for part, first, count, local in runs:
                rows = routes[part].rows
                if rows is not None:
                    places = torch.frombuffer(order, dtype=torch.int64, count=count, offset=8 * first)
                    rows.read(torch.frombuffer(local, dtype=self._local_dtype), out, places)
        return SmallPull(self, ids, out, asked, num_asked, order, start)

    def _is_simple(self, routes: Sequence[_Route]) -> bool:
        """Whether one message for each part can do it: to different machines, all of which have clients."""
        away = [route.machine for route in routes if route.rows is None]
        return len({*away}) == len(away) and all(route.rows or route.client for route in routes)


class SmallPull(PendingPull):
    """A small pull under way; `result()` once, by one thread."""

    def __init__(
        self, table: SmallTable, ids: Tensor, out: Tensor, asked: list[Asked], num_asked: int, order: bytearray | None,
        start: Callable[[], PendingPull],
    ) -> None:  # fmt: skip
        self._table, self._ids, self._out, self._asked, self._order = table, ids, out, asked, order
        self._start = start
        self.bytes_remote = self.bytes_left_out = 0
        self.rows_remote = num_asked
        self.bytes_local = (ids.numel() - num_asked) * table.form.row_bytes

    def done(self) -> bool:
        return all(answer.done() for answer, _, _ in self._asked)

    def result(self) -> list[Tensor]:
        try:
            for each in self._asked:
                self._take(*each)
        except RemoteValueError as error:
            refused = self._table.refused(error, [self._table.spec])
            if not isinstance(refused, Outdated):
                raise refused from error
            return self._begin_anew()
        self._asked = []
        return [self._out]

    def _begin_anew(self) -> list[Tensor]:
        """The same pull of a table that was dropped and made anew since this process looked at it."""
        instead = self._start()
        rows = instead.result()
        self.bytes_remote, self.rows_remote = instead.bytes_remote, instead.rows_remote
        self.bytes_local = instead.bytes_local
        return rows

    def _take(self, answer: Pending, first: int, count: int) -> None:
        """Puts the rows of one answer in place."""
        form, order = self._table.form, self._order
        arrival = answer.arrival()
        if arrival is None:
            self._take_chunks(answer.chunks(), first, count)
        elif form.place(*arrival, count, order, first, self._out):
            self.bytes_remote += count * form.row_bytes
        else:
            self._take_chunks([answer.read(arrival)], first, count)

    def _take_chunks(self, chunks: Iterable[Received], first: int, count: int) -> None:
        """The same of an answer that is another than was expected."""
        order, spec = self._order, self._table.spec
        places = None if order is None else torch.frombuffer(order, dtype=torch.int64, count=count, offset=8 * first)
        message = PullMessage()
        message.expect(Target(Pull(spec.name, self._ids), spec, self._out), places, 0, count)
        missing = [count]
        for chunk in chunks:
            self._place(chunk, message, missing)
        self._check_all_came(missing)
