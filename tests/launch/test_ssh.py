"""Jobs on two hosts over real ssh: what is wrong is one line before anything starts, and nothing is left afterwards."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gnnsys.launch import (
    EXIT_HOST_LOST,
    EXIT_NOT_STARTED,
    Checks,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    PlannedHost,
    read_hosts,
    read_listing,
)
from tests.launch.ssh_hosts import NOWHERE, PORT, SshHosts, needs_ssh, ssh_hosts
from tests.support.processes import HANGS_AFTER, ROOT, await_true

pytestmark = needs_ssh


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


class Job:
    """A launcher in this process, and what it said."""

    def __init__(self, hosts: SshHosts, file: Path, script: Path, *args: object, **options) -> None:
        self.lines: list[str] = []
        self.notes: list[str] = []
        words = [str(script), *map(str, args)]
        options = {"ssh": hosts.ssh, "lost_after": 60.0, "grace": 20.0, "connect_timeout": 120.0, **options}
        checks = Checks(script=words[0], arguments=words[1:])
        self.launcher = Launcher(
            read_hosts(file),
            words,
            checks,
            LaunchOptions(**options),
            say=lambda line, _: self.lines.append(line),
            tell=self.notes.append,
        )

    def run(self) -> int:
        return self.launcher.run()


RAISES = """
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
if rank == 3:
    raise RuntimeError("planted")
time.sleep(1000)
"""


@pytest.mark.long  # the same on this machine: test_local.py
def test_a_rank_that_raises_is_named_with_its_traceback_and_code_and_nothing_is_left(hosts, tmp_path):
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    job = Job(hosts, hosts.describe(h1="slots=2", h2="slots=2"), script)
    assert job.run() == 1
    said = {line for line in job.lines if " | rank " in line}
    assert said == {f"h{1 + rank // 2}:{rank} | rank {rank} of 4 on h{1 + rank // 2}" for rank in range(4)}
    assert job.notes == ["rank 3 on h2 failed first, with exit code 1: RuntimeError: planted"]
    assert job.lines[-1] == "h2:3 | RuntimeError: planted"
    for host in (1, 2):
        hosts.await_nothing(host)


def test_a_dead_host_is_one_line_and_nothing_is_started(hosts, tmp_path):
    hosts.lab.kill(2)
    try:
        job = Job(hosts, hosts.describe(), ROOT / "setup.py")
        assert job.run() == EXIT_NOT_STARTED
    finally:
        hosts.boot(2)
    address = hosts.lab.address(2)
    why = f"h2: cannot be reached: ssh: connect to host {address} port {PORT}: Connection refused: start it, or take"
    assert job.notes[0].startswith(why) and job.notes[1:] == ["not started: 1 thing is wrong, see above"]
    hosts.await_nothing(1)


def test_another_version_of_gnnsys_or_torch_is_named_with_its_host(hosts, tmp_path):
    other = tmp_path / "other"
    for room in ("launch", "observe"):
        shutil.copytree(ROOT / "gnnsys" / room, other / "gnnsys" / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "gnnsys" / "__init__.py", other / "gnnsys")
    (other / "torch-9.9.dist-info").mkdir()
    (other / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={other} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = Job(hosts, hosts.describe(h2=f"python={python}"), ROOT / "setup.py")
    assert job.run() == EXIT_NOT_STARTED
    gnnsys, torch, last = job.notes
    assert gnnsys.startswith("h2: gnnsys is ") and " on h1: install the same gnnsys there" in gnnsys
    assert torch.startswith("h2: torch is 9.9, and ") and last == "not started: 2 things are wrong, see above"


@pytest.fixture(scope="module")
def own_disks(hosts, tmp_path_factory):
    """A folder for each host, in which the same relative path means its own disk, and one with two parts for both."""
    from gnnsys.graph import sbm
    from gnnsys.partition import partition_graph

    folder = tmp_path_factory.mktemp("disks")
    partition_graph(sbm(500), 2, folder / "parts")
    for host in hosts.lab.names:
        (folder / host).mkdir()
        (folder / host / "gnnsys").symlink_to(ROOT / "gnnsys")
        (folder / host / "train.py").write_text("raise SystemExit(5)")
    return folder


def test_a_missing_part_and_a_changed_byte_are_named_with_their_host_and_file(hosts, own_disks):
    for host, part in (("h1", 0), ("h2", 1)):
        target = own_disks / host / "data"
        target.mkdir()
        shutil.copy(own_disks / "parts" / "manifest.json", target)
        shutil.copytree(own_disks / "parts" / f"part-000{part}", target / f"part-000{part}")
    file = hosts.describe(**{host: f"workdir={own_disks / host}" for host in ("h1", "h2")})

    def told() -> list[str]:
        job = Job(hosts, file, Path("train.py"), "data")
        assert job.run() == EXIT_NOT_STARTED
        return job.notes[:-1]

    array = own_disks / "h2" / "data" / "part-0001" / "0001.npy"
    whole = array.read_bytes()
    array.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    remedy = "gnnsys push data --hosts FILE"
    assert told() == [f"h2: data/part-0001/0001.npy does not match its checksum: it was altered: {remedy}"]
    shutil.rmtree(array.parent)
    assert told() == [f"h1: data: no machine has part 1 of 2: {remedy}"]


SERVES = """
import os, sys
import gnnsys
gnnsys.init()
graph = gnnsys.open(sys.argv[2])
where = f"{os.environ['RANK']} on {os.uname().nodename}"
print("rank", where, sys.argv[1], graph.machine, graph.machine_of_part, flush=True)
"""


@pytest.mark.long  # what is told to whom: test_launch_plan.py
def test_a_plan_says_who_takes_part_and_who_serves_what(hosts, own_disks, tmp_path):
    """The second host is first here, and serves the second part, though both have both on a disk that they share."""
    (tmp_path / "serves.py").write_text(SERVES)
    digest = read_listing(own_disks / "parts").digest
    planned = (PlannedHost(name="h2", num_ranks=2, parts=(1,)), PlannedHost(name="h1", num_ranks=1, parts=(0,)))
    plan = LaunchPlan(hosts=planned, parts_digest=digest, arguments=("word",))
    (tmp_path / "plan.json").write_text(plan.text())
    options = ["--hosts", str(hosts.describe()), "--ssh", " ".join(hosts.ssh), "--connect-timeout", "120"]
    options += ["--plan", str(tmp_path / "plan.json"), str(tmp_path / "serves.py"), str(own_disks / "parts")]
    command = [sys.executable, "-m", "gnnsys.cli", "launch", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_AFTER)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "h1:2 | rank 2 on h1 word 1 [1, 0]",
        "h2:0 | rank 0 on h2 word 0 [1, 0]",
        "h2:1 | rank 1 on h2 word 0 [1, 0]",
    ]


def test_hosts_that_cannot_reach_each_other_are_named_both_ways(hosts):
    job = Job(hosts, hosts.describe(h2=f"address={NOWHERE}"), ROOT / "setup.py")  # ssh goes to h2 all the same
    assert job.run() == EXIT_NOT_STARTED
    assert {note.split(" (")[0] for note in job.notes[:-1]} == {
        "h1: cannot open a connection to h2",
        "h2: cannot open a connection to h2",
    }
    assert all("let hosts connect to each other in the firewall, or set address for h2" in n for n in job.notes[:-1])


SLEEPS = """
import os, pathlib, subprocess, sys, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(sys.argv[1], "up-" + os.uname().nodename).touch()
time.sleep(1000)
"""


FLOODS = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    os.write(1, b"x" * 300 + b"\\n")
    os.write(2, b"\\x1e3\\x1f\\xff" * 50)
"""


