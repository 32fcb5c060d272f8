"""What a job does to its process, and leaves behind, is neither the next job's nor the service's."""

from __future__ import annotations

from pathlib import Path

from gnnsys.jobs import JobState, Queue
from tests.jobs.queue_jobs import FOLDER, NAME
from tests.jobs.queue_services import DEADLINE, expected, run_until, service, submit
from tests.support.processes import alive, await_true

KINDS = ({"kind": "whole", "hidden": 4}, {"kind": "loader", "epochs": 2}, {"kind": "torch"})


def test_what_a_job_does_to_its_process_is_its_own(queue: Queue, tmp_path: Path):
    escaped = submit(queue, "escapes", {"at": str(tmp_path / "pid")}, memory="1M")
    failing = {
        submit(queue, "interrupts", memory="1M"): "KeyboardInterrupt: of its own",
        submit(queue, "says_odd_things", memory="1M"): "RuntimeError: half a ? character",
        submit(queue, "boasts", memory="1M"): "at most 1048576: write a file",
    }
    odd = [submit(queue, name, memory="1M") for name in ("closes_its_output", "writes_to_all_pipes")]
    after = submit(queue, "job", dict(KINDS[0]), memory="1M")
    with service(queue.folder.path, workers=1) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    for number, said in failing.items():
        assert ended[number].state is JobState.FAILED and ended[number].attempts == 1
        assert said in ended[number].error
    assert ended[escaped].state is JobState.DONE and all(ended[number].state.is_over for number in odd)
    assert ended[after].result == expected(dict(KINDS[0])) and queue.logs(after) == "hidden 4, seed 0\n"
    child = int((tmp_path / "pid").read_text())
    await_true(lambda: not alive(child), "the end of a process that left its group")


def test_a_module_in_a_folder_without_init_is_forgotten_by_the_next_job(queue: Queue, tmp_path: Path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "module.py").write_text(f"from {NAME} import linear as job\n")
    environment = {"PYTHONPATH": str(FOLDER)}
    with service(queue.folder.path, workers=1) as running:
        seen = []
        for _ in range(2):
            queue.submit("outer.inner.module:job", folder=tmp_path, environment=environment, memory="1M")
            (ended,) = running.run_until_empty(DEADLINE)
            assert ended.state is JobState.DONE
            run_until(running, lambda: len(running.pool.idle) == 1)
            seen.append(running.pool.idle[0])
    assert seen[0] is seen[1], "it was not lost"


def test_a_library_that_one_job_imports_is_there_for_the_next_and_costs_it_nothing(queue: Queue):
    numbers = [submit(queue, "imports_library", memory="1M") for _ in range(3)]
    with service(queue.folder.path, workers=1) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert [ended[number].result["looks"] for number in numbers] == [True, False, False], ended


def test_what_a_script_has_sent_into_a_session_of_its_own_ends_with_it(queue: Queue, tmp_path: Path):
    (tmp_path / "leave.py").write_text(
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():\n"
        "    time.sleep(0.01)\n"
    )
    queue.submit("leave.py", words=[str(tmp_path / "pid")], folder=tmp_path, memory="1M")
    with service(queue.folder.path) as running:
        running.run_until_empty(DEADLINE)
    child = int((tmp_path / "pid").read_text())
    await_true(lambda: not alive(child), "the end of a process that left its group")


def test_a_job_that_writes_answers_of_its_worker_harms_no_other(queue: Queue, tmp_path: Path):
    forged = submit(queue, "forges", {"at": str(tmp_path / "forged")}, memory="1M")
    after = submit(queue, "job", dict(KINDS[0]), memory="1M")
    with service(queue.folder.path, workers=1) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert (ended[forged].state, ended[forged].attempts) == (JobState.DONE, 2)
    assert ended[after].result == expected(dict(KINDS[0]))


def test_alarms_and_the_mask_of_a_job_are_not_those_of_the_next(queue: Queue):
    submit(queue, "sets_alarm", memory="1M")
    number = submit(queue, "tells_alarm", memory="1M")
    with service(queue.folder.path, workers=1) as running:
        running.run_until_empty(DEADLINE)
    result = queue.show(number).result
    assert (result["alarm"], result["handler"]) == (0.0, True) and result["mask"] != 0o777


def test_what_a_job_prints_on_a_full_disk_is_lost_and_no_job_with_it(queue: Queue):
    numbers = [submit(queue, "job", dict(KINDS[0]), memory="1M") for _ in range(2)]
    with service(queue.folder.path, workers=1) as running:
        queue.folder.log(numbers[0]).symlink_to("/dev/full")
        ended = running.run_until_empty(DEADLINE)
    assert [(job.state, job.attempts) for job in ended] == [(JobState.DONE, 1)] * 2
    assert queue.logs(numbers[1]) == "hidden 4, seed 0\n"
