"""`launch/lab.py` makes a lab that stays, uses it, and takes it down."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnnsys.lab import Lab, available, state
from gnnsys.planning import Cluster

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
SCRIPT = Path(__file__).parents[2] / "launch" / "lab.py"


@pytest.fixture(scope="module")
def command():
    spec = importlib.util.spec_from_file_location("lab_command", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def name(command, capsys):
    assert command(["up", "--hosts", "2", "--rate", "100mbit", "--cpu", "0.5", "--memory", "200m"]) == 0
    made = re.fullmatch(r"lab (\w+): hosts h1, h2\n", capsys.readouterr().out)[1]
    yield made
    if state.folder_of(made).exists():
        state.remove(made)


@pytest.mark.alone
def test_a_lab_from_the_command_line_stays_until_it_is_taken_down(command, name, capsys):
    assert command(["exec", "--lab", name, "2", "--", "hostname"]) == 0
    assert command(["exec", "--lab", name, "2", "--", "sh", "-c", "exit 3"]) == 1
    said = capsys.readouterr()
    assert said.out == "h2\n" and "host 2 ended with 3" in said.err
    assert command(["status"]) == 0
    assert f"lab {name}: 2 hosts, rate 100mbit, cpu 0.5, memory" in capsys.readouterr().out
    assert command(["describe", "--lab", name]) == 0
    told = Cluster.from_json(json.loads(capsys.readouterr().out))
    assert [(host.name, host.cores, host.rate_in) for host in told] == [("h1", 0.5, 12.5e6), ("h2", 0.5, 12.5e6)]
    assert command(["rate", "--lab", name, "none"]) == 0
    assert command(["cut", "--lab", name, "2"]) == command(["heal", "--lab", name, "2"]) == 0
    assert command(["down", "--lab", name]) == 0
    assert name not in state.all_labs()
    capsys.readouterr()
    assert command(["exec", "--lab", name, "1", "--", "true"]) == 1
    assert f"there is no lab '{name}'" in capsys.readouterr().err


def test_it_stands_in_the_place_of_ssh_with_input_and_output(name):
    """`gnnsys launch --ssh 'python launch/lab.py ssh'`; the command dies with its host."""
    words = [sys.executable, SCRIPT, "ssh", "--lab", name, "--", "-T", "-o", "BatchMode=yes", "me@h2"]
    said = subprocess.run([*words, "hostname; tr a-z A-Z; exit 5"], input=b"hello", capture_output=True)
    assert (said.returncode, said.stdout) == (5, b"h2\nHELLO")
    with subprocess.Popen([*words, "echo up; sleep 1000"], stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"up\n"
        Lab.attach(name).kill(2)
        assert running.wait(120) != 0
    said = subprocess.run([*words[:3], "--lab", name, "--", "h9", "true"], capture_output=True)
    assert said.returncode == 1 and b"give a host of the lab and a command; hosts: h1, h2" in said.stderr


def test_bad_arguments_are_one_clear_line(command, name, capsys):
    assert command(["run", "--lab", name]) == 1
    assert command(["exec", "--lab", name, "7", "--", "true"]) == 1
    assert capsys.readouterr().err == "lab: give what to run after --\nlab: host must be from 1 to 2, got 7\n"


def test_an_interrupt_ends_everything_a_run_has_started(name):
    arguments = ["exec", "--lab", name, "1", "--", "sh", "-c", "setsid sleep 1000 & echo up; sleep 1000"]
    running = subprocess.Popen([sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout.readline() == b"up\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130 and b"interrupted" in said
    lab, deadline = Lab.attach(name), time.monotonic() + 120
    while lab.exec(1, "cat /proc/[0-9]*/comm 2>/dev/null | grep -cx sleep", check=False).output != "0\n":
        assert time.monotonic() < deadline, "something of it runs still"