@pytest.fixture(params=["plain", pytest.param("torchrun", marks=pytest.mark.long)])
def described(request, hosts, tmp_path):
    """A hosts file whose agents run the script under torchrun, or by itself: enough to see who ends with whom.

    Under torchrun it prints as fast as it can and does not heed SIGTERM, else it sleeps.
    """
    is_plain = request.param == "plain"
    (tmp_path / "sleeps.py").write_text(SLEEPS if is_plain else SLEEPS.replace("time.sleep(1000)", FLOODS))
    if not is_plain:
        return hosts.describe()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {ROOT}/tests/launch/plain_agent.py\n")
    python.chmod(0o755)
    return hosts.describe(**{host: f"python={python}" for host in hosts.lab.names})


def are_up(folder: Path) -> bool:
    return all((folder / f"up-{host}").exists() for host in ("h1", "h2"))


def test_a_launcher_that_is_killed_leaves_nothing_on_any_host(hosts, described, tmp_path):
    options = ["--hosts", str(described), "--ssh", " ".join(hosts.ssh), "--connect-timeout", "120", "--grace", "1"]
    command = [sys.executable, "-m", "gnnsys.cli", "launch", *options, str(tmp_path / "sleeps.py"), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        await_true(lambda: are_up(tmp_path), "two ranks")
        assert all(any("sleep 1000" in line for line in hosts.processes(host)) for host in (1, 2))
        launcher.send_signal(signal.SIGKILL)
    for host in (1, 2):
        hosts.await_nothing(host)


@pytest.mark.parametrize("how", ["power", "cable"])
def test_a_host_that_dies_in_the_middle_of_a_job_ends_it_on_the_others(hosts, described, tmp_path, how):
    job = Job(hosts, described, tmp_path / "sleeps.py", tmp_path, lost_after=5.0, grace=1.0)

    def break_it() -> None:
        await_true(lambda: are_up(tmp_path), "two ranks")
        hosts.lab.kill(2) if how == "power" else hosts.lab.cut(2)

    breaking = threading.Thread(target=break_it)
    breaking.start()
    try:
        assert job.run() == EXIT_HOST_LOST
    finally:
        breaking.join()
        hosts.await_nothing(1)
        hosts.await_nothing(2)  # where its cable was pulled its agent has ended by itself
        hosts.boot(2) if how == "power" else hosts.lab.heal(2)
    (note,) = job.notes
    assert note.startswith("h2 was lost: it") and note.endswith("; the job was ended on the other hosts")
