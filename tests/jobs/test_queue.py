"""A queue without a service: what is kept, in which order, and what is refused with which words."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.jobs import JobService, JobState, Queue, QueueDiskFull, make_spec
from gnnsys.jobs.job_record import SpecEstimate
from gnnsys.jobs.process_identity import ProcessIdentity
from gnnsys.jobs.queue_database import VERSION, QueueDatabase
from tests.jobs.queue_jobs import FOLDER, NAME
from tests.jobs.queue_services import serve_nothing
from tests.support.limits import files_up_to
from tests.support.processes import alive, await_true

JOB = f"{NAME}:job"
THIS = ProcessIdentity.of(os.getpid())


def test_a_sweep_is_every_combination_with_every_seed(queue: Queue):
    numbers = queue.sweep(JOB, {"lr": [0.1, 0.01], "hidden": [4, 8]}, seeds=3, arguments={"epochs": 2})
    jobs = queue.list(sweep=numbers[0])
    assert numbers == list(range(1, 13)) == [job.number for job in jobs]
    assert [(job.spec.arguments["lr"], job.spec.arguments["hidden"], job.spec.seed) for job in jobs[:4]] == [
        (0.1, 4, 0), (0.1, 4, 1), (0.1, 4, 2), (0.1, 8, 0),
    ]  # fmt: skip
    assert all(job.spec.arguments["epochs"] == 2 and job.state is JobState.QUEUED for job in jobs)


def test_a_sweep_of_a_script_is_words(queue: Queue, tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    numbers = queue.sweep(str(script), {"lr": [0.1], "hidden": [4, 8]}, seeds=2, words=["data"])
    assert queue.show(numbers[2]).spec.words == ("data", "--lr", "0.1", "--hidden", "8", "--seed", "0")


def test_what_was_submitted_with_a_key_is_not_submitted_again(queue: Queue):
    first = queue.sweep(JOB, {"lr": [0.1, 0.01]}, key="night")
    assert queue.sweep(JOB, {"lr": [0.1, 0.01]}, key="night") == first
    assert queue.submit(JOB, key="one") == queue.submit(JOB, key="one") == 3 and len(queue.list()) == 3


def test_the_folder_is_its_owners_alone(queue: Queue, tmp_path: Path):
    assert queue.folder.path.stat().st_mode & 0o777 == 0o700
    queue.folder.path.chmod(0o750)
    with pytest.raises(ValueError, match=r"open to other users.*chmod 700"):
        Queue(queue.folder.path)
    other = tmp_path / "other"
    other.mkdir(mode=0o755)
    (other / "file").touch()
    with pytest.raises(ValueError, match=r"open to other users.*name another, or one that is not there"):
        Queue(other)  # what is in it is no queue: its mode is right for what it is


def test_a_job_ends_once_and_a_late_attempt_changes_nothing(tmp_path: Path):
    database = QueueDatabase(tmp_path / "queue.db")
    (number,) = database.add([make_spec(JOB, folder=FOLDER)], [SpecEstimate()], False, None)
    assert THIS is not None
    assert database.start(number, THIS, 1) == 1 and database.start(number, THIS, 1) is None
    assert database.requeue(number, 1) and database.start(number, THIS, 1) == 2
    assert not database.finish(number, 1, JobState.DONE) and database.get(number).state is JobState.RUNNING
    assert database.finish(number, 2, JobState.DONE, result={"loss": 1.0})
    assert not database.finish(number, 2, JobState.FAILED) and not database.requeue(number, 2)
    database.cancel([number])
    assert database.get(number).state is JobState.DONE and database.endings() == {number: (2, "done")}
    assert database.get(number).result == {"loss": 1.0}


def test_a_job_that_waits_is_cancelled_at_once_and_never_starts(queue: Queue):
    number = queue.submit(JOB)
    assert queue.cancel(number) == [JobState.CANCELLED] and THIS is not None
    assert queue._database.start(number, THIS, 1) is None


def test_many_jobs_are_cancelled_by_one_write(queue: Queue):
    numbers = queue.sweep(JOB, {"lr": list(range(500))})
    assert THIS is not None and queue._database.start(numbers[7], THIS, 1) == 1
    statements: list[str] = []
    queue._database._db.set_trace_callback(statements.append)
    states = queue.cancel(numbers[::-1])
    assert [statement for statement in statements if statement == "COMMIT"] == ["COMMIT"]
    assert states.count(JobState.CANCELLED) == 499 and states[-8] is JobState.RUNNING
    assert queue._database.endings() == {number: (0, "cancelled") for number in numbers if number != numbers[7]}
    assert queue.show(numbers[7]).is_cancelling and queue.cancel(numbers) == states[::-1]
    assert queue._database.finish(numbers[7], 1, JobState.CANCELLED) and len(queue._database.endings()) == 500


def test_of_jobs_that_are_cancelled_together_all_are_or_none(queue: Queue):
    numbers = queue.sweep(JOB, {"lr": list(range(200))})
    with pytest.raises(ValueError, match="there is no job 777 in"):
        queue.cancel([*numbers, 777])
    size = max(path.stat().st_size for path in queue.folder.path.iterdir() if path.is_file())
    with files_up_to(size + 4096), pytest.raises(QueueDiskFull):
        queue.cancel(numbers)
    assert {job.state for job in queue.list()} == {JobState.QUEUED} and not queue._database.endings()
    assert not any(job.is_cancelling for job in queue.list())
    assert set(queue.cancel(numbers)) == {JobState.CANCELLED}


def test_a_sweep_is_cancelled_by_the_number_it_began_with(queue: Queue, capsys):
    other, *numbers = [queue.submit(JOB), *queue.sweep(JOB, {"lr": [1, 2]})]
    assert main(["jobs", "cancel", "--queue", str(queue.folder.path), "--sweep", str(numbers[0])]) == 0
    assert capsys.readouterr().out == "".join(f"job {number}: cancelled\n" for number in numbers)
    assert queue.show(other).state is JobState.QUEUED


def test_a_full_disk_leaves_the_queue_whole(queue: Queue):
    before = queue.sweep(JOB, {"lr": [0.1, 0.01]})
    size = max(path.stat().st_size for path in queue.folder.path.iterdir() if path.is_file())
    with (
        files_up_to(size + 4096),
        pytest.raises(QueueDiskFull, match=r"free some room on its disk. The queue is whole"),
    ):
        for _ in range(100):
            queue.sweep(JOB, {"lr": list(range(100))}, key="large")
            raise AssertionError("there was room")
    assert [job.number for job in queue.list()] == before
    assert len(queue.sweep(JOB, {"lr": list(range(100))}, key="large")) == 100
    with sqlite3.connect(queue.folder.database) as other:
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_queue_of_a_newer_version_is_refused(queue: Queue):
    with sqlite3.connect(queue.folder.database) as other:
        other.execute(f"PRAGMA user_version={VERSION + 1}")
    with pytest.raises(ValueError, match=f"version {VERSION + 1}.*knows up to {VERSION}: upgrade gnnsys"):
        Queue(queue.folder.path)


def test_a_database_that_is_no_queue_is_refused(tmp_path: Path):
    tmp_path.chmod(0o700)
    with sqlite3.connect(tmp_path / "queue.db") as other:
        other.execute("CREATE TABLE mine (x)")
    with pytest.raises(ValueError, match="is not a queue of gnnsys: name another folder"):
        Queue(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit", "nonsense.py"], "there is no script"),
        (["submit", "nonsense"], "a function is MODULE:FUNCTION, such as train:job"),
        (["submit", JOB, "--args", "{hidden}"], "--args must be JSON"),
        (["submit", JOB, "--args", '{"lr": NaN}'], "argument lr is nan, which JSON has no number for"),
        (["submit", JOB, "--args", "[" * 30_000], "--args must be JSON"),
        (["wait", "--timeout", "nan"], "timeout must be a number of seconds, got nan"),
        (["submit", JOB, "--memory", "much"], "a size must look like 4G"),
        (["submit", JOB, "--env", "X"], "--env takes NAME=VALUE"),
        (["submit", JOB, "--dir", "/nowhere"], "there is no folder /nowhere to run the job in"),
        (["submit", JOB, "word"], "is a function, which has arguments by name"),
        (["submit", JOB, "--memory", "6"], "--memory 6 is 6 bytes: write its unit, such as 6G"),
        (["serve", "--capacity", "26"], "--capacity 26 is 26 bytes: write its unit, such as 26G"),
        (["sweep", JOB, "--grid", "lr"], "a grid is NAME=VALUE,VALUE such as lr=.1,.01"),
        (["sweep", JOB, "--grid", "lr=1", "--seeds", "0"], "seeds must be a whole number, at least 1"),
        (["submit", JOB, "--seed", "9" * 30], "seed must be a whole number from 0 to 2**63 - 1"),
        (["sweep", JOB, "--grid", "lr=1,2", "--seeds", "100000000"], "at most 100,000 jobs, this one has 200,000,000"),
        (["show", "9" * 30], "there is no job 999"),
        (["show", "77"], "there is no job 77 in"),
        (["cancel", "77"], "gnnsys jobs list shows those there are"),
        (["cancel"], "give the numbers of jobs, or --sweep"),
        (["cancel", "--sweep", "77"], "no sweep began with job 77"),
        (["list", "--state", "odd"], "a state is one of queued, running"),
        (["serve", "--capacity", "900000G"], "the capacity must be at most"),
        (["serve", "--device", "tpu"], "device must be cpu or cuda"),
        (["serve", "--sharing", "mps"], "--sharing mps is for a GPU: add --device cuda"),
        (["serve", "--workers", "0"], "workers must be a whole number, at least 1"),
        (["serve", "--sharing", "odd"], "sharing must be 'mps', 'slices' or 'auto', got 'odd'"),
        (["serve", "--policy", "odd"], "there is no policy 'odd'; choose one of"),
    ],
)
def test_bad_use_is_one_line_that_names_the_remedy(arguments: list[str], said: str, queue: Queue, capsys):
    action, *rest = arguments
    assert main(["jobs", action, "--queue", str(queue.folder.path), *rest]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_words_of_a_script_stand_behind_options(queue: Queue, tmp_path: Path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    line = [str(script), "--queue", str(queue.folder.path), "--memory", "6G"]
    assert main(["jobs", "submit", *line, "--", "--lr", "0.1", "--", "more"]) == 0
    assert queue.show(1).spec.words == ("--lr", "0.1", "--", "more") and queue.show(1).spec.memory == 6 << 30
    assert main(["jobs", "sweep", *line, "--grid", "hidden=4", "--", "data"]) == 0
    assert queue.show(2).spec.words == ("data", "--hidden", "4")
    assert capsys.readouterr().out.splitlines()[-1] == f"job 2 of {queue.folder.path}"
    for target, said in ((str(script), "words of a script stand behind --"), (JOB, "--args '{")):
        with pytest.raises(SystemExit):
            main(["jobs", "submit", target, *line[1:], "--lr", "0.1"])
        assert said in capsys.readouterr().err


def test_what_no_process_could_call_is_refused_where_a_service_has_run(queue: Queue, forked_workers, monkeypatch):
    monkeypatch.chdir(FOLDER)
    serve_nothing(queue)
    with pytest.raises(ValueError, match="has no argument 'hiden': did you mean 'hidden'"):
        queue.submit(JOB, {"hiden": 8})
    with pytest.raises(ValueError, match="has no function 'jbo'"):
        queue.submit(f"{NAME}:jbo")
    with pytest.raises(ValueError, match="has no function 'jbo'"):
        queue.submit(f"{NAME}:jbo", folder=FOLDER, environment={"PYTHONPATH": "/elsewhere"})
    assert not queue.list()


def test_a_function_that_ends_its_process_by_sys_exit_ends_not_who_submits_it(
    queue: Queue, forked_workers, monkeypatch
):
    monkeypatch.chdir(FOLDER)
    serve_nothing(queue)
    assert queue.show(queue.submit(f"{NAME}:exits")).estimate == "unknown"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_function_that_ends_its_process_at_once_is_submitted_and_said_to_in_one_line(
    queue: Queue, forked_workers, tmp_path: Path, logged, leaves: bool
):
    serve_nothing(queue)
    given = {"at": str(tmp_path / "left")} if leaves else {"code": 0}
    number = queue.submit(f"{NAME}:ends_process", given, folder=FOLDER)
    assert queue.show(number).estimate == "unknown"
    why = f"it ended its process with exit code {3 if leaves else 0}"
    assert logged == [f"{NAME}:ends_process will run alone, its memory was not to be estimated: {why}"]
    assert queue.show(queue.submit(f"{NAME}:linear", folder=FOLDER)).estimate == "traced", "another process does it"
    if leaves:
        await_true(lambda: not alive(int((tmp_path / "left").read_text())), "the end of what it has started")


def test_a_function_that_leaves_a_thread_or_takes_for_ever_holds_up_no_later_estimate(
    queue: Queue, forked_workers, tmp_path: Path, monkeypatch, logged
):
    serve_nothing(queue)
    queue.submit(f"{NAME}:leaves_thread", folder=FOLDER)
    queue.submit(f"{NAME}:linear", folder=FOLDER)
    monkeypatch.setattr("gnnsys.jobs.submit_estimator.ESTIMATE_SECONDS", 0.0)
    queue.submit(f"{NAME}:is_never_made", {"at": str(tmp_path / "begun")}, folder=FOLDER)
    monkeypatch.undo()
    queue.submit(f"{NAME}:linear", folder=FOLDER)
    assert [job.estimate for job in queue.list()] == ["traced", "traced", "unknown", "traced"]
    assert "that takes longer than 0 s" in logged[-1]


def test_a_queue_that_is_not_there_is_named(tmp_path: Path, capsys):
    assert main(["jobs", "list", "--queue", str(tmp_path / "none")]) == 2
    assert "there is no queue" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_arguments_that_are_not_json_are_refused(queue: Queue):
    with pytest.raises(ValueError, match="argument lr is a set: a job's arguments are JSON"):
        queue.submit(JOB, {"lr": {1}})


def test_two_services_on_one_folder_are_refused(queue: Queue):
    one, two = (JobService(queue.folder.path, shares_graphs=False, is_warm=False) for _ in range(2))
    said = r"has a service already \(process .*\): end that one, or give"
    with one, pytest.raises(ValueError, match=said):
        two.start()
    with JobService(queue.folder.path, shares_graphs=False, is_warm=False):
        pass  # the first has gone


def test_a_job_too_large_is_refused_when_submitted_with_the_batch_size_that_fits(
    queue: Queue, forked_workers, monkeypatch
):
    monkeypatch.chdir(FOLDER)
    serve_nothing(queue, capacity=200_000)
    given = {"num_rows": 100_000, "batch_size": 50_000}
    with pytest.raises(ValueError, match=r"capacity is 195.3 KiB: batch_size=(\d+) fits, 50000 does not") as refused:
        queue.submit(f"{NAME}:rows", given)
    fits = int(str(refused.value).split("batch_size=")[1].split()[0])
    queue.submit(f"{NAME}:rows", {**given, "batch_size": fits})
    with pytest.raises(ValueError, match=r"state less --memory, or serve with a larger --capacity"):
        queue.submit(JOB, memory="1G")
    assert len(queue.list()) == 1 and queue.show(1).estimate == "traced"


def test_lists_are_tables_and_json(queue: Queue, capsys):
    queue.sweep(JOB, {"lr": [0.1, 0.01]})
    folder = ["--queue", str(queue.folder.path)]
    assert main(["jobs", "list", *folder, "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "job  state   lr    seed  seconds",
        "1    queued  0.1   0",
    ]
    assert main(["jobs", "list", *folder, "--json"]) == 0
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [1, 2]
    assert main(["jobs", "cancel", "1", *folder]) == 0 and "job 1: cancelled" in capsys.readouterr().out
    assert main(["jobs", "show", "1", *folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"


def test_a_job_is_shown_in_lines_of_which_none_is_empty(queue: Queue, capsys):
    number = queue.submit(JOB, {"lr": 0.1}, seed=7, environment={"A": "b"}, checkpoint_steps=2)
    assert THIS is not None and queue._database.start(number, THIS, 3 << 20) == 1
    assert main(["jobs", "show", str(number), "--queue", str(queue.folder.path)]) == 0
    running = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (running["state"], running["arguments"], running["seed"]) == ("running", '{"lr": 0.1}', "7")
    assert (running["checkpoints"], running["memory"]) == ("every 2 steps", "3.0 MiB set aside")
    assert running["process"] == str(THIS.pid) and "A=b" in running["environment"]
    assert float(running["seconds"]) >= 0, "so far"
    queue._database.finish(number, 1, JobState.DONE, measured=2 << 20, result={"loss": 0.25, "odd": "a\x1b\nb"})
    assert main(["jobs", "show", str(number), "--queue", str(queue.folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
    shown = {" ".join(line.split()) for line in lines}
    assert {"state done", "result loss 0.25", "result odd a? b", "memory 3.0 MiB set aside, 2.0 MiB measured"} <= shown
    assert not any(line.startswith(("process", "error")) for line in lines)


def test_a_table_of_odd_results_has_a_line_per_job_and_narrow_columns(queue: Queue, capsys):
    number = queue.submit(JOB, {"text": "two\nlines\tand \x1b[31m", "wide": "x" * 1000})
    assert THIS is not None and queue._database.start(number, THIS, 1) == 1
    queue._database.finish(number, 1, JobState.DONE, result={"half": "\ud800", "long": list(range(1000))})
    for option in ("--table", "--state=done"):
        assert main(["jobs", "list", "--queue", str(queue.folder.path), option]) == 0
        lines = capsys.readouterr().out.encode().decode().splitlines()
        assert len(lines) == 2 and "\x1b" not in lines[1] and len(lines[1]) < 400


def test_a_result_of_a_script_that_is_no_number_is_text(tmp_path: Path):
    from gnnsys.jobs.script_process import read_result

    (tmp_path / "result.json").write_text('{"loss": NaN, "bound": -Infinity}')
    assert read_result(tmp_path / "result.json") == ({"loss": "NaN", "bound": "-Infinity"}, "")
    (tmp_path / "result.json").write_text("[" * 100_000)
    assert "is not JSON" in read_result(tmp_path / "result.json")[1]


def test_who_lists_jobs_or_keeps_a_script_does_not_wait_for_torch(queue: Queue):
    queue.submit(JOB, estimate=False)
    code = "; ".join(
        [
            "import sys",
            "import gnnsys.jobs.run_script",
            "from gnnsys.cli import main",
            "sys.argv[1:] and main(['jobs', 'list', '--queue', sys.argv[1]]) == 0 or sys.exit(2)",
            "sys.exit('torch' in sys.modules)",
        ]
    )
    shown = subprocess.run([sys.executable, "-c", code, str(queue.folder.path)], capture_output=True, text=True)
    assert shown.returncode == 0 and "queued" in shown.stdout, shown


def test_who_waits_is_told_for_how_many_jobs_and_who_runs_them(queue: Queue, capsys):
    queue.submit(JOB, estimate=False)
    line = ["jobs", "wait", "--queue", str(queue.folder.path), "--timeout", "0"]
    assert main(line) == 2
    assert "waiting for 1 job: gnnsys jobs serve runs what is queued\n" in capsys.readouterr().err
    queue.cancel(1)
    assert main(line) == 1 and "waiting" not in capsys.readouterr().err
