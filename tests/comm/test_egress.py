"""The way out of a server, on a clock and a wire of the test's: what goes first, how much lies ahead, who waits."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque

import numpy as np
import pytest

from gnnsys.comm import egress
from gnnsys.comm.egress import LEAST_CHUNK, Egress
from gnnsys.comm.urgency import AHEAD, WAITED, urgency

MB = 10**6
URGENT, LATER = urgency(WAITED, 0), urgency(AHEAD, 3)


class FakeJob:
    """A reply of `size` bytes, sent in chunks as large as it is told."""

    def __init__(self, peer: bytes, size: int, priority: int = LATER) -> None:
        self.peer, self.left, self.priority, self.is_paced = peer, size, priority, False
        self.arrived = self.ended_at = 0.0

    def run(self, world: World) -> None:
        while self.left:
            if world.egress.park(self):
                return
            chunk = np.empty(min(self.left, world.egress.chunk_bytes(self, 4 << 20)), np.uint8)
            self.left -= chunk.nbytes
            world.order.append(self)
            world.egress.enter(self.peer, [chunk], chunk.nbytes, priority=self.priority, job=self)
            world.wire(self, chunk)
            del chunk


class World:
    """A server whose clients share one link out and have a link in each; a link sends one chunk after the other.

    libzmq holds a buffer until its last byte has left the server's link, or the client's if that is slower.
    """

    def __init__(self, rate_out: float, rates_in: dict[bytes, float] | None = None, order: str = "auto") -> None:
        self.now, self.rate_out, self.rates_in = 0.0, rate_out, rates_in or {}
        self.egress = Egress(self.ready_soon, lambda: None, lambda: self.now, order)
        self.egress._all.size = 2 * egress.LEAST_WINDOW  # as it is on a slow link after a while
        self.ready: deque[FakeJob] = deque()
        self.order: list[FakeJob] = []  # whose chunk was handed over when
        self._queues: dict[bytes, deque[tuple[FakeJob, np.ndarray]]] = {}
        self._free_at = 0.0
        self._events: list[tuple[float, int, bytes]] = []
        self._ids = itertools.count()

    def ready_soon(self, job: FakeJob) -> None:
        self.ready.append(job)

    def wire(self, job: FakeJob, chunk: np.ndarray) -> None:
        queue = self._queues.setdefault(job.peer, deque())
        queue.append((job, chunk))
        if len(queue) == 1:
            self._send(job.peer)

    def _send(self, peer: bytes) -> None:
        """The client's next chunk: clients take turns on the server's link, by the chunk."""
        _, chunk = self._queues[peer][0]
        begin = max(self.now, self._free_at)
        self._free_at = begin + chunk.nbytes / self.rate_out
        rate_in = self.rates_in.get(peer, float("inf"))
        if rate_in:
            end = max(self._free_at, begin + chunk.nbytes / rate_in)
            heapq.heappush(self._events, (end, next(self._ids), peer))

    def begin(self, job: FakeJob) -> FakeJob:
        job.arrived = self.now
        job.run(self)
        return job

    def turn(self, until: float = float("inf")) -> None:
        for _ in range(1_000_000):
            while self.ready:
                self.ready.popleft().run(self)
            wait = self.now + self.egress.wait()
            at = min(wait, self._events[0][0] if self._events else float("inf"))
            if at > until or at == float("inf"):
                self.now = min(until, max(self.now, until)) if until < float("inf") else self.now
                return
            self.now = max(self.now, at)
            if self._events and self._events[0][0] <= self.now:
                _, _, peer = heapq.heappop(self._events)
                job, chunk = self._queues[peer].popleft()
                if self._queues[peer]:
                    self._send(peer)
                if not job.left and not any(each is job for each, _ in self._queues[peer]):
                    job.ended_at = self.now
                del chunk  # the last reference: libzmq lets go of it
            else:
                self.egress.release()
        raise AssertionError("it never ends")


def raise_job(world: World, job: FakeJob) -> None:
    job.priority = URGENT
    world.egress.note_raised([job])


@pytest.mark.parametrize("rate", [2 * MB, 12.5 * MB, 125 * MB, 1250 * MB])
def test_the_urgent_wait_for_little_and_a_link_never_idles(rate):
    world = World(rate)
    bulk = world.begin(FakeJob(b"a", int(2 * rate)))
    world.turn(until=1.0)
    urgent = world.begin(FakeJob(b"b", int(0.01 * rate), URGENT))
    world.turn()
    ahead = max(egress.AHEAD_SECONDS, egress.LEAST_WINDOW / rate)
    assert urgent.ended_at - 1.0 <= 0.01 + 2.5 * ahead + LEAST_CHUNK / rate
    assert bulk.ended_at == pytest.approx(2 + 0.01, rel=0.01), "the link had something to send all the time"


def test_the_urgent_go_before_four_other_clients_that_want_much():
    world, rate = World(12.5 * MB), 12.5 * MB
    for number in range(4):
        world.begin(FakeJob(b"%d" % number, 5 * MB))
    world.turn(until=0.5)
    urgent = world.begin(FakeJob(b"u", 256 << 10, URGENT))
    world.turn()
    alone = (256 << 10) / rate
    assert urgent.ended_at - 0.5 <= 2 * alone + 0.025


def test_fifo_holds_nothing_back_and_makes_the_urgent_wait():
    world = World(12.5 * MB, order="fifo")
    world.begin(FakeJob(b"a", 10 * MB))
    urgent = world.begin(FakeJob(b"a", 256 << 10, URGENT))
    world.turn()
    assert urgent.ended_at == pytest.approx((10 * MB + (256 << 10)) / (12.5 * MB))


def test_equals_take_turns_whoever_has_more_jobs():
    world = World(12.5 * MB)
    for _ in range(5):
        world.begin(FakeJob(b"many", 20 * MB))
    world.begin(FakeJob(b"one", 20 * MB))
    world.turn(until=2.0)
    sent = {peer: sum(job.peer == peer for job in world.order) for peer in (b"many", b"one")}
    assert sent[b"one"] == pytest.approx(sent[b"many"], rel=0.2)


def test_a_client_that_takes_little_leaves_its_part_to_the_others():
    world = World(12.5 * MB, {b"slow": 0.5 * MB})
    world.begin(FakeJob(b"slow", 10 * MB))
    quick = world.begin(FakeJob(b"quick", 10 * MB))
    world.turn(until=3.0)
    assert 0 < quick.ended_at <= 1.15 * 10 / 12.5 * (12.5 / 12)


def test_a_client_that_takes_nothing_holds_up_nobody():
    world = World(12.5 * MB, {b"gone": 0.0})
    for priority in (URGENT, LATER):
        world.begin(FakeJob(b"gone", 10 * MB, priority))
    other = world.begin(FakeJob(b"other", 10 * MB))
    world.turn(until=3.0)
    assert 0 < other.ended_at <= 10 / 12.5 + egress._STALL_SECONDS + 2 * egress._LOOK_SECONDS


def test_whoever_calls_everything_urgent_starves_nobody():
    world = World(12.5 * MB)
    for _ in range(20):
        world.begin(FakeJob(b"liar", 5 * MB, URGENT - (1 << 20)))
    honest = world.begin(FakeJob(b"honest", MB))
    world.turn()
    assert honest.ended_at < 20 * 5 / 12.5 / 2


def test_a_raised_job_goes_before_the_others():
    world = World(12.5 * MB)
    jobs = [world.begin(FakeJob(b"a", 2 * MB)) for _ in range(5)]
    world.turn(until=0.1)
    raise_job(world, jobs[4])
    world.turn()
    assert jobs[4].ended_at == min(job.ended_at for job in jobs)


def test_a_job_that_expired_or_never_came_leaves_its_room_to_others():
    world = World(12.5 * MB)
    world.begin(FakeJob(b"a", 2 * MB))
    gone, silent, last = (FakeJob(b"a", MB) for _ in range(3))
    silent.run = lambda world: None  # type: ignore[method-assign]
    for job in (gone, silent, last):
        assert world.egress.park(job)
    assert world.egress.unpark(gone) and not world.egress.unpark(gone)
    world.turn()
    assert gone.left == MB and not last.left and world.egress.to_json()["waiting"] == 0
    assert world.egress.to_json()["ahead"] == 0


def test_windows_are_empty_when_all_was_sent_whatever_the_order_of_events():
    draws = random.Random(7)
    for trial in range(30):
        world = World(draws.choice([1, 12.5, 125]) * MB, {b"2": draws.choice([0.3, 5, 1000]) * MB})
        jobs = []
        for _ in range(30):
            job = FakeJob(
                b"%d" % draws.randrange(4), draws.randrange(1, 3 * MB), draws.choice([URGENT, LATER, 1 << 20])
            )
            jobs.append(world.begin(job))
            world.turn(until=world.now + draws.random() / 20)
            if draws.random() < 0.2:
                raise_job(world, draws.choice(jobs))
            if draws.random() < 0.1 and world.egress.unpark(one := draws.choice(jobs)):
                one.left = 0
        world.turn()
        found = world.egress.to_json()
        assert not any(job.left for job in jobs), trial
        assert (
            found["ahead"] == found["waiting"] == 0 and not any(world.egress._all._levels) and not world.egress._ahead
        )


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order must be one of 'auto', 'fair', 'fifo', got 'urgent'"):
        Egress(print, print, order="urgent")
