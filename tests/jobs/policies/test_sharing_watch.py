"""Jobs that disturb each other are told apart by a watch, on a device that is played by a formula."""

from __future__ import annotations

from dataclasses import dataclass

from gnnsys.jobs import SharingRecord, SharingWatch, WaitingJob


@dataclass
class Pace:
    number: int
    kind: str
    alone: float | None = None
    rate: float | None = None
    is_paused: bool = False


def play(watch: SharingWatch, paces: list[Pace], two: float, start: float, three: float = 0.0) -> list[list[int]]:
    """A service that asks every second. Jobs do 10 steps a second alone; as two or three, 10 times that."""
    said = []
    for second in range(40):
        working = [pace for pace in paces if not pace.is_paused]
        for pace in paces:
            pace.rate = None if pace.is_paused else 10.0 * (1.0, two, three)[len(working) - 1]
        if len(working) == 1:  # of all jobs of its kind
            for pace in paces:
                pace.alone = 10.0 if pace.kind == working[0].kind else pace.alone
        held = watch.judge(paces, start + second)
        said.append(held)
        for pace in paces:
            pace.is_paused = pace.number in held
    return said


def test_jobs_that_gain_nothing_are_measured_and_then_one_pauses():
    watch, paces = SharingWatch(), [Pace(1, "a"), Pace(2, "b")]
    said = play(watch, paces, 0.5, 100.0)
    assert said[:10] == [[]] * 10, "nobody is stopped in the first ten seconds"
    assert [2] in said[10:13] and [1] in said[10:13], "each is alone for a moment"
    assert said[-20:] == [[2]] * 20 and watch.record == SharingRecord({("a", "b"): 1.0})
    assert not watch.pays(
        [WaitingJob(number=n, memory=1, submitted=0.0, kind=kind) for n, kind in ((7, "a"), (8, "b"))]
    )
    assert play(watch, paces[1:], 0.5, 200.0) == [[]] * 40, "the first has ended, the other goes on"


def test_jobs_that_gain_go_on_together():
    watch, paces = SharingWatch(), [Pace(1, "a"), Pace(2, "b")]
    said = play(watch, paces, 0.9, 0.0)
    assert said[-20:] == [[]] * 20 and watch.record.speeds == {("a", "b"): 1.8}
    assert sum(map(len, said)) == 2, "each was measured once"


def test_what_is_remembered_needs_no_measuring():
    watch, paces = SharingWatch(SharingRecord({("a", "a"): 1.0})), [Pace(1, "a"), Pace(2, "a"), Pace(3, "b")]
    assert watch.judge(paces, 0.0) == [2], "the third may run beside the first"


def test_a_third_that_makes_two_slower_pauses_and_two_go_on():
    watch = SharingWatch(SharingRecord({("a", "a"): 1.8}))
    paces = [Pace(n, "a", alone=10.0) for n in (1, 2, 3)]
    said = play(watch, paces, 0.9, 0.0, three=0.5)
    assert said[-1] == [3] and watch.record.speeds["a", "a", "a"] == 1.5


def test_a_job_of_no_kind_is_left_alone():
    watch, paces = SharingWatch(), [Pace(1, ""), Pace(2, "")]
    assert play(watch, paces, 0.3, 0.0) == [[]] * 40 and not watch.record.speeds


def test_nobody_waits_for_a_job_that_makes_no_steps():
    watch, loads, works = SharingWatch(), Pace(1, "a"), Pace(2, "b", alone=10.0, rate=10.0)
    assert [watch.judge([loads, works], float(second)) for second in range(40)] == [[]] * 40
    loads.rate = 1.0
    said = [watch.judge([loads, works], 50.0 + second) for second in range(30)]
    assert said[0] == [2] and said[-1] == [], "measured alone for a while, and then no more"
    assert said.count([2]) == 10
