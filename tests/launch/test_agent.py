"""An agent ends what it started, whoever is killed: the launcher, the agent itself, or the process that keeps the job.

Jobs are shell commands that start daemons of their own, as the worst of training scripts would.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gnnsys.launch.channel import AgentChannel, HostError, HostLost, agent_command
from gnnsys.launch.hosts import Host
from gnnsys.launch.local_facts import host_facts
from gnnsys.launch.messages import MessageReader, MessageWriter
from tests.support.processes import HANGS_AFTER, ROOT, await_true, run_code

PLAIN_AGENT = [sys.executable, str(ROOT / "tests" / "launch" / "plain_agent.py")]
DAEMON = "setsid sh -c 'trap \"\" TERM; echo $$ > {folder}/daemon; while :; do sleep 1000 & wait; done' & "
JOB = DAEMON + "echo $$ > {folder}/job; echo started; while :; do sleep 1000 & wait; done"


@pytest.fixture(autouse=True)
def package_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where its folder is
    events: queue.Queue = queue.Queue()
    channel = AgentChannel(Host(name="here"), PLAIN_AGENT, lambda _, message: events.put(message))
    channel.events = events
    yield channel
    channel.close()


def asked(channel: AgentChannel, do: str, **arguments):
    return channel.result(channel.ask(do, **arguments), HANGS_AFTER)


def start(channel: AgentChannel, folder: Path, grace: float = 0.2) -> list[int]:
    """Starts the job; pids of everything that is to end with it."""
    command = ["sh", "-c", JOB.format(folder=folder)]
    keeper = asked(channel, "start", arguments=command, env={}, grace=grace)["pid"]
    files = [folder / "daemon", folder / "job"]
    await_true(lambda: all(file.exists() and file.read_text().strip() for file in files), "the job")
    return [keeper, *(int(file.read_text()) for file in files)]


def await_end(pids: list[int], folder: Path) -> None:
    def has_ended(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
        except OSError:
            return True

    await_true(lambda: all(map(has_ended, pids)), f"the end of {pids}")
    await_true(lambda: not list(folder.glob("gnnsys-launch-*")), "the end of its folder")


def agent_pid(channel: AgentChannel) -> int:
    return asked(channel, "hello", patience=HANGS_AFTER)["pid"]


def test_a_job_ends_with_everything_it_started_when_the_launcher_lets_go(agent, tmp_path):
    pids = start(agent, tmp_path)
    agent.close(HANGS_AFTER)
    await_end(pids, tmp_path)


def test_a_killed_agent_leaves_nothing(agent, tmp_path):
    pids = start(agent, tmp_path)
    os.kill(agent_pid(agent), signal.SIGKILL)
    await_end(pids, tmp_path)


def test_a_killed_keeper_leaves_nothing_and_is_told(agent, tmp_path):
    pids = start(agent, tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    told = []
    while not told or told[-1]["event"] != "ended":
        told.append(agent.events.get(timeout=HANGS_AFTER))
    assert told[-1] == {"event": "ended", "code": 137, "failures": []}
    await_end(pids, tmp_path)


def test_a_silent_launcher_is_a_dead_one(agent, tmp_path):
    """As where its host has lost its power: the connection does not end."""
    pids = start(agent, tmp_path)
    asked(agent, "hello", patience=0.3)
    await_end(pids, tmp_path)
    assert agent.events.get(timeout=HANGS_AFTER)["text"] == "started"


# In a process of its own: an agent ends everything below its process when its job has ended.
LATE_ANSWER = """
import sys
from gnnsys.launch import agent as agents

agents.torchrun_command = lambda folder, grace, arguments: arguments
patience, said = float(sys.argv[1]), []


class Outbox:
    is_full = False

    def say(self, **message):
        said.append(message.get("id", message.get("event")))

    def say_line(self, rank, text, stream):
        said.append(text)


agent = agents.Agent(None, Outbox())


def start_late(**given):
    answer = agent._start(**given)
    agent._job._process.wait(patience)
    for reader in agent._job._readers:
        if reader.is_alive():
            reader.join(patience)
    return answer


