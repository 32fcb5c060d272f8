"""A pipeline's promises: order, bounds, errors, endings, state."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
import weakref

import pytest
import torch

from gnnsys.pipeline import Pipeline, Stage

_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _know_others() -> None:
    """Threads that other tests of this process have left are none of a pipeline's here."""
    _others.clear()
    _others.update(threading.enumerate())


def pipeline_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gnnsys-") and t not in _others]


def upto(n: int):
    return lambda start: range(start, n)


def square(x: int) -> int:
    return x * x


@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_come_in_the_order_of_the_source(threads: int, depth: int) -> None:
    spread = random.Random(0)
    delays = [spread.random() * 0.003 for _ in range(40)]
    hold = threading.Event()

    def slow(x: int) -> int:
        hold.wait(delays[x])  # never set: threads finish out of order
        return x

    stages = [Stage("slow", slow, threads, depth), Stage("square", square, threads, depth)]
    assert list(Pipeline(upto(40), stages)) == [x * x for x in range(40)]
    gc.collect()
    assert pipeline_threads() == []


def test_nothing_runs_further_ahead_than_threads_and_depth_allow() -> None:
    started = []
    first_done = threading.Event()

    def note(x: int) -> int:
        started.append(x)
        if len(started) == 5:
            first_done.set()
        return x

    with Pipeline(lambda start: itertools.count(start), [Stage("note", note, threads=2, depth=3)]) as pipeline:
        assert first_done.wait(120)
        assert next(pipeline) == 0
        assert next(pipeline) == 1
        assert len(started) <= 2 + 2 + 3


def test_inline_stages_run_in_the_callers_thread_and_start_none() -> None:
    seen = []
    stages = [Stage("a", lambda x: seen.append(threading.current_thread()) or x, threads=0)]
    assert list(Pipeline(upto(3), stages)) == [0, 1, 2]
    assert set(seen) == {threading.current_thread()}


def test_an_inline_stage_behind_a_threaded_one_runs_in_the_caller() -> None:
    where: dict[str, set[threading.Thread]] = {"work": set(), "user": set()}

    def record(name: str):
        return lambda x: where[name].add(threading.current_thread()) or x

    list(Pipeline(upto(5), [Stage("work", record("work")), Stage("user", record("user"), threads=0)]))
    assert threading.current_thread() not in where["work"]
    assert where["user"] == {threading.current_thread()}


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_an_error_surfaces_in_its_turn_with_its_traceback_stage_and_batch(threads: int) -> None:
    def fail_at_four(x: int) -> int:
        if x == 4:
            raise KeyError("the cause")
        return x

    pipeline = Pipeline(
        upto(10), [Stage("first", square, threads=0), Stage("ok", int, threads), Stage("bad", fail_at_four, threads)]
    )
    got = []
    with pytest.raises(KeyError, match="the cause") as caught:
        for x in pipeline:
            got.append(x)
    assert got == [0, 1]
    text = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "fail_at_four" in text
    assert "stage 'bad'" in text and "batch 2" in text
    assert pipeline_threads() == []
    with pytest.raises(RuntimeError, match="closed"):
        next(pipeline)


