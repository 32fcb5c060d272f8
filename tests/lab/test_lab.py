"""Hosts of a lab are machines: they reach each other at the rate they have, keep their limits and leave nothing."""

import json
import os
import queue
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from gnnsys.lab import Lab, available, control_groups, state, wait_all
from gnnsys.observe import num_usable_cores
from gnnsys.planning import Cluster
from tests.lab.lab_programs import ALL_REDUCE, LISTEN, RANK, REACH, SEND, SPIN
from tests.support.processes import processes

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
WAIT_ALL = "gnnsys.lab.lab.wait_all"
PYTHON = [sys.executable, "-I", "-S", "-c"]


@pytest.fixture(scope="module")
def lab():
    with Lab(hosts=2) as made:
        yield made


class Listener:
    """A program on a host that listens at a port of its own choice."""

    def __init__(self, lab: Lab, host: int):
        lines = queue.Queue()
        self.command = lab.start(host, [*PYTHON, LISTEN], heard=lines.put)
        self.port = lines.get(timeout=120).split()[1]


def transfer(lab: Lab, size: int, source: int, to: int, name: str) -> float:
    """Seconds between the first and the last byte."""
    listener = Listener(lab, to)
    lab.exec(source, [*PYTHON, SEND, name, listener.port, str(size)])
    word, received, seconds = listener.command.wait(120).output.splitlines()[1].split()
    assert (word, int(received)) == ("received", size)
    return float(seconds)


def wait_until(condition, seconds: float = 120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def leftovers(name: str) -> list[str]:
    """Whatever carries the lab's name: groups, processes, mounts, its folder."""
    roots = control_groups.find_roots()
    found = [str(path) for path in roots.of(f"gnnsys-lab-{name}").paths if path.exists()]
    found += [str(state.folder_of(name))] if state.folder_of(name).exists() else []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(process / file).read_text() for file in ("cmdline", "cgroup", "mountinfo")]
        except OSError:
            continue
        if any(name in text for text in texts):
            found.append(f"{process}: {texts[0]}")
    return found


@pytest.mark.parametrize("name", ["h2", "h2-v6"])
def test_hosts_reach_each_other_by_name_over_ipv4_and_ipv6(lab, name):
    assert transfer(lab, 1000, 1, 2, name) >= 0


def test_names_mean_ipv6_where_asked():
    with Lab(hosts=2, family=6) as lab:
        assert lab.address(2) == "fd77::2"
        assert lab.address(2) in lab.exec(1, "getent hosts h2").output


def test_a_host_has_its_own_name_processes_and_network(lab):
    said = lab.exec(2, "hostname; echo $$; ls /sys/class/net").output.split()
    assert said[0] == "h2" and int(said[1]) < 1000 and said[2:] == ["eth0", "lo"]


def test_shared_memory_is_private_to_a_host(lab):
    lab.exec(1, "echo mine > /dev/shm/lab_secret")
    assert lab.exec(1, "cat /dev/shm/lab_secret").output == "mine\n"
    assert not lab.exec(2, "cat /dev/shm/lab_secret", check=False).ok
    assert not Path("/dev/shm/lab_secret").exists()


MOST_TRANSFERS = 12  # whatever else the machine does counts in a transfer, so the best of several is looked at


@pytest.mark.alone
@pytest.mark.parametrize("source, to", [(1, 2), (2, 1)])
def test_the_rate_holds_and_the_counters_count(lab, source, to):
    """Never faster than the rate. A machine that pauses makes any transfer slower, so below it half the rate is enough:
    a rate in other units (bytes, kilobits) or on the wrong device is further away than that."""
    size, bits, rates = 1_000_000, 20e6, []
    lab.set_rate("20mbit")
    try:
        while len(rates) < MOST_TRANSFERS and (not rates or max(rates) < 0.9 * bits):
            before = lab.bytes()
            rates.append(size * 8 / transfer(lab, size, source, to, f"h{to}"))
            moved = {host: after - before[host] for host, after in lab.bytes().items()}
    finally:
        lab.set_rate(None)
    assert 0.5 * bits < max(rates) < 1.2 * bits, rates
    assert size < moved[source].bytes_out < 1.08 * size
    assert size < moved[to].bytes_in < 1.08 * size
    assert moved[source].bytes_in < 0.1 * size