agent._quick["start"] = start_late
agent._answer({"do": "start", "id": 7, "arguments": ["echo", "line"], "env": {}, "grace": 0.2})
agent._job.wait()
print(*said)
"""


def test_no_line_of_a_job_stands_before_the_answer_to_its_start(tmp_path):
    """Lines wait where nobody reads them, and an answer behind them would never come."""
    ended = run_code(LATE_ANSWER, HANGS_AFTER, environment={"TMPDIR": str(tmp_path)})
    assert ended.stdout == "7 line ended\n", ended


LAUNCHER = """
import subprocess, sys, time
from gnnsys.launch.channel import AgentChannel
from gnnsys.launch.hosts import Host
channel = AgentChannel(Host(name="here"), sys.argv[3:], lambda *_: None)
command = ["sh", "-c", sys.argv[1]]
print(channel.result(channel.ask("start", arguments=command, env={}, grace=0.2), 100)["pid"], flush=True)
time.sleep(1000)
"""


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", LAUNCHER, JOB.format(folder=tmp_path), str(tmp_path), *PLAIN_AGENT]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline())]
        files = [tmp_path / "daemon", tmp_path / "job"]
        await_true(lambda: all(file.exists() and file.read_text().strip() for file in files), "the job")
        launcher.kill()
    await_end([*pids, *(int(file.read_text()) for file in files)], tmp_path)


def test_what_a_job_left_that_ended_with_its_host_is_removed_by_the_next(agent, tmp_path):
    """As after a loss of power. The folder of a job that runs stays."""
    for name in ("stale", "used"):
        (tmp_path / f"gnnsys-launch-{name}").mkdir()
        (tmp_path / f"gnnsys-launch-{name}" / "lock").touch()
    with open(tmp_path / "gnnsys-launch-used" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start(agent, tmp_path)
        names = {folder.name for folder in tmp_path.glob("gnnsys-launch-*")}
    assert len(names) == 2 and "gnnsys-launch-used" in names and "gnnsys-launch-stale" not in names


def test_a_command_ends_with_its_own_code_and_its_leftovers(agent, tmp_path):
    (tmp_path / "x").mkdir()
    asked(agent, "start", arguments=["sh", "-c", "echo one; echo two >&2; exit 7"], env={}, grace=0.2)
    told = [agent.events.get(timeout=HANGS_AFTER) for _ in range(3)]
    lines = sorted((each["text"], each["stream"], each["rank"]) for each in told[:2])
    assert lines == [("one", "out", None), ("two", "err", None)]
    assert told[2] == {"event": "ended", "code": 7, "failures": []}


@pytest.mark.parametrize("report", ["", "{", '[{"rank": 0}]', "7", "\\377"])
def test_a_report_that_a_script_has_spoilt_is_none_and_the_end_is_told(agent, tmp_path, report):
    command = f"printf '{report}' > $(echo {tmp_path}/gnnsys-launch-*)/failures.json"
    asked(agent, "start", arguments=["sh", "-c", command], env={}, grace=0.2)
    assert agent.events.get(timeout=HANGS_AFTER) == {"event": "ended", "code": 0, "failures": []}
    assert not list(tmp_path.glob("gnnsys-launch-*"))


def test_a_launcher_that_waits_long_is_not_silent_and_an_agent_that_stops_is(tmp_path):
    channel = AgentChannel(Host(name="here"), PLAIN_AGENT, lambda *_: None, lost_after=2.0)
    with contextlib.closing(channel):
        pid = asked(channel, "hello", patience=2.0)["pid"]
        assert not channel._closing.wait(2.5)  # longer than its patience
        assert agent_pid(channel) == pid  # it was told meanwhile that the launcher lives
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(HostLost, match=r"here: it has been silent for \d+ s"):
            channel.result(channel.ask("ping"), HANGS_AFTER)
        os.kill(pid, signal.SIGKILL)


def test_what_a_login_shell_prints_first_is_passed_over(tmp_path):
    noisy = ["sh", "-c", f"echo Welcome; echo '{{}}'; exec {' '.join(PLAIN_AGENT)}"]
    channel = AgentChannel(Host(name="here"), noisy, lambda *_: None)
    try:
        assert asked(channel, "hello", patience=60)["pid"] > 0
    finally:
        channel.close()


def test_what_an_agent_does_not_know_and_what_fails_there_are_errors_that_name_the_host(agent):
    with pytest.raises(HostError, match="here: this agent does not know 'dance'"):
        asked(agent, "dance")
    with pytest.raises(HostError, match=r"here: ValueError: /nowhere has no manifest\.json"):
        asked(agent, "check_parts", path="/nowhere", parts=[0], verify=True)
    assert asked(agent, "ping")["time"] > 0


def test_a_job_that_is_asked_to_end_has_its_time_of_grace(agent, tmp_path):
    ends = f"echo asked; while [ ! -e {tmp_path}/may_end ]; do sleep 0.02; done; exit 5"
    command = f"trap '{ends}' TERM; echo started; while :; do sleep 1000 & wait; done"
    asked(agent, "start", arguments=["sh", "-c", command], env={}, grace=HANGS_AFTER)
    assert agent.events.get(timeout=HANGS_AFTER)["text"] == "started"
    asked(agent, "stop")
    assert agent.events.get(timeout=HANGS_AFTER).get("text") == "asked"
    (tmp_path / "may_end").touch()
    assert agent.events.get(timeout=HANGS_AFTER) == {"event": "ended", "code": 5, "failures": []}


def test_a_letter_that_comes_in_two_pieces_is_one(agent):
    """Of two bytes each, at odd places: pieces have an even number of bytes."""
    program = r"import os; os.write(1, b'a' + b'\xc3\xa4' * 50000)"
    asked(agent, "start", arguments=[sys.executable, "-I", "-S", "-c", program], env={}, grace=0.2)
    assert agent.events.get(timeout=HANGS_AFTER)["text"] == "a" + "\u00e4" * 50000


def test_an_argument_that_can_be_no_path_is_no_parts(agent):
    assert asked(agent, "find_parts", paths=["x" * 300, "y" * 5000, "a\0b"]) == {}
    assert asked(agent, "newest_checkpoint", path="x" * 300) is None


def test_an_agent_that_cannot_start_is_told_in_one_line():
    for command, why in (
        (["sh", "-c", "echo Permission denied >&2; exit 255"], "cannot be reached: Permission denied"),
        ([sys.executable, "-c", "import gnnsys.launch.nothing"], "there is no gnnsys for"),
        (["sh", "-c", "exec /no/such/python -m x"], "set python for this host"),
    ):
        channel = AgentChannel(Host(name="here"), command, lambda *_: None)
        with contextlib.closing(channel), pytest.raises(HostLost, match=f"here: .*{why}"):
            asked(channel, "hello", patience=60)


def test_messages_that_are_none_are_refused(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, b'[1]\nnonsense\n{"a": 1}\n')
    messages = MessageReader(reader)
    for _ in range(2):
        with pytest.raises(ValueError, match="message"):
            messages.read()
    assert messages.read() == {"a": 1}
    assert messages.read(timeout=0.0) is None
    os.close(writer)
    with pytest.raises(EOFError):
        messages.read()
    os.close(reader)


def test_bytes_that_do_not_come_are_not_awaited_for_ever():
    reader, writer = os.pipe()
    os.write(writer, b"12")
    messages = MessageReader(reader)
    with pytest.raises(TimeoutError, match=r"nothing has come for 0.1 s"):
        messages.bytes(3, timeout=0.1)
    os.write(writer, b"3")
    assert messages.bytes(3, timeout=HANGS_AFTER) == b"123"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("is_installed", [True, False])
def test_files_of_a_user_are_not_taken_for_modules(tmp_path, monkeypatch, is_installed):
    """And a checkout in the working directory is found where no gnnsys is installed."""
    for name in ("random", "json", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not yours')")
    if not is_installed:
        (tmp_path / "gnnsys").symlink_to(ROOT / "gnnsys")
        monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(
        AgentChannel(Host(name="here"), agent_command(Host(name="here"), None, 1, 1), print)
    ) as own:
        assert agent_pid(own) > 0


def test_a_pipe_that_nobody_reads_does_not_hold_a_writer_for_ever():
    reader, writer = os.pipe()
    with pytest.raises(TimeoutError, match=r"nothing was read for 0.1 s"):
        MessageWriter(writer, patience=0.1).write({}, bytes(1 << 20))
    os.close(reader)
    os.close(writer)


def test_limits_are_raised_as_far_as_they_may_be_and_no_further():
    program = (
        "import resource\nfrom gnnsys.launch.local_facts import MOST_FILES, raise_limits\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\nraise_limits()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MOST_FILES), hard)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_facts_are_plain_and_come_without_torch():
    program = "import sys; from gnnsys.launch import host_facts; host_facts(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    facts = host_facts()
    assert facts["versions"]["torch"][0].isdigit() and facts["memory_free"] > 1 << 20 and facts["cores"] >= 1
    assert len(facts["versions"]["gnnsys"].split("(")[1]) == 9 and Path(tempfile.gettempdir()).is_dir()
