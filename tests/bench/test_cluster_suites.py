"""`gnnsys bench suite` on hosts that `gnnsys launch` reaches: parts are sent, failing ranks and hosts are rows."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.bench.matrix.cluster import hosts_for, launch_reason
from gnnsys.bench.matrix.description import read_description
from gnnsys.bench.matrix.processes import Ended
from gnnsys.cli import main
from gnnsys.lab import Lab, available
from gnnsys.launch import read_hosts
from tests.launch.slurm_lab import needs_slurm, slurm_lab
from tests.support.processes import ROOT

SMALL = {"batch_size": 8, "hidden": 8, "steps": 3}
TINY = {"name": "tiny", "datasets": ["sbm-1k"], "samplers": ["3,3"], "repeats": 2, "deadline": 300, "defaults": SMALL}
needs_lab = pytest.mark.skipif(available() is not None, reason=str(available()))


def write(folder: Path, **more: object) -> str:
    file = folder / "suite.json"
    file.write_text(json.dumps({**TINY, **more}))
    return str(file)


# --- before anything runs


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        ("a\nb\n", ["--hosts", "HOSTS"], "hosts: 4 are asked for, and HOSTS has 2: a, b"),
        (
            "a\nb\na\n",
            ["--hosts", "HOSTS"],
            "HOSTS, line 3: host a is there twice: for several ranks on it",
        ),
        ("", ["--hosts", "HOSTS"], "HOSTS names no host"),
        ("a", ["--hosts", "HOSTS", "--slurm"], "give --hosts FILE or --slurm, not both"),
        ("a", ["--slurm"], "there is no Slurm allocation here"),
        ("a", ["--slurm", "--ssh", "ssh -v"], "with slurm hosts are reached by srun: leave ssh away"),
        ("a", ["--ssh", "ssh -v"], "ssh is of a cluster: write `where: cluster`, or give --hosts FILE"),
    ],
)
def test_what_is_wrong_with_hosts_is_told_in_one_line(tmp_path, monkeypatch, capsys, lines, words, message):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "hosts").write_text(lines)
    hosts, out = str(tmp_path / "hosts"), tmp_path / "out"
    told = ["bench", "suite", write(tmp_path, hosts=[1, 4], where="lab"), "--out", str(out)]
    assert main([*told, *(word.replace("HOSTS", hosts) for word in words)]) == 2
    said = capsys.readouterr().err
    assert message.replace("HOSTS", hosts) in said and said.count("\n") == 1
    assert not out.exists()


def test_the_command_line_moves_a_suite_of_the_lab_to_a_cluster(tmp_path: Path):
    """Its limits are left out, which is told; results of the two are not mixed."""
    in_lab = read_description(Path("distdgl-scaling"))
    moved = read_description(Path("distdgl-scaling"), {"hosts_file": tmp_path / "hosts", "ssh": "ssh -v"})
    assert (in_lab.where, moved.where) == ("lab", "cluster") and in_lab.digest != moved.digest
    assert [cell.name for cell in moved.cells] == [cell.name for cell in in_lab.cells]
    assert {cell.options.rate for cell in moved.cells} == {None} != {cell.options.rate for cell in in_lab.cells}
    assert moved.notes == ("rate and cpu of this suite are of hosts of the lab: these hosts run as they are",)
    assert moved.cluster is not None and moved.cluster.ssh == "ssh -v"
    elsewhere = read_description(Path("distdgl-scaling"), {"slurm": True})
    assert elsewhere.digest == moved.digest  # hosts may be renamed between two runs


def test_parts_may_be_on_the_hosts_alone(tmp_path: Path):
    told = write(tmp_path, where="cluster", hosts_file="hosts", push=False, datasets={"far": "/data/far/away"})
    (cell,) = read_description(Path(told)).cells
    assert (cell.name, cell.parts) == ("far/GraphSAGE/3,3/1x1/default", "/data/far/away")
    with pytest.raises(ValueError, match="there is no dataset '/data/far/away'"):
        read_description(Path(write(tmp_path, where="cluster", hosts_file="hosts", datasets=["/data/far/away"])))


def test_the_reason_is_in_the_launchers_own_words():
    started = "gnnsys launch: warning: h1: 2 ranks for 1 GPUs: ...\nh1:0 | ValueError: later\n"
    first = "rank 3 on h2 failed first, with exit code 1: RuntimeError: planted"
    assert launch_reason(Ended(1, f"{started}gnnsys launch: {first}\n"), 9.0) == first
    by_torch = first.replace("RuntimeError", "[rank3]: RuntimeError")
    assert launch_reason(Ended(1, f"{started}gnnsys launch: {by_torch}\n"), 9.0) == first
    findings = "gnnsys launch: h2: cannot be reached: no\ngnnsys launch: not started: 1 thing is wrong, see above\n"
    assert launch_reason(Ended(2, started + findings), 9.0) == "h2: cannot be reached: no"
    assert launch_reason(Ended(1, "h1: parts 0: sent\ngnnsys push: h2: disk full\n"), 9.0) == "h2: disk full"
    assert launch_reason(Ended(None, findings), 9.0) == "ran past its deadline of 9 s"
    assert launch_reason(Ended(1, "KeyError: 'x'\n"), 9.0) == "ended with 1: KeyError: 'x'"


def test_the_first_hosts_of_the_file_get_a_slot_for_every_trainer(tmp_path: Path):
    """What a launcher reads is the file's own but for the slots, and for parts, which are of other graphs."""
    lines = f"a user=me port=2222 memory=64G gpus=8 parts=0,2\nb address=10.0.0.2 slots=1 workdir={tmp_path}\nc\n"
    (tmp_path / "hosts").write_text(lines)
    (cell,) = read_description(Path(write(tmp_path, hosts=[2], trainers=[4])), {"hosts_file": tmp_path / "hosts"}).cells
    hosts = read_hosts(tmp_path / "hosts")
    (tmp_path / "hosts.json").write_text(json.dumps(hosts_for(cell, hosts)))
    assert read_hosts(tmp_path / "hosts.json") == [replace(host, slots=4, parts=None) for host in hosts[:2]]


