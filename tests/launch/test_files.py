"""The files of launch/ do by hand what `gnnsys launch` does: they are read, and run for real where that is possible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnsys.launch import PodOptions, pytorch_job, read_hosts
from tests.launch.ssh_hosts import PORT, needs_ssh, ssh_hosts
from tests.support.processes import HANGS_AFTER, ROOT

FOLDER = ROOT / "launch"
SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


def test_the_description_of_a_cluster_can_be_read():
    pytest.importorskip("yaml")
    first, second = read_hosts(FOLDER / "cluster.yaml")
    assert (first.name, first.user, first.workdir, second.address) == ("gpu1", "me", "/data/me", "10.0.0.2")
    assert (second.num_ranks(8), first.num_ranks(8), second.memory) == (4, 8, 64 << 30)


def test_the_manifest_is_what_the_command_in_it_prints():
    yaml = pytest.importorskip("yaml")
    options = PodOptions(name="train", image="IMAGE", num_pods=2, num_ranks=4, gpus=4, claim="graph:/data")
    expected = pytorch_job(["/data/train.py", "/data/parts"], options)
    assert yaml.safe_load((FOLDER / "k8s.yaml").read_text()) == expected


@pytest.mark.parametrize("name", ["ssh.sh", "slurm.sbatch"])  # run for real below, and in test_slurm.py
def test_scripts_have_no_mistake_that_a_shell_finds(name):
    assert subprocess.run(["bash", "-n", str(FOLDER / name)]).returncode == 0


@pytest.mark.long  # the same by the launcher: test_ssh.py
@needs_ssh
def test_torchrun_over_ssh_by_hand(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        addresses = [hosts.lab.address(host) for host in hosts.lab.hosts]
        (tmp_path / "hosts").write_text("# two\n" + "\n".join(addresses))
        env = {**os.environ, "SSH": " ".join((*hosts.ssh, "-p", str(PORT))), "PYTHONPATH": str(ROOT)}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        for code in (0, 3):
            words = [str(FOLDER / "ssh.sh"), str(tmp_path / "hosts"), "1", str(tmp_path / "script.py"), str(code)]
            done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=HANGS_AFTER)
            assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
            lines = {line.rstrip("\r") for line in done.stdout.splitlines() if " | rank " in line}
            assert {line.split(" on ")[0].split(" | ")[1] for line in lines} == {"rank 0 of 2", "rank 1 of 2"}
            assert {line.split(" | ")[0] for line in lines} == set(addresses)
            for host in hosts.lab.hosts if code == 0 else ():  # the torchrun of the other host may wait for a while
                hosts.await_nothing(host)
