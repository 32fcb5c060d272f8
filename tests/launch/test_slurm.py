"""`gnnsys launch --slurm`: nodes of an allocation are hosts like any others, reached by srun; a real Slurm runs it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.launch import SRUN, Host, SlurmOptions, batch_file, slurm_hosts
from gnnsys.launch.local_facts import num_gpus
from gnnsys.launch.slurm import expand_nodes, srun_command
from tests.launch.slurm_lab import needs_slurm, num_idle, slurm_lab
from tests.support.processes import ROOT, await_true


def test_a_list_of_nodes_is_expanded():
    assert expand_nodes("h1") == ["h1"]
    assert expand_nodes("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_nodes("r[1-2]n[1,3]") == ["r1n1", "r1n3", "r2n1", "r2n3"]
    hosts = slurm_hosts(4, {"SLURM_JOB_NODELIST": "a[1-2]"})
    assert [(host.name, host.slots) for host in hosts] == [("a1", 4), ("a2", 4)]


def test_the_batch_file_runs_the_same_command_inside_its_allocation(capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    options = ["--slurm", "--nodes", "2", "--ranks", "4", "--sbatch=--time=1:00:00", "--print", "--restarts", "3"]
    assert main(["launch", *options, "train.py", "parts/", "--name", "two words"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/sh"
    assert (
        "#SBATCH --nodes=2" in lines
        and "#SBATCH --time=1:00:00" in lines
        and "#SBATCH --job-name=gnnsys-train" in lines
    )
    assert lines[-1].startswith(f"exec {sys.executable} -m gnnsys.cli launch --slurm --ranks=4 --restarts=3 ")
    assert lines[-1].endswith("train.py parts/ --name 'two words'")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    begin, *inside = shlex.split(lines[-1].partition(" launch ")[2])
    assert main(["launch", begin, "--print", *inside]) == 0
    assert capsys.readouterr().out.splitlines()[::2] == [
        "n1: ranks 0 to 3",
        "n2: ranks 4 to 7",
        "again on all hosts where it fails: 3 times at most",
    ]
    assert main(["launch", "--slurm", "--sbatch=--time=1:00:00", "train.py"]) == 2
    assert "--sbatch is for a new allocation: say --nodes N, or leave it away" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slurm"], "there is no Slurm allocation here: say --nodes N for a new one, or use salloc"),
        (["--slurm", "--nodes", "0"], "--nodes must be at least 1, got 0"),
        (["--slurm", "--nodes", "1", "--sbatch", "gpu"], "--sbatch takes options such as --time=1:00:00, got 'gpu'"),
    ],
)
def test_what_slurm_cannot_do_is_one_line(options, message, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["launch", *options, "train.py"]) == 2
    assert message in capsys.readouterr().err


def test_an_option_of_a_batch_job_stays_one():
    options = SlurmOptions(job_name="my job # 1", arguments=("--comment=it's", "--time=1:00:00"))
    lines = [line for line in batch_file(["x"], options, "/").splitlines() if line.startswith("#SBATCH ")]
    words = [shlex.split(line.removeprefix("#SBATCH ")) for line in lines]
    assert words[0] == ["--job-name=my job # 1"] and words[-2:] == [["--comment=it's"], ["--time=1:00:00"]]
    assert lines[-1] == "#SBATCH --time=1:00:00"
    for wrong in ({"job_name": "a\nrm"}, {"arguments": ("--a\n#SBATCH --b",)}, {"job_name": ""}):
        with pytest.raises(ValueError, match="is one line, got"):
            SlurmOptions(**wrong)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 4),
        ({"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
        ({"SLURM_STEP_GPUS": "1,3", "SLURM_JOB_GPUS": "0,1,3"}, 2),
        ({"SLURM_JOB_GPUS": "0,1,3"}, 3),
        ({"SLURM_JOB_ID": "7"}, 4),  # a cluster that does not count GPUs
        ({"SLURM_GPUS_ON_NODE": "3", "CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,GPU-1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c,MIG-d,MIG-e"}, 5),
    ],
)
def test_a_rank_for_each_gpu_of_the_allocation_not_of_the_node(tmp_path, env, expected):
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    for number in (4, 5):
        (tmp_path / f"nvidia{number}").symlink_to("/no/such/device")  # cannot be opened, as outside of a control group
    (tmp_path / "nvidiactl").touch()
    assert num_gpus(env, devices=tmp_path, driver=tmp_path / "none") == expected


def test_what_an_allocation_has_for_its_tasks_is_not_for_ours():
    env = {"SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS": "a b", "SLURM_JOB_ID": "7"}
    command = srun_command(["srun", "--quiet"], Host(name="n1", gpus=3), "echo $SLURM_CPUS_PER_TASK $SLURM_GPUS", env)
    assert command[:3] == ["env", "--unset=SLURM_CPUS_PER_TASK", "--unset=SLURM_GPUS"]
    assert command[3:7] == ["srun", "--quiet", "--gpus=3", "--nodelist=n1"]
    assert subprocess.check_output(command[7:], text=True) == "8 a b\n"
    assert srun_command(SRUN, Host(name="n1"), "true", {}) == [*SRUN, "--nodelist=n1", "sh", "-c", "true"]


def test_gpus_whose_devices_nobody_has_made_are_the_drivers(tmp_path):
    driver, devices = tmp_path / "driver", tmp_path / "dev"
    for folder in (devices, driver / "0000:01:00.0", driver / "0000:02:00.0"):
        folder.mkdir(parents=True)
    assert num_gpus({}, devices=devices, driver=driver) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0"}, devices=devices, driver=tmp_path / "none") == 0


SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
sys.exit(6 if os.environ["RANK"] == sys.argv[1] else 0)
"""


