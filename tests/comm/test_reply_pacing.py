"""The token buckets of a server, on a clock that the test turns: rates are OES's, and nobody can stall another."""

from __future__ import annotations

import math

import pytest

from gnnsys.comm import egress, reply_pacing
from gnnsys.comm.egress import Egress
from gnnsys.comm.reply_pacing import LEAST_RATE

MB = 10**6


class FakeJob:
    """A reply of `num_chunks` chunks to one peer, sent as `Job` sends them."""

    def __init__(self, peer: bytes, num_chunks: int, size: int, arrived: float = 0.0, priority: int = 0) -> None:
        self.peer, self.left, self.size, self.is_paced = peer, num_chunks, size, True
        self.arrived, self.priority = arrived, priority
        self.ended_at = math.nan

    def run(self, world: World) -> None:
        while self.left:
            if world.pacer.park(self):
                return
            world.sent.append((world.now, self))
            self.left -= 1
            world.pacer.enter(self.peer, [], self.size, is_paced=True, job=self)
        self.ended_at = world.now


class World:
    """A pacer, its clock, and a worker that has no delay. A peer's last chunk has left once its bucket is paid."""

    def __init__(self, rate_out: float | None = None) -> None:
        self.now, self.wakes = 100.0, 0
        self.sent: list[tuple[float, FakeJob]] = []
        self.ready: list[FakeJob] = []
        self.pacer = Egress(self.ready.append, self._wake, lambda: self.now)
        self.pacer.set_rate_out(rate_out)

    def _wake(self) -> None:
        self.wakes += 1

    def begin(self, job: FakeJob, share: int) -> FakeJob:
        self.pacer.tell(job.peer, share)
        job.run(self)
        return job

    def turn(self, until: float = math.inf) -> None:
        """Lets time pass until nothing waits, or until then."""
        for _ in range(100_000):
            wait = self.pacer.wait()
            if wait == math.inf or self.now + wait > until:
                self.now = until if until < math.inf else self.now
                return
            self.now += wait
            self.pacer.release()
            while self.ready:
                self.ready.pop(0).run(self)
        raise AssertionError("it never ends")

    def bytes_to(self, peer: bytes, begin: float, end: float) -> int:
        return sum(job.size for at, job in self.sent if job.peer == peer and begin <= at < end)


def test_a_flow_has_its_receivers_share():
    world = World()
    job = world.begin(FakeJob(b"a", 100, 50_000), 2 * MB)
    world.turn()
    assert job.ended_at - 100 == pytest.approx(99 * 50_000 / (2 * MB), rel=1e-6)


def test_in_no_span_of_time_does_a_flow_send_more_than_its_rate_and_a_burst():
    world = World(10 * MB)
    for number in range(3):
        world.begin(FakeJob(b"%d" % number, 80, 60_000), (1 + 2 * number) * MB)
    world.turn()
    for number in range(3):
        rate = min((1 + 2 * number) * MB, 10 * MB)
        times = [at for at, job in world.sent if job.peer == b"%d" % number]
        for first in range(0, len(times), 7):
            for last in range(first, len(times), 5):
                moved = 60_000 * (last - first)  # the last one leaves after that time
                assert moved <= rate * (times[last] - times[first]) + rate * reply_pacing._BURST_SECONDS + 2


@pytest.mark.parametrize(
    ("rate_out", "shares", "rates"),
    [
        (8 * MB, [9 * MB] * 8, [1 * MB] * 8),
        (8 * MB, [9 * MB, 1 * MB], [4 * MB, 1 * MB]),  # OES leaves what the second has no use for
        (None, [3 * MB, 1 * MB], [3 * MB, 1 * MB]),
        (100 * MB, [2 * MB] * 3, [2 * MB] * 3),
    ],
)
def test_rates_are_the_least_of_both_machines_rate_over_flows(rate_out, shares, rates):
    world = World(rate_out)
    for number, share in enumerate(shares):
        world.begin(FakeJob(b"%d" % number, 10_000, 65_536), share)
    world.turn(until=110.0)
    for number, rate in enumerate(rates):
        assert world.bytes_to(b"%d" % number, 101.0, 109.0) == pytest.approx(8 * rate, abs=1.5 * 65_536)


def test_a_flow_that_ends_leaves_its_part_to_the_others():
    world = World(4 * MB)
    short, long = FakeJob(b"s", 10, 100_000), FakeJob(b"l", 100, 100_000)
    world.begin(short, 9 * MB)
    world.begin(long, 9 * MB)
    world.turn()
    # Both have 2 MB/s while 1 MB of the short one leaves, 0.5 s; then the other one has all 4 MB/s for its last 9 MB.
    assert short.ended_at - 100 == pytest.approx(0.45, abs=0.06)
    assert long.ended_at - 100 == pytest.approx(0.5 + (10 - 1) / 4, abs=0.06)


