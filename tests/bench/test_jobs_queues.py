"""`jobs/queues` and `jobs/sweep`: what is submitted, what is read off a run, and a run of each on the CPU."""

from __future__ import annotations

import inspect
import threading

import pytest

from gnnsys.bench.case import OURS
from gnnsys.bench.jobs import queue_jobs, stream_runs
from gnnsys.bench.jobs.cognn_queues import PUBLISHED_ORDERS, published
from gnnsys.bench.jobs.queue_runs import (
    QueuedCall,
    QueueEstimators,
    QueueRun,
    QueueService,
    QueueSide,
    make_warm,
    run_queue,
)
from gnnsys.bench.jobs.queues import AGAIN, QueueBench, SidesAhead, calls_of, capacity_for, queues
from gnnsys.bench.jobs.settings import SIDES, settings_of
from gnnsys.bench.jobs.stream_runs import run_streams
from gnnsys.bench.jobs.sweep import SMALL, SweepBench, sweep, sweep_calls
from gnnsys.bench.workload import QUICK, Workload
from gnnsys.jobs import JobState, JobTimes
from tests.support.processes import alive


def times(number: int, started: float, ended: float, **more) -> JobTimes:
    given = {"state": JobState.DONE, "attempts": 1, "error": "", "first_step": started + 0.5, **more}
    return JobTimes(
        number=number, submitted=0.0, started=started, ended=ended, memory=1, measured=1, result={}, **given
    )


def test_figures_of_a_run():
    run = QueueRun((times(1, 1.0, 4.0), times(2, 2.0, 9.0, attempts=2)))
    assert (run.makespan, run.completion, run.queueing, run.to_first_step) == (9.0, 6.5, 1.5, 0.5)
    assert run.num_out_of_memory == 1 and run.check() is run
    with pytest.raises(RuntimeError, match="1 of 1 jobs failed, the first with: it is full"):
        QueueRun((times(1, 1.0, 2.0, state=JobState.FAILED, error="it is full"),)).check()


@pytest.mark.parametrize("queue", PUBLISHED_ORDERS)
def test_jobs_of_a_queue_are_the_same_on_all_sides_but_for_their_memory(queue: str):
    calls = calls_of(published(queue), "gnnsys", 7, True)
    names = set(inspect.signature(queue_jobs.queue_job).parameters) - {"device"}
    assert len(calls) == 20 and all(set(call.arguments) == names for call in calls)
    assert {call.arguments["epochs"] for call in calls} == {7}
    assert max(call.arguments["nodes"] for call in calls[:2]) == max(call.arguments["nodes"] for call in calls)


def test_memory_is_scarce_and_the_largest_job_fits():
    gb = 2**30
    assert capacity_for([gb, 20 * gb, 18 * gb]) == 26 * gb
    assert capacity_for([gb, 5 * gb, 4 * gb]) == 9 * gb - 1
    assert capacity_for([gb, 36 * gb, 18 * gb]) == 36 * gb
    assert capacity_for([1, 2]) == 4 * gb


def test_sides_are_what_their_names_say():
    assert {name for name, side in SIDES.items() if not side.is_warm} == {"cold"}
    assert {name for name, side in SIDES.items() if side.workers > 2} == {"continuous", "continuous4", "mps4"}
    assert not any(SIDES[name].uses_estimates for name in ("cold", "warm", "slices", "mps", "mps4", "streams"))
    assert [name for name, side in SIDES.items() if not side.is_told] == ["untold2"]


