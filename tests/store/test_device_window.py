"""Rows of other machines that a device keeps, with the host as the device."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.comm import RequestContext, current_context, use_context
from gnnsys.sampling.place import own_rows
from gnnsys.store import DeviceTable, DeviceWindow, MemoryBudget, ReadContext, Source, as_source, copied_pieces
from gnnsys.store.device_window import DeviceFlight, DeviceLeg, _Ring
from gnnsys.store.source import PendingRead
from tests.sampling.machines import homogeneous, machines
from tests.support.grid import every_value

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


@every_value(keep=[0, 1, 4], in_flight=[1, 2, 5])
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


def test_a_ring_that_was_made_for_a_small_batch_is_made_anew_for_a_large_one_and_for_an_empty_one_none_is() -> None:
    window, source = DeviceWindow(HOST, 0), Breaking()
    for ids, shared in ((torch.arange(0), 0), (torch.arange(2), 0), (torch.arange(20), 0), (torch.arange(20), 20)):
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


def flight_of(window: DeviceWindow, source: Source, ids: Tensor) -> tuple[DeviceFlight, DeviceLeg]:
    context = ReadContext()
    flight = window.flight(context)
    leg, _ = flight.add("node", ids, source, source)
    context.send()
    return flight, leg


class Failing:
    """Rows that say their ids. Reads are counted, and those in `fails` fail: at once, or as they arrive."""

    mutable, is_remote, device, placement = False, True, HOST, "elsewhere"
    shape, dtype = (50, 2), torch.float32

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.said: list[RequestContext] = []
        self.fails: dict[int, str] = {}
        self.error: type[BaseException] = ConnectionError

    def locate(self, ids: Tensor, policy: object = None) -> list[object]:
        return []

    def begin(self, ids: Tensor, out: Tensor | None, context: ReadContext, at: Tensor | None = None) -> PendingRead:
        number = len(self.asked)
        self.asked.append(sorted(ids.tolist()))
        self.said.append(current_context())
        how, error = self.fails.get(number), self.error(f"read {number}")
        if how == "at once":
            raise error

        class Read:
            def result(self) -> Tensor:
                if how is not None:
                    raise error
                return ids.float().unsqueeze(1).expand(-1, 2).contiguous()

        return Read()


def says_its_ids(leg: DeviceLeg) -> bool:
    return torch.equal(leg.rows[0], leg.ids.float().unsqueeze(1).expand(-1, 2))


def test_a_failed_pull_fails_its_own_batch_and_those_that_planned_its_rows_ask_for_them() -> None:
    window, source = DeviceWindow(HOST, 2), Failing()
    source.fails = {1: "as it arrives"}
    before, rows_before = flight_of(window, source, torch.arange(0, 6))
    failed, _ = flight_of(window, source, torch.arange(4, 12))
    with use_context(RequestContext(batch=7, loader=1)):
        behind, rows_behind = flight_of(window, source, torch.tensor([0, 8, 5, 8, 20, 9]))
    last, rows_last = flight_of(window, source, torch.tensor([8, 9, 10]))
    with use_context(RequestContext(batch=8, loader=1)):
        last.complete()  # completes all that were planned before it
    for _ in range(2):
        with pytest.raises(ConnectionError, match="read 1"):
            failed.complete()
    for flight, leg in ((before, rows_before), (behind, rows_behind), (last, rows_last)):
        flight.complete()
        assert says_its_ids(leg)
    # What a batch found missing it asked for once and in its own name, and the one behind it found it there.
    assert source.asked == [[*range(6)], [*range(6, 12)], [20], [8, 9], [10]]
    assert [context.batch for context in source.said] == [-1, -1, 7, 7, -1]
    again, rows_again = flight_of(window, source, torch.tensor([8, 11, 20, 5]))
    again.complete()
    assert says_its_ids(rows_again)
    assert source.asked[5:] == [[8, 11]], "planned behind the failure: rows that did not come have no place"


@pytest.mark.parametrize("case", range(8))
def test_whichever_pulls_fail_all_other_batches_have_their_rows(case: int) -> None:
    draw, window, source = random.Random(case), DeviceWindow(HOST, case % 3), Failing()
    source.fails = {number: draw.choice(["at once", "as it arrives"]) for number in range(400) if draw.random() < 0.15}
    under_way: list[tuple[DeviceFlight, DeviceLeg]] = []
    num_failed = num_right = 0

    def end(flight: DeviceFlight, leg: DeviceLeg) -> bool:
        try:
            flight.complete()
        except ConnectionError as error:
            with pytest.raises(ConnectionError) as again:
                flight.complete()
            assert again.value is error
            return False
        assert says_its_ids(leg)
        return True

    for _ in range(120):
        ids = torch.tensor([draw.randrange(50) for _ in range(draw.choice([0, 3, 10, 11, 12]))], dtype=torch.int64)
        context = ReadContext()
        flight = window.flight(context)
        leg, _ = flight.add("node", ids, source, source)
        try:
            context.send()
        except ConnectionError:
            num_failed += 1
            if draw.random() < 0.5:  # whoever sent it may never ask for its rows
                with pytest.raises(ConnectionError):
                    flight.complete()
        else:
            under_way.append((flight, leg))
        while len(under_way) > case:
            is_right = end(*under_way.pop(draw.randrange(len(under_way))))
            num_right, num_failed = num_right + is_right, num_failed + (not is_right)
    for each in under_way:
        is_right = end(*each)
        num_right, num_failed = num_right + is_right, num_failed + (not is_right)
    read = [number for number in source.fails if number < len(source.asked)]
    assert num_failed == len(read) > 4, "a failed read fails one batch"
    assert num_right + num_failed == 120


def test_an_interrupt_while_an_earlier_batch_lands_is_raised_at_once_and_the_later_one_can_still_be_completed() -> None:
    window, source = DeviceWindow(HOST, 2), Failing()
    source.fails, source.error = {0: "as it arrives"}, KeyboardInterrupt
    earlier, _ = flight_of(window, source, torch.arange(4))
    later, leg = flight_of(window, source, torch.arange(2, 8))
    with pytest.raises(KeyboardInterrupt, match="read 0"):
        later.complete()
    later.complete()
    assert says_its_ids(leg)
    assert source.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [2, 3]], "rows of the batch that was interrupted are void"
    with pytest.raises(KeyboardInterrupt, match="read 0"):
        earlier.complete()


@pytest.mark.parametrize("how", ["at once", "as it arrives"])
def test_the_stream_that_finds_a_batch_failed_is_noted_for_what_another_one_planned(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(_Ring, "note_reads", lambda _, *tensors: noted.extend(map(id, tensors)))
    window, source = DeviceWindow(HOST, 2), Failing()
    plans = []
    plan = _Ring.plan
    monkeypatch.setattr(_Ring, "plan", lambda ring, ids: plans.append(plan(ring, ids)) or plans[-1])
    source.fails = {0: how}
    context = ReadContext()
    flight = window.flight(context)
    flight.add("node", torch.arange(4), source, source)
    with pytest.raises(ConnectionError):
        context.send()
        flight.complete()
    with pytest.raises(ConnectionError):
        flight.complete()
    new_ids, new_places = id(plans[0].new_ids), id(plans[0].new_places)
    assert noted.count(new_ids) == 1, "its rows are withdrawn"
    assert noted.count(new_places) == 2, "and its places are void"


def test_a_machine_that_is_gone_fails_every_batch_that_asks_it_and_is_asked_again_when_it_is_back() -> None:
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
