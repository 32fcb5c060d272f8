"""What is set aside for a job, who estimates it and when, and what a job is that nobody can estimate or call."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from gnnsys.jobs import JobState, Queue, SpecEstimate, worker_process
from gnnsys.jobs.job_history import ENOUGH_JOBS, MOST_FACTOR, JobHistory
from gnnsys.jobs.job_memory import FIRST_FACTOR, estimate_spec
from gnnsys.jobs.policies import Room
from gnnsys.jobs.waiting_list import list_waiting
from tests.jobs.queue_jobs import FOLDER, NAME
from tests.jobs.queue_services import DEADLINE, expected, run_until, serve_nothing, service, submit
from tests.support.processes import alive, await_true

KINDS = ({"kind": "whole", "hidden": 4}, {"kind": "loader", "epochs": 2}, {"kind": "torch"})


def test_the_safety_factor_is_a_percentile_once_enough_jobs_were_measured(queue: Queue):
    from dataclasses import replace

    number = submit(queue, "linear")
    job = replace(queue.show(number), state=JobState.DONE, estimate="traced", estimated=100 << 20, device="cpu")
    ended = [replace(job, measured=(100 + each) << 20) for each in range(ENOUGH_JOBS)]
    assert JobHistory("cpu", ended[:-1]).factor == FIRST_FACTOR and JobHistory("cpu", ended).factor == 1.19
    small = [replace(each, estimated=1 << 10) for each in ended]
    assert JobHistory("cpu", small).factor == FIRST_FACTOR, "what libraries take hides what these take"
    assert JobHistory("cpu", [replace(each, measured=1 << 20) for each in ended]).factor == 1.0
    far = replace(job, measured=900 << 20)
    assert JobHistory("cpu", [*ended, far]).factor == MOST_FACTOR, "one that is far off is no reason to refuse others"
    assert JobHistory("cpu", [*ended, replace(far, is_alone=True)]).factor == 1.19


def test_what_fits_without_its_margin_runs_alone_and_what_does_not_is_too_large(queue: Queue):
    from dataclasses import replace

    job = replace(queue.show(submit(queue, "linear")), estimate="traced", estimated=95)
    waiting, refused = list_waiting([job], JobHistory("cpu"), Room(capacity=100, workers=2))
    assert waiting[job.number].is_alone and waiting[job.number].memory == 100 and not refused
    like = replace(job, state=JobState.DONE, estimate="unknown", estimated=None, measured=95, device="cpu")
    waiting, refused = list_waiting(
        [replace(job, estimated=None, estimate="unknown")], JobHistory("cpu", [like]), Room(capacity=100, workers=2)
    )
    assert waiting[job.number].is_alone and not refused
    assert list_waiting([replace(job, estimated=101)], JobHistory("cpu"), Room(capacity=100, workers=2))[1] == {
        job.number: 117
    }


def test_a_job_that_must_be_alone_lets_those_go_first_that_came_before_it_and_are_being_estimated(queue: Queue):
    from dataclasses import replace

    first, second, third = (queue.show(submit(queue, "linear")) for _ in range(3))
    unknown, known = replace(second, estimate="unknown", estimated=None), {"estimate": "traced", "estimated": 10}
    queued = [replace(first, estimate=""), unknown, replace(third, estimate="")]

    def could_start() -> list[int]:
        return list(list_waiting(queued, JobHistory("cpu"), Room(capacity=100, workers=2))[0])

    assert could_start() == []
    queued[0] = replace(first, **known)
    assert could_start() == [first.number, second.number]


def test_a_function_that_hangs_while_it_is_estimated_holds_up_nobody_once_it_is_cancelled(queue: Queue, tmp_path: Path):
    hangs = submit(queue, "is_never_made", {"at": str(tmp_path / "begun")}, estimate=False)
    good = submit(queue, "job", dict(KINDS[0]), estimate=False)
    with service(queue.folder.path) as running:
        run_until(running, (tmp_path / "begun").exists)
        queue.cancel([hangs])
        run_until(running, lambda: queue.show(good).state.is_over)
    assert queue.show(hangs).state is JobState.CANCELLED and queue.show(good).result == expected(dict(KINDS[0]))


def test_jobs_that_differ_in_their_seed_alone_are_estimated_once(queue: Queue, tmp_path: Path):
    from gnnsys.jobs.job_estimator import JobEstimator

    noted = tmp_path / "calls"
    numbers = queue.sweep(
        f"{NAME}:notes_calls", {"other": [1, 2]}, 3, arguments={"at": str(noted)}, folder=FOLDER, estimate=False
    )
    with service(queue.folder.path) as running:
        estimator: JobEstimator = running._estimator
        run_until(running, lambda: all(queue.show(number).estimate for number in numbers))
        assert estimator.pool.count <= estimator._most
        ended = running.run_until_empty(DEADLINE)
    calls = noted.read_text().splitlines()
    assert len(calls) == 2 + 6, "two estimates and six runs"
    assert len({job.memory for job in ended}) == 1 and all(job.state is JobState.DONE for job in ended)


def test_a_submitted_sweep_is_estimated_once_per_setting(queue: Queue, forked_workers, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(FOLDER)
    serve_nothing(queue)
    noted = tmp_path / "calls"
    numbers = queue.sweep(f"{NAME}:notes_calls", {"other": [1, 2]}, 3, arguments={"at": str(noted)})
    assert noted.read_text() == "0 1\n0 2\n"
    assert [job.estimate for job in queue.list(sweep=numbers[0])] == ["traced"] * 6
    monkeypatch.setattr("gnnsys.jobs.queue._ESTIMATE_SECONDS", -1.0)
    late = queue.sweep(f"{NAME}:notes_calls", {"other": [1, 2]}, arguments={"at": str(noted)})
    assert [job.estimate for job in queue.list(sweep=late[0])] == ["", ""], "the service does it"


def test_what_no_process_could_call_fails_without_having_run_and_others_go_on(queue: Queue):
    wrong = {
        submit(queue, "job", {"hiden": 8}): "tests.jobs.queue_jobs:job has no argument 'hiden': did you mean 'hidden'?",
        submit(queue, "rows"): "tests.jobs.queue_jobs:rows needs the argument 'num_rows'",
        submit(queue, "jbo"): "module 'tests.jobs.queue_jobs' has no function 'jbo': did you mean 'job'?",
    }
    good = submit(queue, "linear")
    with service(queue.folder.path, workers=1) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert ended[good].state is JobState.DONE
    for number, said in wrong.items():
        assert (ended[number].state, ended[number].attempts) == (JobState.FAILED, 0) and said in ended[number].error


def test_a_function_that_ends_its_process_is_said_to_when_it_is_estimated_and_when_it_runs(queue: Queue, logged):
    number = submit(queue, "ends_process", {"code": 5})
    good = submit(queue, "linear")
    with service(queue.folder.path) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    said = f"job {number} runs alone, its memory was not to be estimated: it ended its process with exit code 5"
    assert logged.count(said) == 1
    assert ended[number].state is JobState.FAILED and ended[good].state is JobState.DONE
    assert ended[number].error == "its process died 3 times, the last time with exit code 5: see gnnsys jobs logs"


def test_several_are_estimated_at_once_each_once_and_one_that_goes_wrong_disturbs_no_other(
    queue: Queue, tmp_path: Path, logged: list[str]
):
    sizes = {submit(queue, "meets", {"at": str(tmp_path), "number": n, "count": 3, "num_rows": 1000 * n}): n
             for n in (1, 2, 3)}  # fmt: skip
    hangs = submit(queue, "is_never_made", {"at": str(tmp_path / "begun")})
    ends = submit(queue, "ends_process")
    noted = [submit(queue, "notes_calls", {"at": str(tmp_path / "calls"), "other": n}) for n in range(5)]
    alone = {number: estimate_spec(queue.show(number).spec, "cpu").num_bytes for number in noted}
    (tmp_path / "calls").unlink()
    known = [*sizes, ends, *noted]
    with service(queue.folder.path, policy=lambda waiting, running, room, now: []) as running:
        running._estimator._most = 4  # as on a machine with many cores
        run_until(running, lambda: all(queue.show(number).estimate for number in known))
        run_until(running, (tmp_path / "begun").exists)
        assert not queue.show(hangs).estimate and len(running._estimator.pool.everyone()) <= 4
        queue.cancel(hangs)
        run_until(running, lambda: not running._estimator._under_way)
    assert sorted((tmp_path / "calls").read_text().split()[1::2]) == [str(n) for n in range(5)], "each of them once"
    assert {number: queue.show(number).estimated for number in noted} == alone
    found = [queue.show(number).estimated or 0 for number in sizes]
    assert 0 < found[0] < found[1] < found[2], "no two were taken for each other"
    assert queue.show(ends).estimate == "unknown" and len(logged) == 1


def test_a_job_whose_folder_is_gone_is_said_to_when_it_is_estimated(queue: Queue, tmp_path: Path, logged: list[str]):
    folder = tmp_path / "gone"
    folder.mkdir()
    number = queue.submit(f"{NAME}:linear", folder=folder)
    folder.rmdir()
    with service(queue.folder.path) as running:
        (ended,) = running.run_until_empty(DEADLINE)
    assert ended.state is JobState.FAILED and f"No such file or directory: '{folder}'" in ended.error
    assert len(logged) == 1 and logged[0].startswith(f"job {number} runs alone") and str(folder) in logged[0]


def estimating(queue: Queue) -> int:
    """The process that estimates what is submitted to it."""
    worker = queue._estimator._worker
    assert worker is not None and alive(worker.pid)
    return worker.pid


def test_the_process_that_estimates_ends_with_its_queue_whoever_forgets_to_close_it(queue: Queue, forked_workers):
    serve_nothing(queue)
    other = Queue(queue.folder.path)
    assert other.show(submit(other, "linear")).estimate == "traced"
    pid = estimating(other)
    del other
    gc.collect()
    await_true(lambda: not alive(pid), "the end of a process that nobody asks any more")


def test_a_queue_that_is_closed_in_a_forked_process_is_open_in_the_first(queue: Queue, forked_workers):
    serve_nothing(queue)
    submit(queue, "linear")
    pid = estimating(queue)
    child = os.fork()
    if child == 0:
        try:
            queue._estimator.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert queue.show(submit(queue, "linear", {"num_rows": 9})).estimate == "traced" and estimating(queue) == pid


def test_what_cannot_be_estimated_here_is_submitted_and_left_to_the_service(
    queue: Queue, logged: list[str], monkeypatch: pytest.MonkeyPatch
):
    serve_nothing(queue)
    monkeypatch.setattr(worker_process.sys, "executable", "/bin/false")
    number = submit(queue, "linear")
    assert (queue.show(number).estimate, queue.show(number).state) == ("", JobState.QUEUED)
    (said,) = logged
    assert said.endswith("is left to the service to estimate: the process that estimates jobs ended with exit code 1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_bytes": "1G", "how": "traced"}, "must be numbers of bytes, got '1G'"),
        ({"num_bytes": -3, "how": "traced"}, "must be numbers of bytes, got -3"),
        ({"num_bytes": 3, "how": "traced", "graphs": {"a": "b"}}, "must be numbers of bytes, got 'b'"),
        ({"num_bytes": 3}, "only what is traced or stated has num_bytes, got 3 and ''"),
        ({"how": "traced"}, "only what is traced or stated has num_bytes, got None and 'traced'"),
        ({"num_bytes": 3, "how": "guessed"}, "how must be traced, stated, unknown or empty, got 'guessed'"),
    ],
)
def test_an_estimate_that_says_nothing_of_use_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        SpecEstimate(**given)


def test_who_brings_an_estimate_is_told_what_is_too_large(queue: Queue):
    serve_nothing(queue, capacity=4 << 30)
    with pytest.raises(ValueError, match=r"takes .* and the queue's capacity is 4.0 GiB"):
        submit(queue, "linear", estimate=SpecEstimate(num_bytes=4 << 30, how="traced"))
    with pytest.raises(ValueError, match="whose memory is not stated: leave out estimate="):
        submit(queue, "linear", memory="1G", estimate=SpecEstimate(num_bytes=1 << 30, how="traced"))
    with pytest.raises(ValueError, match="estimate must be True or False"):
        submit(queue, "linear", estimate={"num_bytes": 1 << 30})
    number = submit(queue, "linear", estimate=SpecEstimate(num_bytes=1 << 30, how="traced"))
    assert (queue.show(number).estimated, queue.show(number).estimate) == (1 << 30, "traced")