@pytest.mark.alone
def test_one_direction_of_one_host_can_be_slower_than_the_rest(lab):
    took = []  # there and back
    lab.set_rate("20mbit", host=2, out=False)
    try:
        while len(took) < MOST_TRANSFERS:
            slow, fast = transfer(lab, 2_000_000, 1, 2, "h2"), transfer(lab, 2_000_000, 2, 1, "h1")
            took.append((slow, fast))
            if fast < slow / 2:
                break
    finally:
        lab.set_rate(None)
    assert min(there for there, _ in took) > 0.65, took  # 0.8 s, less what the bucket lets through at once
    assert fast < slow / 2, took


@pytest.mark.alone
def test_the_quota_holds_for_all_processes_of_a_host_together():
    with Lab(hosts=1, cpu=0.2) as lab:
        begin = time.monotonic()
        spinning = [lab.start(1, [*PYTHON, SPIN]) for _ in range(3)]
        spent = sum(float(command.wait(180).output) for command in spinning)
        wall = time.monotonic() - begin
        used = lab.usage(1)
    assert 0.44 < spent < 0.2 * wall * 1.1 + 0.02
    assert spent < used.cpu_seconds < 0.2 * wall * 1.1 + 0.02
    assert used.throttled_seconds > 0  # it was the quota that held them back


@pytest.mark.alone
def test_hosts_have_their_quotas_beside_other_processes_that_want_all_cores():
    """Others are sessions of their own: the kernel may count the processes of one session as one."""
    with processes() as others, Lab(hosts=2, cpu=0.3) as lab:
        for number in range(8):
            others.start(f"loop {number}", [*PYTHON, "while True: pass"])
        spinning = [lab.start(host, [*PYTHON, "while True: pass"]) for host in lab.hosts]
        begin, before = time.monotonic(), [lab.usage(host).cpu_seconds for host in lab.hosts]
        wait_until(lambda: time.monotonic() > begin + 1.5)
        used, wall = [lab.usage(host).cpu_seconds for host in lab.hosts], time.monotonic() - begin
        for command in spinning:
            command.kill()
    shares = [(after - earlier) / wall for after, earlier in zip(used, before, strict=True)]
    assert all(0.26 < share < 0.34 for share in shares), shares


def test_a_lab_comes_before_others_only_while_its_quotas_leave_them_something():
    with Lab(hosts=2, weight=3.0) as lab:
        group = control_groups.find_roots().of(f"gnnsys-lab-{lab.id}")
        file, unit = (group.cpu / "cpu.shares", 1024) if group.version == 1 else (group.cpu / "cpu.weight", 100)
        assert int(file.read_text()) == 3 * unit
        lab.set_cpu(0.4)
        assert int(file.read_text()) >= 100 * unit
        lab.set_cpu(float(num_usable_cores()))
        assert int(file.read_text()) == 3 * unit
        Lab.attach(lab.id).set_cpu(0.3)
        assert int(file.read_text()) >= 100 * unit
        lab.set_cpu(None, host=2)
        assert int(file.read_text()) == 3 * unit


@pytest.mark.alone
def test_what_a_killed_keeper_leaves_is_removed_by_the_next_lab():
    lab = Lab(hosts=1).up(tied=False)
    command = lab.start(1, "echo up; sleep 1000")
    wait_until(lambda: "up" in command.output)
    found = json.loads((state.folder_of(lab.id) / "state.json").read_text())
    os.kill(found["keeper_pid"], signal.SIGKILL)
    wait_until(lambda: not state.is_alive(found))
    assert leftovers(lab.id)
    with Lab(hosts=1):
        assert leftovers(lab.id) == []


def test_a_cut_link_loses_packets_until_it_is_healed(lab):
    listener = Listener(lab, 2)
    lab.cut(2)
    assert lab.exec(1, [*PYTHON, REACH, "h2", listener.port, "0.5"]).output.startswith("lost")
    lab.heal(2)
    assert lab.exec(1, [*PYTHON, REACH, "h2", listener.port, "120"]).output == "reached\n"
    listener.command.kill()


def test_a_command_beyond_the_memory_limit_dies_and_its_host_lives_on():
    with Lab(hosts=1, memory="64m") as lab:
        result = lab.exec(1, [*PYTHON, "x = bytearray(200 << 20)"], check=False)
        assert result.code in (-signal.SIGKILL, 137)
        assert lab.exec(1, "echo still here").output == "still here\n"
        assert 0 < lab.usage(1).memory_peak <= 64 << 20