def test_a_share_that_is_told_later_counts_from_then_on():
    world = World()
    job = world.begin(FakeJob(b"a", 10_000, 100_000), 1 * MB)
    world.turn(until=102.0)
    world.pacer.tell(b"a", 10 * MB, is_request=False)
    world.turn(until=104.0)
    assert world.bytes_to(b"a", 102.0, 104.0) == pytest.approx(20 * MB, abs=300_000)
    world.pacer.tell(b"nobody", 1 * MB, is_request=False)
    assert world.pacer.rate_of(b"nobody") == 0, "who asks for nothing takes no memory"
    assert job.left


@pytest.mark.parametrize("share", [1, 2, 1000, 2**64 - 1])
def test_an_absurd_share_is_served_and_costs_others_no_more_than_a_flow_does(share):
    world = World(2 * MB)
    odd = world.begin(FakeJob(b"odd", 3, 65_536), share)
    other = world.begin(FakeJob(b"other", 200, 65_536), 50 * MB)
    world.turn()
    assert odd.left == other.left == 0
    assert odd.ended_at - 100 <= 2 * 65_536 / LEAST_RATE + 0.1
    assert other.ended_at - 100 <= 200 * 65_536 / (1 * MB) + 0.1


def test_within_a_flow_the_smallest_priority_goes_first_and_then_the_oldest():
    world = World()
    world.begin(FakeJob(b"a", 1, 1 * MB), 1 * MB)  # a second of debt
    jobs = [FakeJob(b"a", 2, 10_000, arrived=at, priority=p) for at, p in ((1.0, 0), (2.0, 0), (3.0, -1), (4.0, 5))]
    for job in jobs:
        world.begin(job, 1 * MB)
    world.turn()
    order = [jobs.index(job) for _, job in world.sent[1:]]
    assert order == [2, 2, 0, 0, 1, 1, 3, 3]


def test_a_job_that_was_let_go_and_sends_nothing_holds_the_others_up_for_a_moment_only():
    world = World()
    world.begin(FakeJob(b"a", 1, 100_000), 1 * MB)
    gone, next_one = FakeJob(b"a", 1, 1000, arrived=1.0), FakeJob(b"a", 1, 1000, arrived=2.0)
    gone.run = lambda world: None  # type: ignore[method-assign]
    assert world.pacer.park(gone) and world.pacer.park(next_one)
    world.turn()
    assert next_one.left == 0 and next_one.ended_at - 100 == pytest.approx(0.1 + reply_pacing.TURN_SECONDS, abs=0.005)


def test_a_job_that_expired_is_not_let_go():
    world = World()
    world.begin(FakeJob(b"a", 1, 100_000), 1 * MB)
    job = FakeJob(b"a", 1, 1000)
    assert world.pacer.park(job)
    assert world.pacer.unpark(job) and not world.pacer.unpark(job)
    assert world.pacer.wait() == math.inf
    world.now += 5
    world.pacer.release()
    assert world.ready == [] and world.pacer.to_json()["waiting"] == 0


def test_more_peers_than_are_kept_are_served_and_forgotten(monkeypatch):
    monkeypatch.setattr(egress, "MOST_FLOWS", 4)
    world = World()
    jobs = [world.begin(FakeJob(b"%d" % number, 5, 100_000), 1 * MB) for number in range(20)]
    while world.ready:
        world.ready.pop(0).run(world)
    world.turn()
    assert all(job.left == 0 for job in jobs), "no job is let go because of others, however many peers there are"
    world.begin(FakeJob(b"one more", 1, 1000), 1 * MB)
    assert len(world.pacer._flows) == 4


def test_nothing_waits_for_nobody():
    world = World(5 * MB)
    assert world.pacer.wait() == math.inf and world.pacer.has_room(b"a", 0) and world.pacer.rate_of(b"a") == 0
    assert not world.pacer.park(FakeJob(b"a", 1, 1)), "a client that said no share is not paced"
    world.pacer.enter(b"a", [], 10**9, is_paced=True)
    assert world.pacer.to_json()["paced"] == world.pacer.to_json()["waiting"] == 0


@pytest.mark.parametrize("rate", [0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ValueError, match="rate_out"):
        World(rate)


def test_chunks_take_a_fiftieth_of_a_second_within_bounds():
    sizes = []
    for rate in (1000, 10e6, 1e12):
        world, job = World(), FakeJob(b"a", 0, 0)
        world.pacer.tell(b"a", int(rate))
        sizes.append(world.pacer.chunk_bytes(job, 4 << 20))
    assert sizes == [1 << 16, 200_000, 4 << 20]