# The same launcher over ssh: test_ssh.py. Needs Slurm, which few machines have.
@pytest.mark.long
@needs_slurm
def test_a_real_slurm_runs_a_job_of_two_tasks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with slurm_lab(tmp_path) as (lab, env):
        env = {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        launch = [sys.executable, "-m", "gnnsys.cli", "launch", "--slurm", "--ranks", "1", "--connect-timeout", "120"]
        allocated = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", *launch, str(tmp_path / "script.py")]
        for failing, code in (("none", 0), ("1", 6)):
            result = lab.exec(1, [*allocated, failing], env=env, check=False, timeout=170)
            assert result.code == code, result.output
            for rank in range(2):
                assert f"h{rank + 1}:{rank} | rank {rank} of 2 on h{rank + 1}" in result.output
        assert "gnnsys launch: rank 1 on h2 failed first, with exit code 6" in result.output
        by_gpus = [word for word in launch if word not in ("--ranks", "1")]
        for asked, ranks in (
            (["--gpus-per-node=2"], {"h1": 2, "h2": 2}),
            (["--ntasks-per-node=3", "--gpus-per-task=1"], {"h1": 3, "h2": 3}),
            (["--gpus=4"], None),  # in all: Slurm decides how many on which node
        ):
            allocated = ["salloc", "--quiet", "--nodes=2", *asked, *by_gpus, str(tmp_path / "script.py"), "none"]
            result = lab.exec(1, allocated, env=env, check=False, timeout=170)
            said = sorted(line.split(" | ")[1] for line in result.output.splitlines() if " | rank " in line)
            found = Counter(line.split()[-1] for line in said)
            assert result.code == 0 and (found == ranks or (ranks is None and found.total() == 4)), result.output
        batch = [*launch, "--nodes", "2", f"--sbatch=--output={tmp_path}/out"]
        said = lab.exec(1, [*batch, str(tmp_path / "script.py"), "none"], env=env).output
        assert said.startswith("submitted batch job ")
        await_true(lambda: (tmp_path / "out").exists() and num_idle(lab, env) == 2, "the end of the batch job")
        assert "h2:1 | rank 1 of 2 on h2" in (tmp_path / "out").read_text()
        by_hand = ["sbatch", "--wait", f"--output={tmp_path}/by_hand", str(ROOT / "launch" / "slurm.sbatch")]
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        lab.exec(1, [*by_hand, str(tmp_path / "script.py"), "none"], env=env, timeout=170)
        assert "rank 1 of 2 on h" in (tmp_path / "by_hand").read_text()
