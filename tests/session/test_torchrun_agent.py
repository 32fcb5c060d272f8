"""torchrun's agent is killed: its trainers and their server do not train on alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from tests.support.processes import ROOT, alive, await_true, clean_environment, processes, read_ranks, start_agents

LOST_AFTER = 20.0  # a busy machine starts four processes meanwhile
MARGIN = 120.0  # of a busy machine

TRAIN = """
import json, os, signal, sys, time, torch, torch.distributed as dist, gnnsys
session = gnnsys.init(timeout=120, lost_after=float(sys.argv[1]))
if session.rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a script that saves first, and never comes to an end
pids = session.group.gather("pids", [os.getpid(), session.status()[0]["pid"]])
with open(sys.argv[2], "a") as file:  # a line of each: both have left the agent's store behind
    print(json.dumps(sorted({pid for each in pids for pid in each})), file=file)
try:
    while True:  # no step fails: the store and the other rank are there
        dist.all_reduce(torch.ones(1))
        session.status()
        time.sleep(0.1)
finally:  # rank 0 has heeded the signal
    while session.rank == 1:
        time.sleep(0.1)
"""


def test_trainers_and_server_end_when_the_agent_that_launched_them_is_killed(tmp_path):
    told = tmp_path / "pids"
    with processes() as running:
        start_agents(running, TRAIN, [2], LOST_AFTER, told, fresh_ranks=True)
        await_true(lambda: told.exists() and told.read_text().count("\n") == 2, "the ranks")
        pids = json.loads(told.read_text().splitlines()[0])
        try:
            assert len(pids) == 3 and all(map(alive, pids))
            began = time.monotonic()  # before: this process may be held up behind the signal
            os.kill(running.pid(0), signal.SIGKILL)
            await_true(lambda: not any(map(alive, pids)), "the end of trainers and server", LOST_AFTER + MARGIN)
            took = time.monotonic() - began
        finally:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)
        ranks = read_ranks(running.folder)
    assert took >= LOST_AFTER / 2, "who does not heed the signal has half of the time"
    for number, rank in enumerate(ranks):
        assert f"rank {number} ends: torchrun's agent on this machine (process" in rank.stderr, rank
        assert "gnnsys.resume() goes on from the last checkpoint" in rank.stderr


FILE = "gnnsys/session/torchrun_agent.py"
FIND = f"import runpy; print(getattr(runpy.run_path({FILE!r})['TorchrunAgent'].watch(60), 'pid', None))"
LAUNCHED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}


def found(environment: dict[str, str], command: list[str]) -> str:
    env = clean_environment() | environment
    result = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)
    return result.stdout.strip()


def test_only_who_torchrun_has_launched_has_an_agent_and_shells_in_between_are_none(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    bare = [sys.executable, "-c", FIND]
    shell = ["sh", "-c", f'"{sys.executable}" -c "{FIND}"; true']
    assert found(LAUNCHED, bare) == found(LAUNCHED, shell) == str(os.getpid())
    assert found({}, bare) == "None"
    assert found({"TORCHELASTIC_RUN_ID": "none"}, bare) == "None", "set by hand: a parent that ends is nobody's concern"


def test_an_agent_that_a_trainer_has_started_is_not_taken_for_a_shell_in_between():
    """Both have the same run id, torchrun's own default: they differ in what is each trainer's alone."""
    launch = (
        "import os, subprocess, sys; print(os.getpid(), flush=True);"
        f"subprocess.run([sys.executable, '-c', {FIND!r}], env=os.environ | dict(TORCHELASTIC_ERROR_FILE='inner'))"
    )
    told = LAUNCHED | {"TORCHELASTIC_ERROR_FILE": "outer"}
    agent, its_trainers = found(told, [sys.executable, "-c", launch]).split()
    assert its_trainers == agent


ORPHAN = """
import importlib.util, os, signal, subprocess, sys, threading
if sys.argv[1] == "agent":
    told = dict(TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT="0")
    trainer = subprocess.Popen([sys.executable, __file__, *sys.argv[2:]], env=os.environ | told, stderr=subprocess.PIPE)
    assert trainer.stderr.readline() == b"watches\\n", trainer.stderr.read()
    os._exit(0)  # and leaves its trainer behind
if sys.argv[1] == "polls":
    def refused(*_): raise PermissionError
    os.pidfd_open = refused
spec = importlib.util.spec_from_file_location("agent", "gnnsys/session/torchrun_agent.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module._LOOK_SECONDS = 0.01
agent = module.TorchrunAgent.watch(240.0)
heeded = threading.Event()
def heed(*_):
    files = [open(f"{sys.argv[2]}/{number}", "wb", buffering=0) for number in range(8)]  # get descriptors that are free
    agent.close()
    print([file.fileno() for file in files if os.path.getsize(file.name)], agent._thread.is_alive(), flush=True)
    heeded.set()
signal.signal(signal.SIGTERM, heed)
for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
    del os.environ[name]  # to start a torchrun of its own
agent._thread.join(0.3)
assert agent._thread.is_alive() and not heeded.is_set(), "its agent is there"
print("watches", file=sys.stderr, flush=True)
assert heeded.wait(120)
agent.close()
print("ends by itself", flush=True)
"""


def test_who_closes_the_session_when_its_agent_has_ended_ends_by_itself_and_no_file_of_its_is_written_to(tmp_path):
    """Whether the kernel tells of the end, or the trainer looks; what a program does to its environment is nothing."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    for way in ("waits", "polls"):
        assert found({}, [sys.executable, str(script), "agent", way, str(tmp_path)]).splitlines() == [
            "[] False",
            "ends by itself",
        ], way