def test_torchrun_on_two_hosts_makes_them_ranks_of_one_job(lab, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    results = lab.run(["--nproc-per-node", "1", str(tmp_path / "rank.py")], timeout=120)
    assert [result.host for result in results] == [1, 2]
    said = {line for result in results for line in result.output.splitlines() if line.startswith("rank")}
    assert said in [{f"rank {rank} of 2 with {first}" for rank in range(2)} for first in lab.names]


@pytest.mark.long  # the one above has its ranks, tests/session/test_machines.py what they do together
def test_a_torchrun_job_spans_the_hosts(lab, tmp_path):
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    before = lab.bytes()
    results = lab.run(["--nproc-per-node", "1", str(script)], timeout=120)
    for host, result in enumerate(results, start=1):
        assert result.host == host
        assert f"sum 3.0 3.0 h{host}" in result.output
    assert (lab.bytes()[1] - before[1]).bytes_out > 4_000_000  # what one host's sum needs from the other


def test_a_failing_command_is_an_error_that_names_its_host_and_last_words(lab):
    with pytest.raises(RuntimeError, match=r"host 2 ended with 3 after .* s\n    so it goes"):
        lab.exec(2, "echo so it goes; exit 3")
    result = lab.exec(2, "exit 3", check=False)
    assert (result.host, result.code, result.ok) == (2, 3, False)


def test_when_one_host_fails_the_others_do_not_run_on(lab):
    commands = [lab.start(1, "sleep 1000"), lab.start(2, "exit 3")]
    results = wait_all(commands, 300.0, check=False, grace=0.1)
    assert [result.code for result in results] == [None, 3]
    assert max(result.seconds for result in results) < 200


def test_a_command_past_its_deadline_is_killed_with_its_daemons(lab):
    command = lab.start(1, "setsid sleep 1000 & echo started; sleep 1000")
    wait_until(lambda: "started" in command.output and len(command.pids()) >= 3)
    pids = command.pids()
    assert command.wait(0.01).code is None
    assert not any(state.process_start(pid) for pid in pids)


def test_an_interrupt_reaches_the_command(lab):
    command = lab.start(1, [*PYTHON, "import time; print('up', flush=True); time.sleep(1000)"])
    wait_until(lambda: "up" in command.output)
    command.signal(signal.SIGINT)
    result = command.wait(120)
    assert "KeyboardInterrupt" in result.output and result.code


def test_an_interrupt_at_any_moment_of_a_start_leaves_nothing_running(lab, monkeypatch):
    """In the middle of making it, and between that and the wait for its end."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for where, what in (("gnnsys.lab.command.threading.Thread.start", "starts"), (WAIT_ALL, "waits")):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                lab.exec(1, "setsid sleep 1000 & sleep 1000")
        groups = lab._host_groups[0]
        left = [pid for path in groups.paths for pid in control_groups.processes([*path.glob("command-*")])]
        assert left == [], what


def test_a_command_that_is_killed_before_it_has_joined_its_groups_ends_at_once(lab, monkeypatch):
    monkeypatch.setattr("gnnsys.lab.command._JOIN", "exec sleep 1000")
    command = lab.start(1, "true")
    assert command.kill().code == -signal.SIGKILL  # what is only waited for, in vain, has no code


def test_what_joins_a_group_while_it_is_removed_is_killed_too(lab, monkeypatch):
    """As a command does whose start was interrupted between its fork and its first step."""
    command = lab.start(1, "echo up; sleep 1000")
    wait_until(lambda: "up" in command.output and command.pids())
    pids, kill, calls = command.pids(), control_groups.kill, []

    def saw_nobody_at_first(paths, *rest):
        calls.append(paths)
        if len(calls) > 1:
            kill(paths, *rest)

    monkeypatch.setattr(control_groups, "kill", saw_nobody_at_first)
    control_groups.remove(command._leaves)
    assert pids and len(calls) > 1 and not any(path.exists() for path in command._leaves)
    assert not any(state.process_start(pid) for pid in pids)


def test_killing_a_host_ends_its_commands_alone(lab):
    first, second = (lab.start(host, "echo up; sleep 1000") for host in (1, 2))
    wait_until(lambda: "up" in first.output and "up" in second.output)
    lab.kill(1)
    assert not first.wait(120).ok
    assert not second.done()
    second.kill()
    assert lab.exec(1, "echo back").ok


def test_two_labs_live_side_by_side(lab):
    with Lab(hosts=1) as other:
        assert other.id != lab.id
        assert lab.exec(1, "hostname").output == other.exec(1, "hostname").output == "h1\n"
    assert lab.exec(1, "true").ok


def test_nothing_is_left_after_down():
    with Lab(hosts=2, rate="1gbit", cpu=0.5, memory="100m") as lab:
        command = lab.start(1, "setsid sleep 1000 & echo up; sleep 1000")
        wait_until(lambda: "up" in command.output)
        assert len(leftovers(lab.id)) > 4
    assert leftovers(lab.id) == []
    lab.down()  # a second time is fine


OWNER = """
import sys, time
from gnnsys.lab import Lab
with Lab(hosts=2) as lab:
    command = lab.start(2, "setsid sleep 1000 & echo up; sleep 1000")
    while "up" not in command.output:
        time.sleep(0.01)
    print(lab.id, flush=True)
    lab.exec(1, "sleep 1000", timeout=1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_lab_ends_with_its_owner_however_that_ends(number):
    with processes() as running:
        owner = running.start_code("owner", OWNER)
        name = running.await_output(owner, "\n").strip()
        assert re.fullmatch("[0-9a-f]{6}", name)
        assert leftovers(name)
        os.kill(running.pid(owner), number)
        running.wait(120)
        wait_until(lambda: not leftovers(name))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hosts": 0}, "hosts must be from 1 to 200, got 0"),
        ({"rate": "fast"}, "a rate must look like 1gbit, 100mbit or 500kbit, got 'fast'"),
        ({"cpu": 0.001}, "cpu must be at least 0.05 cores for a period of 0.02 s, got 0.001"),
        ({"weight": 0}, "weight must be more than 0, got 0"),
        ({"family": 5}, "family must be 4 or 6, got 5"),
        ({"memory": "lots"}, "a size must look like 4G"),
        ({"rate": ["1gbit"]}, "rate must be one value, or one for each of 2 hosts, got 1"),
        ({"rate": ["1gbit", "fast"]}, "a rate must look like 1gbit, 100mbit or 500kbit, got 'fast'"),
        ({"cpu": [0.5, 0.001]}, "cpu must be at least 0.05 cores for a period of 0.02 s, got 0.001"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Lab(**options)


def test_a_host_that_is_not_there_is_refused(lab):
    with pytest.raises(ValueError, match="host must be from 1 to 2, got 3"):
        lab.exec(3, "true")


def test_hosts_may_differ_and_are_described_as_a_cluster_file():
    """What was asked for is what the kernel keeps, and what a planner is told."""
    with Lab(hosts=3, rate=["250mbit", "50mbit", None], cpu=[0.5, 0.3, None], memory="200m") as lab:
        told = Cluster.from_json(lab.describe())
        assert told.names == lab.names
        assert [host.rate_in for host in told] == [31.25e6, 6.25e6, float("inf")]
        assert [host.cores for host in told][:2] == [0.5, 0.3] and told["h3"].cores == num_usable_cores()
        assert told["h1"].memory == 200 << 20
        assert [round(host.queue, 4) for host in told] == [0.0522, 0.0612, 0.0]  # 50 ms, and the burst
        shown = [lab.exec(host, "tc qdisc show dev eth0").output for host in lab.hosts]
        assert "rate 250Mbit" in shown[0] and "rate 50Mbit" in shown[1] and "tbf" not in shown[2]
        lab.set_rate("20mbit", host=1, out=False)
        lab.set_cpu(0.4, host=2)
        changed = Cluster.from_json(Lab.attach(lab.id).describe())
        assert (changed["h1"].rate_in, changed["h1"].rate_out) == (2.5e6, 31.25e6)
        assert [host.cores for host in changed][:2] == [0.5, 0.4]
        began, before = time.monotonic(), lab.usage(2).cpu_seconds
        lab.exec(2, "timeout 1 sh -c 'while :; do :; done'", check=False)
        assert lab.usage(2).cpu_seconds - before < 0.4 * (time.monotonic() - began) + 0.1