def test_every_case_has_its_own_name_and_bad_settings_are_named():
    with Workload(QUICK) as work:
        cases = [*queues(work), *sweep(work)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and sum("completion beside warm" in name for name in names) == 2
    with pytest.raises(ValueError, match="sides=mip: choose of cold, warm"):
        settings_of(Workload(QUICK, settings={"sides": "warm,mip"}))
    with pytest.raises(ValueError, match="at least 1"):
        settings_of(Workload(QUICK, settings={"epochs": "0"}))


def test_a_sweep_tries_different_settings():
    with Workload(QUICK, settings={"jobs": "24"}) as work:
        calls = sweep_calls(settings_of(work), SMALL, "cpu")
    assert len({str(call.arguments) for call in calls}) == 24
    names = set(inspect.signature(queue_jobs.sweep_job).parameters) - {"device", "seed"}
    assert all(set(call.arguments) == names for call in calls)


def small_calls(kind: str) -> list[QueuedCall]:
    return [call for call in calls_of(published("Mix")[2:6], "gnnsys", 2, False) if call.arguments["kind"] == kind]


def test_estimates_have_safety_and_take_time():
    [call, *_] = small_calls("GCN")
    with Workload(QUICK) as work:
        found = QueueEstimators(work, call, "cpu").find([call, call])
    assert found.memory[0] == found.memory[1] > 300 * 64 * 4 and found.seconds > 0
    (graph,) = found.found[0].graphs.values()
    assert 300 * 50 * 4 < graph < found.memory[0], "the graph is shared, and a part of what the job takes alone"


@pytest.mark.long
def test_estimates_for_a_device_are_made_by_several_processes(monkeypatch):
    calls, memory = small_calls("GCN"), []
    with Workload(QUICK) as work:
        for count in (1, 2):
            monkeypatch.setattr("gnnsys.bench.jobs.queue_runs.num_estimators", lambda num_jobs, count=count: count)
            memory.append(QueueEstimators(work, calls[0], "cuda").find(calls).memory)
    assert memory[0] == memory[1] and min(memory[0]) > 0


@pytest.mark.long
def test_a_queue_runs_to_its_end_twice_and_the_second_time_lengths_are_known():
    calls = small_calls("GCN")
    calls = [QueuedCall(target=call.target, arguments=call.arguments, memory=1 << 26) for call in calls]
    first, again = run_queue(SIDES["continuous2"], [calls, calls], calls[0], device="cpu", capacity=None)
    for run in (first.check(), again.check()):
        assert len(run.times) == len(calls) and 0 < run.queueing < run.completion <= run.makespan
    assert [job.result["loss"] for job in first.times] == [job.result["loss"] for job in again.times]


@pytest.mark.long
def test_sides_begin_together_and_one_that_cannot_begin_keeps_no_other_from_it(monkeypatch):
    monkeypatch.setitem(SIDES, "broken", QueueSide(policy="no policy"))
    monkeypatch.setattr("gnnsys.bench.jobs.queues.num_usable_cores", lambda: 5)
    with Workload(QUICK) as work:
        ahead = SidesAhead(work)
        bench = QueueBench(work, "gnnsys", "Mix", "published order", published("Mix"), ahead)
        ahead.add(bench, ["continuous2", "broken", "cold", "warm", "lmcf"])
        with ahead.taken(bench, "continuous2") as ready:
            assert sorted(side for _, side in ahead._ready) == ["cold", "warm"], "lmcf would be the sixth worker"
            assert {side: each.held for (_, side), each in ahead._ready.items()}["cold"] == 0
            warmed = ready.service._queue.list()
            assert [str(job.state) for job in warmed] == ["done"] * 2
            assert len(ready.service._service.pool.idle) == 2, "both wait for a job, and each was given one"
        for _ in range(2):
            with pytest.raises(ValueError, match="no policy"), ahead.taken(bench, "broken"):
                pass
        with ahead.taken(bench, "cold") as cold:
            [run] = [cold.service.run(bench._calls[:1])]
        assert len(run.check().times) == 1


@pytest.mark.long
def test_a_side_whose_workers_cannot_be_made_warm_has_failed():
    call = QueuedCall(target=f"{__name__}:fails", arguments={})
    with QueueService(SIDES["warm"], call, device="cpu", capacity=None) as service:
        [error] = make_warm([service]).values()
    assert "it was asked to" in str(error)


def fails(device: str = "cpu"):
    raise ValueError("it was asked to")


def test_only_sides_that_a_selected_case_needs_are_begun():
    name = "jobs/queues/gnnsys/Mix, published order, warm beside cold"
    begun = []
    with Workload(QUICK, selects=lambda case: case == name) as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SidesAhead, "add", lambda self, bench, sides: begun.append((bench.name, sides)))
        list(queues(work))
    assert [sides for bench, sides in begun if bench == "gnnsys/Mix, published order"] == [["cold", "warm"]]


