"""Rows of other machines that a device keeps, with the host as the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.sampling.place import own_rows
from gnnsys.store import DeviceTable, DeviceWindow, MemoryBudget, ReadContext, Source, as_source, copied_pieces
from gnnsys.store.device_window import _Ring
from gnnsys.store.source import PendingRead
from tests.sampling.machines import homogeneous, machines

HOST = torch.device("cpu")
NAMES = ("node/node/x", "node/node/t")


@contextmanager
def tables(folder: Path, keep: int) -> Iterator[tuple[list[DeviceTable], DeviceWindow, dict[str, Tensor]]]:
    """Two tables of the second of three machines, which share a window; and all of their rows."""
    with machines(homogeneous(), folder / "p", 3) as graphs:
        mine = graphs[1]
        window = DeviceWindow(HOST, keep)
        plain = [mine.store.tensor(name) for name in NAMES]
        made = [DeviceTable(t, copied_pieces(own_rows(mine)[t.name], HOST), HOST) for t in plain]
        yield [t.sharing(window, "node") for t in made], window, {t.name: t[torch.arange(120)] for t in plain}


class Batch:
    """A read of both tables that was sent."""

    def __init__(self, read: list[DeviceTable], ids: Tensor) -> None:
        self.ids, self.context = ids, ReadContext()
        self.reads = [table.begin(ids, None, self.context) for table in read]
        self.context.send()

    def num_asked(self) -> int:
        for read in self.reads:
            read.result()
        return self.context.counts["rows_asked"]

    def is_right(self, rows: dict[str, Tensor]) -> bool:
        return all(torch.equal(r.result(), rows[name][self.ids]) for r, name in zip(self.reads, NAMES, strict=True))


@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_rows_are_the_tables_however_many_batches_are_under_way_and_in_whichever_order_they_end(
    tmp_path: Path, keep: int, in_flight: int
) -> None:
    generator = torch.Generator().manual_seed(in_flight)
    with tables(tmp_path, keep) as (read, _, rows):
        under_way: list[Batch] = []
        asked = shared = 0
        for size in [40, 10, 60, 0, 40, 120, 25, 41, 40, 39] * 3:
            under_way.append(Batch(read, torch.randint(0, 120, (size,), generator=generator)))
            while len(under_way) >= in_flight:
                ended = under_way.pop(int(torch.randint(0, len(under_way), (1,), generator=generator)))
                assert ended.is_right(rows)
                asked += ended.context.counts["rows_asked"]
                shared += ended.context.counts["rows_shared"]
        assert all(batch.is_right(rows) for batch in under_way)
        assert asked > 0 and shared > 0


def test_a_row_is_asked_for_once_while_it_is_kept_also_within_a_batch(tmp_path: Path) -> None:
    with tables(tmp_path, keep=3) as (read, window, rows):
        away = torch.tensor([0, 119, 5, 118])
        first = Batch(read, torch.cat([away, away, away[:1]]))
        again = Batch(read, away.flip(0))  # while the first is under way
        assert again.is_right(rows) and first.is_right(rows)
        assert first.context.counts["rows_asked"] == 2 * 4 and first.context.counts["rows_shared"] == 2 * 5
        assert again.context.counts["rows_asked"] == 0 and again.context.counts["rows_shared"] == 2 * 4
        assert Batch(read, torch.tensor([0, 6])).num_asked() == 2
        window.forget()
        assert Batch(read, away).num_asked() == 2 * 4


def test_places_are_given_in_turn_and_no_id_has_anothers() -> None:
    ring = _Ring(50, 12, [as_source(torch.zeros(50, 1))], HOST)
    generator = torch.Generator().manual_seed(0)
    held: dict[int, int] = {}  # what an id's place holds
    at: list[int | None] = [None] * 12
    turn = 0
    for _ in range(200):
        ids = torch.randint(0, 50, (int(torch.randint(1, 13, (1,), generator=generator)),), generator=generator)
        plan = ring.plan(ids)
        is_new = torch.tensor([int(i) not in held for i in ids])
        assert torch.equal(plan.new_at, is_new.nonzero().view(-1))
        assert sorted(plan.new_ids.tolist()) == ids[is_new].unique().tolist()
        assert [held[int(i)] for i in ids[~is_new]] == plan.places[~is_new].tolist()
        assert torch.equal(plan.new_ids[plan.new_rows], ids[plan.new_at])
        for new, place in zip(plan.new_ids.tolist(), plan.new_places.tolist(), strict=True):
            assert place == turn % 12
            turn += 1
            gone = at[place]
            if gone is not None and held.get(gone) == place:
                del held[gone]
            at[place], held[new] = new, place


def test_a_ring_that_was_made_for_a_small_batch_is_made_anew_for_a_large_one() -> None:
    window, source = DeviceWindow(HOST, 0), Breaking()
    for ids, shared in ((torch.arange(2), 0), (torch.arange(20), 0), (torch.arange(20), 20)):
        context = ReadContext()
        flight = window.flight(context)
        leg, _ = flight.add("node", ids, source, source)
        context.send()
        flight.complete()
        assert torch.equal(leg.rows[0], torch.zeros(ids.numel(), 2)) and context.counts["rows_shared"] == shared


class Breaking:
    """Rows of zeros, until `broken` is set: then a read that is under way fails."""

    mutable, is_remote, device, placement = False, True, HOST, "elsewhere"
    shape, dtype = (20, 2), torch.float32

    def __init__(self) -> None:
        self.broken = threading.Event()

    def locate(self, ids: Tensor, policy: object = None) -> list[object]:
        return []

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        owner = self

        class Read:
            def result(self) -> Tensor:
                if owner.broken.is_set():
                    raise ConnectionError("gone")
                assert out is not None
                return out.zero_()

        return Read()


def flight_of(window: DeviceWindow, source: Source, ids: Tensor):  # type: ignore[no-untyped-def]
    context = ReadContext()
    flight = window.flight(context)
    leg, _ = flight.add("node", ids, source, source)
    context.send()
    return flight, leg


def test_whoever_counts_on_rows_that_do_not_come_gets_the_error_and_new_batches_begin_anew() -> None:
    window, source, ids = DeviceWindow(HOST, 2), Breaking(), torch.arange(6)
    first, _ = flight_of(window, source, ids)
    second, _ = flight_of(window, source, ids[:3])
    source.broken.set()
    for flight in (second, first, second):
        with pytest.raises(ConnectionError, match="gone"):
            flight.complete()
    source.broken.clear()
    third, leg = flight_of(window, source, ids[:3])
    third.complete()
    assert torch.equal(leg.rows[0], torch.zeros(3, 2))


def test_where_the_device_has_no_memory_rows_come_from_elsewhere_and_none_is_kept() -> None:
    window, source, other = DeviceWindow(HOST, 2), Breaking(), Breaking()
    source.broken.set()
    budget = MemoryBudget.of(HOST)
    before, budget.limit = budget.limit, sum(use.bytes for use in budget.uses())
    try:
        context = ReadContext()
        flight = window.flight(context)
        leg, _ = flight.add("node", torch.arange(6), source, other)
        context.send()
        flight.complete()
        assert torch.equal(leg.rows[0], torch.zeros(6, 2)) and window.num_bytes() == 0
    finally:
        budget.limit = before
