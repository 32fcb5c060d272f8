"""`gnnsys launch --local`: ranks on this machine under torchrun, by the command that users type."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.launch.launcher import Interrupted, interrupts
from tests.support.processes import HANGS_AFTER, ROOT, await_true

COMMAND = [sys.executable, "-m", "gnnsys.cli", "launch"]
RAISES = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def refuse(*_):
    while True:
        print("asked to end, at", time.monotonic(), file=sys.stderr, flush=True)
        time.sleep(0.02)
signal.signal(signal.SIGTERM, refuse)
print("hello from", rank, sys.argv[1:], os.environ["COLOUR"], os.environ["THP_MEM_ALLOC_ENABLE"],
      os.environ["GOMP_SPINCOUNT"], flush=True)
if rank == 0:
    open(os.environ["UP"], "w")
if rank == 1:
    while not os.path.exists(os.environ["UP"]):
        time.sleep(0.01)
    class Planted(Exception):
        pass
    def hook(kind, error, trace):
        sys.__excepthook__(kind, error, trace)
        os._exit(7)
    sys.excepthook = hook
    raise Planted("on purpose")
time.sleep(1000)
"""
SLEEPS = """
import os, pathlib, subprocess, sys, time
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {daemon.pid}")
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def package_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


def test_lines_have_their_rank_and_the_first_that_fails_is_named_with_its_traceback_and_code(tmp_path):
    """And a rank that does not heed SIGTERM is killed after the time of grace: torchrun itself would wait for 30 s."""
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    command = [*COMMAND, "--local", "2", "--grace", "1", "--env", "COLOUR=red", "--env", f"UP={tmp_path / 'up'}"]
    command += [str(script), "--epochs", "3$$"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_AFTER)
    assert done.returncode == 7
    greetings = [f"localhost:{rank} | hello from {rank} ['--epochs', '3$$'] red 1 10000" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == greetings
    last = done.stderr.splitlines()
    assert last[-1] == "gnnsys launch: rank 1 on localhost failed first, with exit code 7: Planted: on purpose"
    traceback = last[len(last) - 1 - last[::-1].index("localhost:1 | Traceback (most recent call last):") : -1]
    assert len(traceback) >= 3 and traceback[-1] == "localhost:1 | Planted: on purpose"
    asked = [float(line.split()[-1]) for line in last if line.startswith("localhost:0 | asked to end, at ")]
    assert 0.8 < asked[-1] - asked[0] < 10
    assert not list(tmp_path.glob("gnnsys-launch-*"))


@pytest.mark.long  # agents, keepers and launchers that are killed around a plain command: test_agent.py, test_ssh.py
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_job_whose_launcher_is_interrupted_or_killed(tmp_path, number):
    (tmp_path / "script.py").write_text(SLEEPS)
    ranks = [tmp_path / "0", tmp_path / "1"]
    command = [*COMMAND, "--local", "2", str(tmp_path / "script.py"), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        await_true(lambda: all(rank.exists() and rank.read_text().count(" ") for rank in ranks), "two ranks")
        launcher.send_signal(number)
        assert launcher.stderr is not None
        said = launcher.stderr.read()
    pids = [int(pid) for rank in ranks for pid in rank.read_text().split()]
    await_true(lambda: not any(map(is_alive, pids)), f"the end of {pids}")
    await_true(lambda: not list(tmp_path.glob("gnnsys-launch-*")), "the end of its folder")
    if number == signal.SIGINT:
        assert launcher.returncode == 130 and "gnnsys launch: SIGINT: ending the job on every host" in said


def test_a_signal_that_is_ignored_stays_so():
    """As by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(Interrupted, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local", "0", "x.py"], "--local must be at least 1 rank, got 0"),
        (["--hosts", "/no/such/file", "x.py"], "there is no hosts file /no/such/file"),
        (["--local", "1", "--env", "COLOUR", "x.py"], "--env must be NAME=VALUE, got 'COLOUR'"),
        (["--local", "1", "--port", "99999", "x.py"], "--port must be below 65536"),
        (["--local", "1", "--sbatch=--time=1", "x.py"], "--sbatch is for --slurm, not for --local: leave it away"),
        (["--local", "0", "--ranks", "1", "x.py"], "--ranks is for --slurm or --k8s, not for --local"),
        (["--local", "1", "--ssh", "ssh", "x.py"], "--ssh is for --hosts, not for --local"),
        (["--hosts", "x", "--image", "y", "x.py"], "--image is for --k8s, not for --hosts: leave it away"),
        (["--hosts", "x", "--nodes", "2", "x.py"], "--nodes is for --slurm or --k8s, not for --hosts"),
        (["--slurm", "--gpus", "2", "x.py"], "--gpus is for --k8s, not for --slurm"),
        (["--k8s", "--no-verify", "x.py"], "--no-verify is for --local or --hosts or --slurm, not for --k8s"),
        (["--k8s", "--grace", "3", "x.py"], "--grace is for --local or --hosts or --slurm, not for --k8s"),
        (["--local", "1", "/no/such/script.py"], "localhost: the script is not there: copy the script there"),
        (["--local", "1", "--resume", "/no/such", str(ROOT / "setup.py")], "/no/such has no checkpoint to go on from"),
        (["--local", "1", "--parts", "/no/such", str(ROOT / "setup.py")], "/no/such has no parts: gnnsys push"),
    ],
)
def test_bad_use_is_one_line_and_starts_nothing(arguments, message, capsys):
    assert main(["launch", *arguments]) == 2
    told = capsys.readouterr().err.splitlines()
    assert message in told[0] and len(told) <= 2