@pytest.mark.long
def test_jobs_that_nobody_has_estimated_are_estimated_by_the_service_and_have_the_same_results():
    given = {"device": "cpu", "capacity": None}
    calls = small_calls("GCN")
    told = [QueuedCall(target=call.target, arguments=call.arguments, memory=1 << 26) for call in calls]
    [untold] = run_queue(SIDES["untold2"], [calls], told[0], **given)
    [known] = run_queue(SIDES["continuous2"], [told], told[0], **given)
    assert all(job.memory and job.memory != 1 << 26 for job in untold.check().times)
    assert [job.result["loss"] for job in untold.times] == [job.result["loss"] for job in known.times]


@pytest.mark.long
def test_jobs_as_threads_of_one_process_end_and_are_timed():
    calls = small_calls("GCN")
    run = run_streams(calls, calls[0], 2, "cpu").check()
    assert [job.number for job in run.times] == list(range(1, len(calls) + 1))
    assert all(job.started < job.first_step <= job.ended for job in run.times)
    assert run.told(["a"] * len(calls)).count("a ") == len(calls)


def says_much(device: str = "cpu"):
    print("this is no answer", flush=True)
    return queue_jobs.queue_job(**small_calls("GCN")[0].arguments, device=device)


@pytest.mark.long
def test_what_jobs_in_threads_print_is_no_answer_and_the_process_ends_in_the_middle_of_a_job(monkeypatch):
    call = QueuedCall(target=f"{__name__}:says_much", arguments={})
    assert len(run_streams([call], call, 1, "cpu").check().times) == 1
    call = QueuedCall(target=f"{__name__}:never_ends", arguments={})
    children = set()
    monkeypatch.setattr(stream_runs, "RUN_SECONDS", 20.0)
    original = stream_runs.Child

    def watched(*args):
        child = original(*args)
        children.add(child.pid)
        return child

    monkeypatch.setattr(stream_runs, "Child", watched)
    with pytest.raises(RuntimeError, match="said nothing within 20 s"):
        run_streams([call], call, 1, "cpu")
    assert not any(alive(pid) for pid in children)


def never_ends(device: str = "cpu"):
    threading.Event().wait(600)


def test_a_side_whose_jobs_failed_has_no_times(monkeypatch):
    run = QueueRun((times(1, 0.0, 1.0), times(2, 0.0, 0.1, state=JobState.FAILED, error="out of memory")))
    monkeypatch.setattr(QueueBench, "runs", lambda self, side: [run, run])
    with Workload(QUICK) as work:
        cases = {case.name: case for case in queues(work)}
    case = cases["jobs/queues/gnnsys/Mix, published order, makespan beside streams"]
    streams = case.sides()["streams"]
    assert streams.foreign
    with pytest.raises(RuntimeError, match="1 of 2 jobs failed, the first with: out of memory"):
        streams.call()
    lmcf = cases["jobs/queues/gnnsys/Mix, published order, makespan beside lmcf"].sides()["lmcf"]
    assert not lmcf.foreign
    counted = cases["jobs/queues/gnnsys/Mix, published order, runs out of memory beside streams"].sides()["streams"]
    assert counted.call() == 1.0


@pytest.mark.long
def test_a_sweep_has_the_results_of_jobs_alone():
    with Workload(QUICK) as work:
        bench = SweepBench(work)
        assert bench.different() == 0.0
        assert len(bench.run(OURS).times) == 3 and bench.run(OURS).makespan > 0


def test_the_second_run_of_ours_is_a_side_of_its_own():
    with Workload(QUICK) as work:
        peers = {name for case in queues(work) for versus in case.versus for name in versus.peers}
    assert AGAIN in peers
