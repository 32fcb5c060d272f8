"""Groups: what is before and behind a stage take turns; order, errors, seeking and ends are as in any pipeline."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from gnnsys.pipeline import BatchGroup, Pipeline, Stage

TIMEOUT = 60.0  # nothing waits so long


def upto(end: int):
    return lambda start: range(start, end)


def stages(group: BatchGroup, threads: int = 2, sample=int, fetch=int) -> list[Stage]:
    return [Stage("sample", sample, threads=threads, group=group), Stage("fetch", fetch, threads=threads, depth=2)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("size", "count"), [(1, 5), (4, 12), (4, 13), (7, 3), (50, 20), (5, 0)])
def test_results_come_in_the_order_of_the_source(threads, size, count):
    with Pipeline(upto(count), stages(BatchGroup(size=size), threads), timeout=TIMEOUT) as pipeline:
        assert list(pipeline) == list(range(count))


def test_a_group_is_sampled_before_its_first_batch_is_fetched_and_the_next_when_its_last_one_was_taken():
    log, lock = [], threading.Lock()

    def note(what):
        def run(number):
            with lock:
                log.append((what, number))
            return number

        return run

    made = stages(BatchGroup(size=6), 2, note("sample"), note("fetch"))
    with Pipeline(upto(30), made, timeout=TIMEOUT) as pipeline:
        assert list(pipeline) == list(range(30))
    for place, (what, number) in enumerate(log):
        before = [n for w, n in log[:place] if w == "sample"]
        if what == "fetch":
            group = number // 6
            assert set(range(6 * group, 6 * group + 6)) <= set(before), "all of the group are sampled"
            assert max(before) < 6 * group + 6 + 2, "and of the next one no more than threads have in hand"


def test_bytes_bound_a_group_and_a_batch_that_is_larger_than_that_goes_on_alone():
    most = []
    sizes = [random.Random(number).choice([1, 10, 500]) for number in range(60)]
    group = BatchGroup(size=40, most_bytes=100, num_bytes=lambda number: sizes[number])
    with Pipeline(upto(60), stages(group), timeout=TIMEOUT) as pipeline:
        channel = pipeline._workers.channels[1]
        for number, found in enumerate(pipeline):
            assert found == number
            most.append(channel._held)
    assert max(most) < 100 + 2 * 500, "one batch more than fits, and the one that all wait for"
    assert channel.most_waiting < 40
    assert channel._held == 0 and not channel._bytes


@pytest.mark.parametrize("group", [BatchGroup(size=5), BatchGroup(size=5, most_bytes=3, num_bytes=lambda x: 1)])
def test_seeking_in_the_middle_of_groups_goes_on_where_it_says(group):
    spread = random.Random(3)
    with Pipeline(lambda start: itertools.count(start), stages(group, 3), timeout=TIMEOUT) as pipeline:
        for _ in range(40):
            position = spread.randrange(100)
            pipeline.seek(position)
            assert [next(pipeline) for _ in range(spread.randrange(9))] == list(range(position, pipeline.position))


def test_a_source_that_ended_may_be_sought_again():
    with Pipeline(upto(7), stages(BatchGroup(size=5)), timeout=TIMEOUT) as pipeline:
        assert list(pipeline) == list(range(7))
        pipeline.seek(2)
        assert list(pipeline) == list(range(2, 7))
        pipeline.seek(0, lambda start: itertools.count(start))
        assert list(itertools.islice(pipeline, 11)) == list(range(11))


@pytest.mark.parametrize("at", ["source", "sample", "fetch"])
@pytest.mark.parametrize("fails_at", [0, 4, 5, 8])
def test_an_error_comes_in_the_turn_of_its_batch(at, fails_at):
    def failing(number):
        if number == fails_at:
            raise KeyError("the cause")
        return number

    def source(start):
        return map(failing, range(start, 12)) if at == "source" else range(start, 12)

    made = stages(BatchGroup(size=5), 2, **({} if at == "source" else {at: failing}))
    got = []
    with pytest.raises(KeyError, match="the cause"):
        for number in Pipeline(source, made, timeout=TIMEOUT):
            got.append(number)
    assert got == list(range(fails_at))


def test_closing_in_the_middle_of_a_group_ends_every_thread():
    pipeline = Pipeline(lambda start: itertools.count(start), stages(BatchGroup(size=5)), timeout=TIMEOUT)
    threads = pipeline._workers._threads
    for _ in range(3):
        next(pipeline)
    pipeline.close()
    assert not any(thread.is_alive() for thread in threads)


def test_a_group_of_no_batches_is_refused():
    with pytest.raises(ValueError, match="a batch at least"):
        BatchGroup(size=0)