def test_batches_before_a_failing_one_are_delivered() -> None:
    def source(start: int):
        yield from range(start, 3)
        raise ValueError("no more seeds")

    pipeline = Pipeline(source, [Stage("square", square, threads=2, depth=4)])
    assert [next(pipeline) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(ValueError, match="no more seeds"):
        next(pipeline)


def test_an_abandoned_pipeline_ends_its_threads_when_it_is_collected() -> None:
    def abandon() -> weakref.ref:
        pipeline = Pipeline(lambda start: itertools.count(start), [Stage("square", square, threads=3)])
        assert next(pipeline) == 0
        return weakref.ref(pipeline)

    ref = abandon()
    gc.collect()
    assert ref() is None
    assert pipeline_threads() == []


def test_closing_while_stages_are_blocked_returns_and_is_idempotent() -> None:
    pipeline = Pipeline(lambda start: itertools.count(start), [Stage("a", square, 2, 1), Stage("b", square, 2, 1)])
    assert next(pipeline) == 0
    pipeline.close()
    pipeline.close()
    assert pipeline_threads() == []


def test_a_batch_is_not_kept_alive_by_the_thread_that_made_it() -> None:
    class Big:
        pass

    with Pipeline(upto(1), [Stage("make", lambda _: Big())]) as pipeline:
        ref = weakref.ref(next(pipeline))
        gc.collect()
        assert ref() is None


def test_setup_runs_once_per_thread_and_its_error_surfaces() -> None:
    workers = []
    list(Pipeline(upto(20), [Stage("a", square, threads=3, setup=workers.append)]))
    assert sorted(workers) == [0, 1, 2]

    def refuse(worker: int) -> None:
        raise OSError(f"no core for worker {worker}")

    with pytest.raises(OSError, match="no core for worker 0"):
        next(Pipeline(upto(2), [Stage("a", square, setup=refuse)]))


def test_stage_threads_have_their_own_native_thread_count() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        inside = list(Pipeline(upto(4), [Stage("a", lambda _: torch.get_num_threads(), native_threads=2)]))
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert inside == [2] * 4
        assert torch.get_num_threads() == 3
        assert later == [3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("seen", [0, 1, 7, 20])
def test_a_restored_state_continues_with_the_batch_after_the_last_seen(threads: int, seen: int) -> None:
    stages = [Stage("square", square, threads)]
    whole = list(Pipeline(upto(20), stages))
    first = Pipeline(upto(20), stages)
    head = [next(first) for _ in range(seen)]
    state = first.state_dict()
    second = Pipeline(upto(20), stages)
    list(itertools.islice(second, 3))  # what was in flight must not leak into the restored run
    second.load_state_dict(state)
    assert head + list(second) == whole


def test_seeking_keeps_the_threads_and_drops_what_was_in_flight() -> None:
    workers = []
    with Pipeline(upto(100), [Stage("square", square, threads=2, depth=4, setup=workers.append)]) as pipeline:
        assert next(pipeline) == 0
        pipeline.seek(3, source=lambda start: range(10 + start, 16))
        assert list(pipeline) == [169, 196, 225]
        pipeline.seek(98, source=upto(100))
        assert list(pipeline) == [98 * 98, 99 * 99]
    assert sorted(workers) == [0, 1]


def test_a_stage_that_never_answers_is_a_timeout_that_names_the_batch() -> None:
    release = threading.Event()
    pipeline = Pipeline(upto(3), [Stage("stuck", lambda x: release.wait(30) and x)], timeout=0.05)
    with pytest.raises(RuntimeError, match=r"batch 0 .* timeout=0.05 s.*stuck: 0"):
        next(pipeline)
    release.set()
    pipeline.close()


def test_counters_tell_batches_and_time_per_stage() -> None:
    hold = threading.Event()
    stages = [Stage("wait", lambda x: hold.wait(0.01) or x), Stage("user", square, threads=0)]
    pipeline = Pipeline(upto(5), stages)
    list(pipeline)
    counters = pipeline.counters()
    assert list(counters) == ["wait", "user", "consumer"]
    assert [c.batches for c in counters.values()] == [5, 5, 5]
    assert counters["wait"].busy >= 0.05
    assert counters["consumer"].starved > 0
    assert counters["wait"].waiting == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"threads": -1}, "threads"), ({"depth": -1}, "depth"), ({"native_threads": 0}, "native_threads")],
)
def test_a_stage_refuses_nonsense(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stage("a", square, **arguments)


def test_stages_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        Pipeline(upto(1), [Stage("a", square), Stage("a", square)])


SCRIPT = """
import itertools, sys, threading, time
import gnnsys.pipeline as p
slow = p.Stage("a", lambda x: (time.sleep(1.5) if x else 0) or x, threads=2)
pipeline = p.Pipeline(lambda s: itertools.count(s), [slow])
next(pipeline)
try:
    print("ready", flush=True)
    while True:
        next(pipeline)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_ends_a_waiting_consumer_and_the_interpreter_exits_while_the_pipeline_is_running() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=180) == ("interrupted\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_stage_begins_a_batch_before_it_runs_it(threads: int) -> None:
    seen: list[tuple[str, int]] = []

    def begin(x: int) -> int:
        seen.append(("begin", x))
        return x

    def run(x: int) -> int:
        seen.append(("run", x))
        return x

    stages = [Stage("make", int, threads), Stage("wait", run, threads, begin=begin), Stage("last", int, threads)]
    pipeline = Pipeline(upto(6), stages)
    assert list(pipeline) == list(range(6))
    assert sorted(seen) == sorted((what, x) for what in ("begin", "run") for x in range(6))
    assert all(seen.index(("begin", x)) < seen.index(("run", x)) for x in range(6))
    assert pipeline.counters()["wait"].batches == 6


def test_later_batches_are_begun_while_an_earlier_one_is_waited_for() -> None:
    third_begun = threading.Event()

    def begin(x: int) -> int:
        if x == 2:
            third_begun.set()
        return x

    def run(x: int) -> int:
        assert third_begun.wait(120), "nothing was begun while batch 0 was waited for"
        return x

    stages = [Stage("make", int, depth=2), Stage("wait", run, begin=begin)]
    assert list(Pipeline(upto(4), stages)) == list(range(4))


def test_a_stage_behind_the_last_threads_is_begun_by_them() -> None:
    where = []
    begin = Stage("user", square, threads=0, begin=lambda x: where.append(threading.current_thread()) or x)
    assert list(Pipeline(upto(3), [Stage("work", int), begin])) == [0, 1, 4]
    assert threading.current_thread() not in where and len(where) == 3


@pytest.mark.parametrize("threads", [0, 1])
def test_an_error_while_beginning_surfaces_in_its_turn(threads: int) -> None:
    def begin(x: int) -> int:
        if x == 2:
            raise KeyError("no answer")
        return x

    pipeline = Pipeline(upto(5), [Stage("make", int, threads), Stage("wait", int, threads, begin=begin)])
    assert [next(pipeline), next(pipeline)] == [0, 1]
    with pytest.raises(KeyError, match="no answer") as caught:
        next(pipeline)
    text = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "stage 'wait'" in text and "batch 2" in text


def test_an_observer_hears_of_all_work_on_a_batch_by_its_position() -> None:
    heard: list[tuple[int, str]] = []
    ordered = []

    def observe(position: int, stage: str, began: float, ended: float) -> None:
        heard.append((position, stage))
        ordered.append(began <= ended)

    stages = [Stage("a", square), Stage("b", square, begin=int), Stage("c", int, threads=0)]
    pipeline = Pipeline(upto(7), stages, position=3, observer=observe)
    next(pipeline)
    pipeline.seek(5)
    assert len(list(pipeline)) == 2
    assert {(p, s) for p in (3, 5, 6) for s in "abc"} <= set(heard) <= {(p, s) for p in range(3, 7) for s in "abc"}
    assert heard.count((6, "b")) >= 2  # begin and run
    assert all(ordered)


def test_counters_tell_how_many_batches_waited_and_what_a_stage_counts_itself() -> None:
    all_made = threading.Event()

    def make(x: int) -> int:
        if x == 4:
            all_made.set()
        return x

    stage = Stage("make", make, depth=3, counts=lambda: {"bytes": 7})
    with Pipeline(upto(5), [stage]) as pipeline:
        assert next(pipeline) == 0
        assert all_made.wait(120)
        rest = list(pipeline)
        counters = pipeline.counters()["make"]
    assert rest == [1, 2, 3, 4]
    assert counters.counts == {"bytes": 7}
    assert 3 <= counters.waiting_most <= 4
    assert 1 <= counters.waiting_mean <= 3


def test_a_forked_process_does_not_wait_for_threads_it_has_not() -> None:
    pipeline = Pipeline(lambda start: range(start, 100), [Stage("double", lambda x: 2 * x, threads=1)])
    assert next(pipeline) == 0
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            next(pipeline)
        except RuntimeError as error:
            os._exit(0 if "in another process" in str(error) and pipeline.is_closed else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert next(pipeline) == 2 and not pipeline.is_closed
    pipeline.close()
