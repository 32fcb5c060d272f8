"""Flights that share rows: every row is right whoever completes what first, and is asked for once while in flight."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.ops import scatter_rows
from gnnsys.store import ReadContext, as_source
from gnnsys.store.in_flight import Flight, InFlightWindow, Leg, SharedInFlight
from tests.loader.sources import DEADLINE
from tests.support.grid import every_value

NUM_IDS = 500


@pytest.fixture(scope="module")
def tables() -> list[Tensor]:
    stream = torch.Generator().manual_seed(0)
    return [torch.rand(NUM_IDS, 5, generator=stream), torch.arange(NUM_IDS)]


class Answer:
    """What a store would do: puts the rows that were asked for in their places, when `gate` opens."""

    def __init__(self, tables: list[Tensor], leg: Leg, gate: threading.Event | None = None) -> None:
        self._tables, self._leg, self._gate = tables, leg, gate

    def result(self) -> None:
        assert self._gate is None or self._gate.wait(DEADLINE)
        asked = torch.arange(self._leg.ids.numel()) if self._leg.asked is None else self._leg.asked
        for table, out in zip(self._tables, self._leg.outs, strict=True):
            scatter_rows(out, asked, table[self._leg.ids[asked]])


def launch(
    window: InFlightWindow,
    tables: list[Tensor],
    ids: Tensor,
    remote: Tensor | None = None,
    gate: threading.Event | None = None,
) -> tuple[Flight, Leg]:
    remote = torch.arange(ids.numel()) if remote is None else remote
    outs = [torch.full((ids.numel(), *table.shape[1:]), -1, dtype=table.dtype) for table in tables]
    leg, flight = Leg("x", ids, remote, outs, NUM_IDS), Flight()
    with flight.lock:
        window.enter(flight, [leg])
        flight.pending = [Answer(tables, leg, gate)]
    return flight, leg


def check(tables: list[Tensor], leg: Leg) -> None:
    assert all(torch.equal(out, table[leg.ids]) for table, out in zip(tables, leg.outs, strict=True))


def asked_ids(leg: Leg) -> Tensor:
    return leg.ids if leg.asked is None else leg.ids[leg.asked]


@every_value(size=[1, 3, 8], keep=[0, 1, 3], seed=range(8))
def test_random_flights_completed_in_any_order_have_their_rows(
    tables: list[Tensor], size: int, keep: int, seed: int
) -> None:
    draw, stream = random.Random(seed), torch.Generator().manual_seed(seed)
    window = InFlightWindow(size, keep)
    waiting: list[tuple[Flight, Leg]] = []
    num_shared = 0
    for _ in range(60):
        ids = torch.randint(NUM_IDS, (draw.randrange(200),), generator=stream)  # repeats included
        remote = (ids % 10 < 7).nonzero().view(-1)
        remote = torch.arange(ids.numel()) if draw.random() < 0.2 else remote
        remote = remote[torch.randperm(remote.numel(), generator=stream)]  # by owner, not by position
        flight, leg = launch(window, tables, ids, remote)
        local = torch.ones(ids.numel(), dtype=torch.bool).index_fill(0, remote, False).nonzero().view(-1)
        assert leg.asked is None or bool(torch.isin(local, leg.asked).all())
        assert asked_ids(leg).numel() + leg.num_shared == ids.numel()
        num_shared += leg.num_shared
        waiting.append((flight, leg))
        while len(waiting) > draw.randrange(1, 7):
            flight, leg = waiting.pop(draw.randrange(len(waiting)))
            flight.complete()
            check(tables, leg)
            for out in leg.outs:  # as a user may
                out.fill_(-7)
    assert num_shared > 0
    assert len(window) <= size


def test_an_id_is_asked_for_once_while_a_batch_that_has_it_is_in_flight(tables: list[Tensor]) -> None:
    window = InFlightWindow(4)
    first, first_leg = launch(window, tables, torch.tensor([3, 1, 3, 4]))
    second, second_leg = launch(window, tables, torch.tensor([4, 9, 1]))
    assert sorted(asked_ids(first_leg).tolist()) == [1, 3, 4] and asked_ids(second_leg).tolist() == [9]
    first.complete()
    third, third_leg = launch(window, tables, torch.tensor([9, 4, 3, 1]))
    assert asked_ids(third_leg).tolist() == [4, 3, 1]
    second.complete()
    third.complete()
    _, late = launch(window, tables, torch.tensor([9, 4, 3, 1]))
    assert late.asked is None
    for leg in (first_leg, second_leg, third_leg):
        check(tables, leg)


def test_rows_are_kept_for_flights_to_come_while_there_is_room(tables: list[Tensor]) -> None:
    window = InFlightWindow(4, keep=2)
    for first in range(0, 300, 30):  # each flight is done before the next one starts; 20 of its 50 rows are not new
        flight, leg = launch(window, tables, torch.arange(first, first + 50))
        assert leg.num_shared == (20 if first else 0)
        flight.complete()
        check(tables, leg)
        for out in leg.outs:  # as a user may
            out.fill_(-7)
        assert window.num_kept_bytes() <= 2 * sum(out.nbytes for out in leg.outs)
    _, leg = launch(window, tables, torch.arange(200, 320))  # of 100 rows that fit, those of three flights are there
    assert leg.num_shared == 90
    window.forget()
    assert window.num_kept_bytes() == 0


def test_an_old_row_is_asked_for_again_however_often_it_was_used_since(tables: list[Tensor]) -> None:
    window = InFlightWindow(4, keep=2)
    asked = []
    for k in range(12):
        flight, leg = launch(window, tables, torch.tensor([0, *range(10 * k + 10, 10 * k + 20)]))
        asked.append(0 in asked_ids(leg))
        flight.complete()
        check(tables, leg)
    assert asked[0] and 2 <= sum(asked) <= 6


def test_a_flight_that_others_wait_for_is_completed_by_whoever_needs_it_first(tables: list[Tensor]) -> None:
    window, gate = InFlightWindow(8), threading.Event()
    flights = [launch(window, tables, torch.arange(k, k + 50), gate=gate) for k in range(6)]
    with ThreadPoolExecutor(6) as threads:
        done = [threads.submit(flight.complete) for flight, _ in reversed(flights)]
        assert not any(d.done() for d in done)
        gate.set()
        for d in done:
            d.result(timeout=DEADLINE)
    for _, leg in flights:
        check(tables, leg)


def test_a_failed_flight_fails_those_that_wait_for_it_and_no_others(tables: list[Tensor]) -> None:
    window = InFlightWindow(8)

    class Lost:
        def result(self) -> None:
            raise ConnectionError("gone")

    first, _ = launch(window, tables, torch.arange(10))
    first.pending = [Lost()]
    second, _ = launch(window, tables, torch.arange(5, 15))
    apart, apart_leg = launch(window, tables, torch.arange(100, 110))
    for flight in (second, first, first):
        with pytest.raises(ConnectionError, match="gone"):
            flight.complete()
    apart.complete()
    check(tables, apart_leg)
    fresh, fresh_leg = launch(window, tables, torch.arange(15))
    assert fresh_leg.asked is None
    fresh.complete()
    check(tables, fresh_leg)


def test_what_was_forgotten_is_asked_for_again(tables: list[Tensor]) -> None:
    window = InFlightWindow(8)
    launch(window, tables, torch.arange(10))
    window.forget()
    _, leg = launch(window, tables, torch.arange(10))
    assert leg.asked is None


def test_flights_that_nobody_completes_are_held_by_the_window_only_while_they_fit(tables: list[Tensor]) -> None:
    window = InFlightWindow(3)
    legs = [launch(window, tables, torch.arange(10 * k, 10 * k + 10))[1] for k in range(20)]
    assert len(window) == 3
    flight, leg = launch(window, tables, torch.arange(160, 200))
    assert leg.num_shared == 30 and all(old.asked is None for old in legs)
    flight.complete()
    check(tables, leg)


def test_many_ids_over_time_do_not_crowd_the_tables_and_sharing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnsys.store.in_flight._SLACK", 64)
    rows = [torch.arange(100_000)]
    window = InFlightWindow(2)
    previous: Flight | None = None
    for k in range(60):
        leg = Leg(
            "x", torch.arange(50 * k, 50 * k + 100), torch.arange(100), [torch.empty(100, dtype=torch.int64)], 100_000
        )
        flight = Flight()
        with flight.lock:
            window.enter(flight, [leg])
            flight.pending = [Answer(rows, leg)]
        assert leg.num_shared == (50 if k else 0)
        if previous is not None:
            previous.complete()
        previous = flight
        assert window._places["x"].num_ids <= 2 * (8 + 2) * 100 + 64 + 200
    assert previous is not None
    previous.complete()
    check(rows, leg)


class Constant:
    """A source whose rows are all one number."""

    mutable = False

    def __init__(self, number: int) -> None:
        self.rows = torch.full((50, 2), float(number))
        self.shape, self.dtype = tuple(self.rows.shape), self.rows.dtype
        self.num_read = 0

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        assert ids.numel(), "nobody reads no rows"
        self.num_read += ids.numel()
        return self.rows[ids]

    def begin_read(self, ids: Tensor, out: Tensor | None = None) -> Any:
        rows = self.read(ids)
        return SimpleNamespace(result=lambda: rows)


def read(*shared: SharedInFlight) -> list[float]:
    """The one number that the rows of each have."""
    context, ids = ReadContext(), torch.arange(20)
    reads = [each.begin(ids, None, context) for each in shared]
    context.send()
    found = [each.result().unique().tolist() for each in reads]
    assert all(len(numbers) == 1 for numbers in found)
    return [numbers[0] for numbers in found]


def test_a_wrapper_that_is_gone_leaves_no_rows_to_another() -> None:
    """Objects that follow one another often have the same address."""
    window = InFlightWindow(4, keep=3)
    for number in range(30):
        assert read(SharedInFlight(as_source(Constant(number), "x"), window)) == [number]


def test_sources_of_one_kind_that_are_not_read_together_every_time_get_their_own_rows() -> None:
    window = InFlightWindow(4, keep=3)
    own = [Constant(number) for number in range(3)]
    a, b, c = (SharedInFlight(as_source(each, "x"), window, kind="node") for each in own)
    for _ in range(2):
        assert read(a) == [0] and read(c) == [2] and read(b, a) == [1, 0] and read(a, b, c) == [0, 1, 2]


def test_what_is_shared_whole_is_not_asked_for() -> None:
    window, own = InFlightWindow(4, keep=3), Constant(7)
    shared = SharedInFlight(as_source(own, "x"), window)
    assert read(shared) == read(shared) == [7] and own.num_read == 20
