"""A group that fails starts again as a whole, as often as it may, and goes on to the same weights to the last bit."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from gnnsys.launch import EXIT_HOST_LOST, EXIT_NOT_STARTED, Checks, Host, Launcher, LaunchOptions, read_hosts
from tests.chaos.job import NUM_RANKS, Plan, compare, history, write_small_parts
from tests.launch.ssh_hosts import needs_ssh, ssh_hosts
from tests.support.processes import HANGS_AFTER, ROOT, await_true

PLAIN = ("sh", "-c", f"exec {sys.executable} {ROOT}/tests/launch/plain_agent.py")  # in the place of ssh: runs it here
LIVES = """
import os, pathlib, signal, sys, time
folder, node = pathlib.Path(sys.argv[1]), os.environ["NODE"]
life = len(list(folder.glob(f"{node}-*")))
(folder / f"{node}-{life}").write_text(str(os.getppid()))
print("life", life, flush=True)
if node == "1" and life < int(sys.argv[2]):
    sys.exit(9)
if node == "1" and sys.argv[3] == "agent":
    keeper = os.getppid()
    os.kill(int(open(f"/proc/{keeper}/stat").read().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    time.sleep(1000)
if node == "0" and sys.argv[3] != "ends":
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def package_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(hosts, script: Path, *args: object, notes: list[str], lines: list[str], **options) -> int:
    words = [str(script), *map(str, args)]
    checks = Checks(script=words[0])
    launcher = Launcher(
        hosts,
        words,
        checks,
        LaunchOptions(**options),
        say=lambda line, _: lines.append(line),
        tell=notes.append,
    )
    return launcher.run()


@pytest.mark.parametrize(
    ("fails", "how", "restarts", "code", "last"),
    [
        (1, "ends", 1, 0, "the group starts again: restart 1 of 1"),
        (1, "waits", 0, 9, "torchrun ended with 9 without saying which rank failed: see its lines above"),
        (0, "agent", 0, EXIT_HOST_LOST, "h2 was lost: its connection ended; the job was ended on the other hosts"),
    ],
)
def test_the_group_starts_again_as_often_as_it_may(tmp_path, fails, how, restarts, code, last):
    (tmp_path / "lives.py").write_text(LIVES)
    hosts = [Host(name=name, address="127.0.0.1") for name in ("h1", "h2")]
    notes: list[str] = []
    lines: list[str] = []
    options = {"ssh": PLAIN, "restarts": restarts, "grace": 0.2, "connect_timeout": 60.0}
    assert run(hosts, tmp_path / "lives.py", tmp_path, fails, how, notes=notes, lines=lines, **options) == code
    assert notes[-1] == last
    assert {file.name for file in tmp_path.glob("1-*")} == {f"1-{life}" for life in range(restarts + 1)}
    if how == "ends":
        assert set(lines) == {f"h{host} | life {life}" for host in (1, 2) for life in range(restarts + 1)}


def test_a_host_that_does_not_come_back_in_time_is_told(tmp_path):
    """The job fails, and by then the host cannot be reached any more."""
    (tmp_path / "fails.py").write_text("raise SystemExit(9)")
    command = tmp_path / "once.sh"
    command.write_text(f"rm -f {tmp_path}/once.sh; exec {sys.executable} {ROOT}/tests/launch/plain_agent.py\n")
    notes: list[str] = []
    options = {"ssh": ("sh", str(command)), "restarts": 3, "grace": 0.2, "wait_for_hosts": 0.2}
    hosts = [Host(name="h1", address="127.0.0.1")]
    assert run(hosts, tmp_path / "fails.py", notes=notes, lines=[], **options) == EXIT_HOST_LOST
    assert notes[1] == "the group starts again: restart 1 of 3" and notes[2].startswith("h1: cannot be reached: sh:")


REPORTS = """
import glob, json, os, sys
node = int(os.environ["NODE"])
(folder,) = glob.glob(os.environ["TMPDIR"] + "/gnnsys-launch-*")
at = float(sys.argv[1]) + (3.0, 1.0)[node]
with open(folder + "/failures.json", "w") as file:
    json.dump([{"rank": node, "local_rank": 0, "code": 4 + node, "time": at}], file)
sys.exit(4 + node)
"""
AHEAD = """
import runpy, sys, time
here = time.time
time.time = lambda: here() + 3.0
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_who_failed_first_is_decided_by_the_clock_of_the_launcher(tmp_path):
    """The clock of the first host is three seconds ahead: by its own clock it failed two seconds after the other."""
    for name, text in (("reports.py", REPORTS), ("ahead.py", AHEAD)):
        (tmp_path / name).write_text(text)
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    agent = f"{ROOT}/tests/launch/plain_agent.py"
    ssh = (
        f'case "$*" in *ahead@*) export TMPDIR={tmp_path}/own; exec {sys.executable} {tmp_path}/ahead.py {agent};; '
        f"*) export TMPDIR={tmp_path}/other; exec {sys.executable} {agent};; esac"
    )
    hosts = [Host(name="h1", address="127.0.0.1", user="ahead"), Host(name="h2", address="127.0.0.1")]
    options = {"ssh": ("sh", "-c", ssh), "grace": 60.0, "connect_timeout": 60.0}
    notes: list[str] = []
    assert run(hosts, tmp_path / "reports.py", time.time(), notes=notes, lines=[], **options) == 4
    assert notes == ["rank 0 on h1 failed first, with exit code 4: it printed nothing"]


STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = pathlib.Path(sys.argv[1], "first")
if file.exists():
    print("the first lives:", os.path.exists(f"/proc/{file.read_text()}"))
    sys.exit()
file.write_text(str(os.getpid()))
keeper = os.getppid()
os.kill(int(open(f"/proc/{keeper}/stat").read().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
time.sleep(1000)
"""


def test_a_new_life_waits_for_what_is_left_of_the_one_before(tmp_path, monkeypatch):
    """Its agent was killed, and its rank does not heed SIGTERM: it lives on for the time of grace."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    lines: list[str] = []
    options = {"ssh": PLAIN, "restarts": 1, "grace": 2.0, "connect_timeout": 60.0}
    hosts = [Host(name="h1", address="127.0.0.1")]
    assert run(hosts, tmp_path / "stubborn.py", tmp_path, notes=[], lines=lines, **options) == 0
    assert lines == ["h1 | the first lives: False"]


def test_an_interrupt_before_the_start_does_not_wait_for_hosts_that_have_no_job(tmp_path):
    """The ssh of the second host hangs; the launcher is told to end meanwhile."""
    hangs = 'case "$*" in *h2*) read line; kill -TERM $PPID; exec sleep 1000; esac; ' + PLAIN[2]
    hosts = [Host(name="h1", address="127.0.0.1"), Host(name="h2")]
    options = {"ssh": ("sh", "-c", hangs), "grace": 600.0, "lost_after": 600.0, "connect_timeout": 600.0}
    notes: list[str] = []
    begin = time.monotonic()
    assert run(hosts, ROOT / "setup.py", notes=notes, lines=[], **options) == 143
    assert time.monotonic() - begin < HANGS_AFTER and notes == ["SIGTERM: ending the job on every host"]


def test_a_host_that_refuses_to_start_is_told_and_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = {"ssh": PLAIN, "restarts": 1, "grace": 600.0, "lost_after": 600.0, "env": {"A": "a\0b"}}
    notes: list[str] = []
    hosts = [Host(name="h1", address="127.0.0.1")]
    assert run(hosts, ROOT / "setup.py", notes=notes, lines=[], **options) == EXIT_NOT_STARTED
    assert notes == ["h1: ValueError: embedded null byte; nothing is left of the job on the other hosts"]
    assert not list(tmp_path.iterdir())


TRAIN = """
import sys, time
from pathlib import Path
import tests.chaos.program as program

class Waits(program.Injector):
    def reached(self, moment):
        super().reached(moment)
        sign = Path(sys.argv[2], "reached")
        if moment == "step:9" and len(sys.argv) > 3 and self._rank == 3 and not sign.exists():
            sign.touch()
            time.sleep(1000)

    def __init__(self, *args, **options):
        import os
        self._rank = int(os.environ["RANK"])
        super().__init__(*args, **options)

program.Injector = Waits
program.main(sys.argv[1])
"""


# Restarts of groups that are no training: above. The same weights after a kill under torchrun: tests/chaos.
@pytest.mark.long
@needs_ssh
def test_a_host_that_dies_in_mid_epoch_and_comes_back_ends_with_the_same_weights(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    write_small_parts(tmp_path / "parts")
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        found = read_hosts(hosts.describe(h1="slots=2", h2="slots=2"))
        options = {"ssh": hosts.ssh, "connect_timeout": 120.0, "lost_after": 20.0, "wait_for_hosts": 120.0}
        options["env"] = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

        def job(name: str, *further: str, restarts: int) -> list[str]:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "plan.json").write_text(json.dumps(asdict(Plan(str(tmp_path / "parts"), str(folder)))))
            words = [folder / "plan.json", folder, *further]
            notes: list[str] = []
            lines: list[str] = []
            code = run(found, tmp_path / "train.py", *words, notes=notes, lines=lines, restarts=restarts, **options)
            assert code == 0, "\n".join([*lines[-80:], *notes])
            return notes

        def break_it() -> None:
            await_true(lambda: (tmp_path / "broken" / "reached").exists(), "the ninth step")
            hosts.lab.kill(2)
            hosts.boot(2)

        breaking = threading.Thread(target=break_it)
        breaking.start()
        notes = job("broken", "break", restarts=1)
        breaking.join()
        assert notes[0].startswith("h2 was lost") and notes[1:] == ["the group starts again: restart 1 of 1"]
        assert job("unbroken", restarts=0) == []
    for rank in range(NUM_RANKS):
        ends = [torch.load(tmp_path / name / f"end-{rank}.pt", weights_only=True) for name in ("broken", "unbroken")]
        assert compare(*ends) == [], f"rank {rank}"
        logs = [(tmp_path / name / f"rank-{rank}.log").read_text().splitlines() for name in ("broken", "unbroken")]
        broken, unbroken = ([json.loads(line) for line in log] for log in logs)
        assert sum("life" in line for line in broken) == 2
        assert history(broken) == history(unbroken)