def test_a_host_that_is_not_there_is_a_row_of_each_cell(tmp_path: Path, capsys):
    (tmp_path / "hosts").write_text("near\nfar\n")
    (tmp_path / "ssh").write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    told = ["bench", "suite", write(tmp_path, hosts=[2]), "--hosts", str(tmp_path / "hosts"), "--check"]
    assert main([*told, "--ssh", str(tmp_path / "ssh"), "--out", str(tmp_path / "out")]) == 1
    assert "failed: its parts: far: cannot be reached: no route to host" in capsys.readouterr().out


# --- hosts of the lab, which `launch/lab.py ssh` reaches

PLANT = """
import os
if os.environ.get("RANK") == "3":
    from gnnsys.bench.matrix.rank_trainer import RankTrainer

    def measure(self):
        raise RuntimeError("planted")

    RankTrainer.measure = measure
"""


@pytest.fixture
def cluster(tmp_path: Path):
    """Two hosts, each with a disk of its own at the same place, and what runs a suite on them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with Lab(2) as lab:
        for host in lab.hosts:
            lab.exec(host, f"mount -t tmpfs none {shlex.quote(str(disk))}")
        (tmp_path / "hosts").write_text(f"h1 workdir={ROOT}\nh2 workdir={ROOT}\n")
        ssh = [sys.executable, str(ROOT / "launch" / "lab.py"), "ssh", "--lab", lab.id, "--"]

        def run(*words: str, **more: object) -> tuple[int, dict[str, dict]]:
            suite = write(tmp_path, where="cluster", hosts_file="hosts", parts_on_hosts=str(disk), **more)
            code = main(["bench", "suite", suite, "--ssh", shlex.join(ssh), "--out", str(tmp_path / "out"), *words])
            cells = [json.loads(file.read_text()) for file in (tmp_path / "out" / "cells").glob("*.json")]
            return code, {cell["name"]: cell for cell in cells}

        run.lab, run.disk = lab, disk
        yield run


@pytest.mark.long  # a launcher on this machine: tests/launch/test_local.py; over ssh: tests/launch/test_ssh.py
@needs_lab
def test_a_suite_runs_on_the_hosts_of_a_cluster(cluster, capsys):
    code, cells = cluster("--check", hosts=[1, 2], options={"random": {"partition": "random"}})
    assert code == 0, capsys.readouterr().out
    one, two = (cells[f"sbm-1k/GraphSAGE/3,3/{hosts}x1/random"] for hosts in (1, 2))
    assert list(one["figures"]["hosts"]) == ["h1"] and list(two["figures"]["hosts"]) == ["h1", "h2"]
    for cell, ranks in ((one, 1), (two, 2)):
        assert cell["figures"]["world_size"] == ranks and len(cell["measures"]["seeds/s"]["samples"]) == 2
        assert cell["environment"]["cores"] == cell["figures"]["hosts"]["h1"]["cores"]
    assert max(one["measures"]["MB of remote rows/epoch"]["samples"]) == 0
    assert min(two["measures"]["MB of remote rows/epoch"]["samples"]) > 0
    for host, name in ((1, "part-0000"), (2, "part-0001")):  # each host was sent its own part of the two
        found = cluster.lab.exec(host, f"cd {cluster.disk}/random-2x1-*; ls -d part*").output.split()
        assert found == [name], found


@pytest.mark.long  # how the reason is read: test_the_reason_is_in_the_launchers_own_words
@needs_lab
def test_a_rank_that_raises_is_a_row_with_its_host_and_error_and_the_next_cell_runs(cluster, tmp_path, capsys):
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(PLANT)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={planted}:{ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "hosts").write_text(f"h1 workdir={ROOT}\nh2 workdir={ROOT} python={python}\n")
    code, cells = cluster(hosts=[2], trainers=[2, 1])
    assert code == 0
    failed, done = (cells[f"sbm-1k/GraphSAGE/3,3/2x{trainers}/default"] for trainers in (2, 1))
    assert failed["reason"] == "rank 3 on h2 failed first, with exit code 1: RuntimeError: planted"
    assert (failed["status"], done["status"]) == ("failed", "done")
    assert "1 cells done, 1 failed" in capsys.readouterr().out
    (log,) = (tmp_path / "out" / "logs").glob("*2x2*.log")
    assert "h2:3 | [rank3]: RuntimeError: planted" in log.read_text()


# Over ssh's stand-in: the tests before. Needs Slurm, which few machines have.
@pytest.mark.long
@needs_slurm
def test_a_suite_runs_on_the_nodes_of_an_allocation(tmp_path: Path):
    file, out = write(tmp_path, hosts=[2, 1]), tmp_path / "out"
    with slurm_lab(tmp_path) as (lab, env):
        allocated = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "gnnsys.cli"]
        words = [*allocated, "bench", "suite", file, "--slurm", "--check", "--out", str(out)]
        env = {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = lab.exec(1, words, env=env, check=False, timeout=600)
    assert ended.code == 0 and "2 cells done, 0 failed" in ended.output, ended.output
    found = [list(json.loads(file.read_text())["figures"]["hosts"]) for file in (out / "cells").glob("*.json")]
    assert sorted(found) == [["h1"], ["h1", "h2"]]
