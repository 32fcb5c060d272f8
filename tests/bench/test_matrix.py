"""`gnnsys bench suite`: descriptions, cells that fail, and runs that go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnnsys.bench import read_results
from gnnsys.bench.matrix import processes
from gnnsys.bench.matrix.cluster import ClusterOptions
from gnnsys.bench.matrix.description import make_description, read_description, shipped_suites
from gnnsys.bench.matrix.processes import Ended, reason_of_output, run_with_deadline
from gnnsys.cli import main
from gnnsys.graph import sbm
from gnnsys.lab import available
from gnnsys.partition import partition_graph

TINY = {"name": "tiny", "datasets": ["parts"], "samplers": ["3,3"], "repeats": 2, "deadline": 60}
SMALL_MODEL = {"batch_size": 8, "hidden": 8, "steps": 3}


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("matrix") / "parts"
    partition_graph(sbm(400, num_classes=4, separation=6.0, seed=1), 1, out, edge_ids=False)
    return out


# --- descriptions


def test_cells_are_the_product_of_the_axes(parts: Path):
    told = TINY | {
        "models": ["GraphSAGE", "GAT"], "samplers": ["3,3", "labor 5"], "trainers": [1, 2],
        "options": {"a": None, "b": {"hidden": 32}}, "defaults": {"hidden": 16},
    }  # fmt: skip
    cells = make_description(told, parts.parent).cells
    assert len(cells) == 16 == len({cell.file_name for cell in cells})
    assert (cells[0].name, cells[0].options.hidden) == ("parts/GraphSAGE/3,3/1x1/a", 16)
    assert (cells[-1].name, cells[-1].options.hidden) == ("parts/GAT/labor 5/1x2/b", 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ["Sage"]}, "there is no model 'Sage'; choose from: GraphSAGE, GCN, GAT, GIN"),
        ({"datasets": ["no-such"]}, "there is no dataset 'no-such'; choose one such as sbm-20k"),
        ({"datasets": ["rmat-1k"]}, "there is no dataset 'rmat-1k'"),
        ({"datasets": []}, "datasets must be a list with at least one entry"),
        ({"modles": ["GCN"]}, "there is no key 'modles'; choose from: name, where"),
        ({"options": {"a": {"hiden": 3}}}, "there is no option 'hiden'; choose from: training, loading"),
        ({"options": {"a": {"loading": "fast"}}}, "there is no loading 'fast'; choose one of: synchronous"),
        ({"options": {"a": {"hidden": 0}}}, "hidden must be a whole number >= 1, got 0"),
        ({"options": {"a": {"accuracy": 90}}}, "accuracy must be a number above 0 and at most 1, got 90"),
        ({"options": {"a": {"rate": "1gbit"}}}, "rate and cpu are of hosts of the lab: write `where: lab`"),
        ({"options": ["a"]}, "options must be a mapping of names"),
        ({"samplers": ["saint 3"]}, "there is no sampler 'saint'; choose from: neighbor, labor"),
        ({"samplers": ["3;4"]}, 'a sampler is written "15,10"'),
        ({"samplers": ["3,0"]}, "fanouts must be >= 1, or -1 for all"),
        ({"where": "moon"}, "there is no place 'moon'; choose one of: local, lab"),
        ({"hosts": [2]}, "hosts [2]: one machine is one host"),
        ({"trainers": [0]}, "trainers must be whole numbers >= 1, got 0"),
        ({"deadline": "soon"}, "deadline must be a positive number of seconds"),
        ({"models": ["GCN", "GCN"]}, "twice the same cell: parts/GCN"),
        ({"name": None}, "name must be a text"),
        ({"name": "../mine"}, "name must be a text that a folder can be called by, got '../mine'"),
        ({"samplers": [15, 10]}, 'a sampler is a text, "15,10" with quotation marks for two layers, got 15'),
        ({"options": {"a": {"device": "gpu"}}}, "device must be one that torch knows, cpu or cuda, got 'gpu'"),
        ({"options": {"a": {"training": "whole"}}}, "there is no training 'whole'; choose one of: mini-batch, full-"),
        ({"options": {"a": {"schedule": "inter-layer"}}}, "schedule is of `training: full-graph`, and has no meaning"),
        ({"options": {"a": {"training": "replicated", "steps": 3}}}, "steps is of `training: mini-batch`, and has no"),
        ({"options": {"a": {"training": "full-graph", "bins": 0}}}, "bins must be a whole number >= 1, got 0"),
        (
            {"options": {"a": {"training": "full-graph"}}, "samplers": ["labor 3,3"]},
            "option 'a' trains on the whole graph and takes of a sampler its layers alone",
        ),
        ({"samplers": ["ladies -1"]}, "fanouts must be >= 1, got 'ladies -1'"),
        ({"samplers": ["guided 3"], "defaults": {"guide": {"nods": True}}}, "a guide has no 'nods'; choose from: eps"),
        ({"samplers": ["guided 3"], "defaults": {"guide": {"eps": "much"}}}, "guide {'eps': 'much'}: "),
        ({"samplers": ["guided columns 3"], "defaults": {"guide": {"num_features": 1}}}, "guides nothing"),
        ({"options": {"a": {"guide": {"every": 10}}}}, "guide is of a guided sampler"),
        ({"where": "lab", "launcher": ["srun"]}, "launcher stands in the place of torchrun on this machine"),
        ({"hosts_file": "hosts"}, "hosts_file is of a cluster: write `where: cluster`"),
        ({"where": "cluster"}, "a cluster has either `hosts_file: FILE` (or --hosts FILE) or `slurm: true`"),
        ({"where": "cluster", "slurm": True, "hosts_file": "hosts"}, "a cluster has either"),
        ({"where": "cluster", "slurm": "yes"}, "slurm must be true or false, got 'yes'"),
        ({"where": "cluster", "slurm": True}, "there is no Slurm allocation here: run this inside salloc or sbatch"),
        ({"where": "cluster", "hosts_file": "gone"}, "there is no hosts file "),
        ({"where": "cluster", "hosts_file": "h", "parts_on_hosts": "x"}, "parts_on_hosts must be an absolute path"),
        ({"where": "cluster", "hosts_file": "h", "defaults": {"cpu": 1.0}}, "rate and cpu are of hosts of the lab"),
    ],
)
def test_what_a_description_has_wrong_is_told_in_one_line(parts: Path, tmp_path: Path, capsys, change, message):
    (tmp_path / "parts").symlink_to(parts)
    file = tmp_path / "suite.json"
    file.write_text(json.dumps(TINY | change))
    assert main(["bench", "suite", str(file), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_mapping_of_datasets_gives_labels_to_long_names(parts: Path):
    (cell,) = make_description(TINY | {"datasets": {"small": "sbm-1k:num_classes=4"}}, parts).cells
    assert (cell.name, cell.dataset) == ("small/GraphSAGE/3,3/1x1/default", "sbm-1k:num_classes=4")


def test_the_suites_that_come_with_gnnsys_can_be_read_by_name_and_say_what_they_reproduce():
    files = shipped_suites()
    assert {"distdgl-ablation", "distdgl-scaling", "one-machine", "g3-scaling", "dgs-scaling"} <= set(files)
    for name, file in files.items():
        described = read_description(Path(name))
        assert described.name == name and len(described.cells) > 1
        if not name.startswith("one-"):
            paper = {"distdgl": "DistDGLv2", "g3": "G3", "dgs": "DGS"}[name.split("-")[0]]
            assert re.match(rf"# {paper}\b.*(figures?|table) \d", file.read_text())
    with pytest.raises(ValueError, match="gone is not there, and no suite of gnnsys is called so: dgs-scaling"):
        read_description(Path("gone"))


def test_the_name_of_a_suite_without_the_word_before_it_is_told(capsys):
    assert main(["bench", "one-machine"]) == 2
    assert "one-machine is a matrix of training jobs: write `gnnsys bench suite one-machine`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["suite", "one-machine", "--kind", "scaling"], "bench suite does not take --kind; it takes: --out, --only"),
        (["suite", "one-machine", "--lab"], "bench suite does not take --lab"),
        (["suite", "one-machine", "--quick"], "bench suite does not take --quick"),
        (["suite", "one-machine", "--tolerance", "0"], "bench suite does not take --tolerance"),
        (["compare", "a", "b", "--out", "c"], "bench compare does not take --out; it takes: --tolerance, --json"),
        (["compare", "a", "b", "--check"], "bench compare does not take --check"),
        (["plot", "a", "--json", "b"], "bench plot does not take --json; it takes: --kind, --out"),
        (["plot", "a", "--set", "b=1"], "bench plot does not take --set"),
        (["ops", "--hosts", "h"], "bench ops does not take --hosts; it takes: --only, --quick"),
        (["ops", "--retry"], "bench ops does not take --retry"),
        (["ops", "--rounds", "0"], "bench ops does not take --rounds"),
        (["ops", "--against", "c", "--check"], "bench ops --against does not take --check; it takes: --against, --ro"),
    ],
)
def test_options_that_are_not_read_are_refused(capsys, words: list[str], message: str):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_yaml_says_the_same_as_json(parts: Path, tmp_path: Path):
    (tmp_path / "parts").symlink_to(parts)
    (tmp_path / "a.json").write_text(json.dumps(TINY))
    (tmp_path / "a.yaml").write_text(
        'name: tiny\ndatasets: [parts]\nsamplers: ["3,3"]\nrepeats: 2\ndeadline: 60  # seconds\n'
    )
    assert read_description(tmp_path / "a.json").digest == read_description(tmp_path / "a.yaml").digest
    for text in ("name: a\nmodels: [GCN]\nmodels: [GAT]\n", "name: a\ndefaults: {models: 1, models: 2}"):
        (tmp_path / "b.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"b\.yaml is not YAML: 'models' is there twice"):
            read_description(tmp_path / "b.yaml")
    (tmp_path / "b.json").write_text('{"name": "a", "name": "b"}')
    with pytest.raises(ValueError, match=r"b\.json is not JSON: 'name' is there twice"):
        read_description(tmp_path / "b.json")
    (tmp_path / "b.yaml").write_text("name: [")
    with pytest.raises(ValueError, match=r"b\.yaml is not YAML"):
        read_description(tmp_path / "b.yaml")


# --- running cells. The launcher is a program that does what a job does to the runner: files, lines, exit codes.

JOB = """
import json, os, sys, time
cell, result = json.load(open(sys.argv[-2])), sys.argv[-1]
print("ran", cell["option"], file=open(sys.argv[1], "a"))
if cell["option"] == "raises":
    print("[rank1]: Traceback (most recent call last):\\n[rank1]: ValueError: no rows for node 7")
    print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: again")
    sys.exit(3)
if cell["option"] == "hangs":
    if os.fork() == 0:
        os.setsid()
    time.sleep(1000)
fetch = {"batches": 3, "busy": 0.1, "bytes_remote": 2_000_000}
repeat = {"seconds": 2.0, "epochs": 1, "seeds": 100, "waited": 0.5, "cpu_seconds": 1.5, "curve": []}
repeat["stages"] = {"fetch": fetch}
json.dump({"device": "cpu", "world_size": 2, "ranks": [[repeat] * 5, [repeat] * 5]}, open(result, "w"))
"""


@pytest.fixture
def suite(parts: Path, tmp_path: Path):
    """Writes a suite whose cells are run by JOB, and returns how often each has run."""
    (tmp_path / "parts").symlink_to(parts)
    (tmp_path / "job.py").write_text(JOB)

    def write(*options: str, name: str = "tiny", deadline: float = 60) -> Path:
        launcher = [sys.executable, "-S", "-E", str(tmp_path / "job.py"), str(tmp_path / "ran.txt")]
        told = {**TINY, "name": name, "deadline": deadline, "launcher": launcher}
        told |= {"options": {option: {} for option in options}}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(told))
        return file

    return write


def has_run(folder: Path) -> list[str]:
    return (folder / "ran.txt").read_text().split()[1::2]


def test_a_cell_that_fails_is_a_row_and_a_finished_one_is_not_run_again(suite, tmp_path: Path, capsys):
    file, out = suite("good", "raises", "later"), tmp_path / "out"
    told = ["bench", "suite", str(file), "--out", str(out)]
    assert main([*told, "--only", "good|raises"]) == 0
    said = capsys.readouterr().out
    assert "1 cells done, 1 failed" in said
    assert "failed: ended with 3: ValueError: no rows for node 7" in said
    assert main([*told, "--check"]) == 1
    assert has_run(tmp_path) == ["good", "raises", "later"]
    assert main([*told, "--retry"]) == 0
    assert has_run(tmp_path) == ["good", "raises", "later", "raises"]
    assert "(before)" in capsys.readouterr().out


def test_the_json_of_a_cell_has_figures_versions_hardware_git_and_stages(suite, tmp_path: Path):
    assert main(["bench", "suite", str(suite("good")), "--out", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out" / "cells").glob("*.json")
    told = json.loads(file.read_text())
    assert told["measures"]["seeds/s"] == {"more_is_better": True, "samples": [100.0] * 5}
    assert told["measures"]["MB of remote rows/epoch"]["samples"] == [4.0] * 5
    assert told["measures"]["% waiting"]["samples"] == [25.0] * 5
    assert told["measures"]["CPU s/epoch"] == {"more_is_better": False, "samples": [3.0] * 5}
    assert told["stages"]["fetch"] == {"batches": 30, "busy": pytest.approx(1.0), "bytes_remote": 20_000_000}
    environment = told["environment"]
    assert {"torch", "python", "numpy"} <= set(environment["versions"]) and environment["cores"] >= 1
    assert environment["git"] is None or len(environment["git"]["commit"]) == 40
    assert main(["bench", "compare", str(tmp_path / "out"), str(tmp_path / "out")]) == 0
    assert set(read_results(tmp_path / "out").cases) == {
        "parts/GraphSAGE/3,3/1x1/good/seeds/s",
        "parts/GraphSAGE/3,3/1x1/good/CPU s/epoch",
        "parts/GraphSAGE/3,3/1x1/good/MB of remote rows/epoch",
    }


def test_a_machine_that_was_busy_is_told_by_compare(suite, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert main(["bench", "suite", str(suite("good")), "--out", str(out)]) == 0
    (cell,) = (out / "cells").glob("*.json")
    for load, is_told in ((0.5, False), (4.0, True)):
        told = json.loads(cell.read_text())
        told["environment"] |= {"load": [load, 0.0, 0.0], "cores": 2}
        cell.write_text(json.dumps(told))
        assert main(["bench", "compare", str(out), str(out)]) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: the machine")]
        words = "2.0 programs wanted each core; times may differ"
        assert notes == [f"note: the machine was busy {when}: {words}" for when in ("before", "after") if is_told]


def test_a_cell_that_ran_before_and_fails_now_is_worse(suite, tmp_path: Path, capsys):
    before, after = tmp_path / "before", tmp_path / "after"
    assert main(["bench", "suite", str(suite("good")), "--out", str(before)]) == 0
    (tmp_path / "job.py").write_text("raise SystemExit('OSError: gone')")
    assert main(["bench", "suite", str(suite("good")), "--out", str(after)]) == 0
    assert main(["bench", "compare", str(before), str(after)]) == 1
    assert "did not run  (ended with 1: OSError: gone)" in capsys.readouterr().out


def test_results_of_another_suite_are_refused(suite, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert main(["bench", "suite", str(suite("good")), "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["bench", "suite", str(suite("good", name="other")), "--out", str(out)]) == 2
    assert "has results of suite 'tiny', not of 'other': give another folder by --out" in capsys.readouterr().err
    assert main(["bench", "suite", str(suite("good", "more")), "--out", str(out)]) == 2
    assert "has results of another version of it" in capsys.readouterr().err
    assert main(["bench", "suite", str(suite("good")), "--out", str(tmp_path)]) == 2
    assert "is neither empty nor results of a suite" in capsys.readouterr().err


def test_two_processes_do_not_write_one_result_folder(suite, tmp_path: Path, capsys):
    """The second is told who has it; the lock of a process that was killed holds nobody up."""
    file, out = suite("good"), tmp_path / "out"
    told = ["bench", "suite", str(file), "--out", str(out)]
    program = (
        "import sys; from pathlib import Path; from gnnsys.bench.matrix.result_folder import ResultFolder\n"
        "from gnnsys.bench import read_description\n"
        "with ResultFolder.claimed(Path(sys.argv[2]), read_description(Path(sys.argv[1]))):\n"
        "    print('has it', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, str(file), str(out)], **pipes) as first:
        assert first.stdout.readline() == "has it\n"
        assert main(told) == 2
        said = capsys.readouterr().err
        assert f"{out} is being written by process {first.pid} on " in said and said.count("\n") == 1
        first.kill()
    assert main(told) == 0 and has_run(tmp_path) == ["good"]


def test_a_cell_past_its_deadline_is_a_row_and_leaves_no_process(suite, tmp_path: Path, capsys):
    assert main(["bench", "suite", str(suite("hangs", deadline=0.5)), "--out", str(tmp_path / "out")]) == 0
    assert "failed: ran past its deadline of 0.5 s" in capsys.readouterr().out
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path) in command_line(int(pid))]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_process_that_outlives_its_command_is_ended():
    """One with a session of its own, as torchrun's ranks have."""
    child = "os.setsid(); os.close(1); os.close(2); time.sleep(1000)"
    program = f"import os, time\nif os.fork() == 0:\n {child}"
    assert run_with_deadline([sys.executable, "-S", "-E", "-c", program], 30.0, {}).code == 0
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and child in command_line(int(pid))]


def test_a_command_ends_with_the_process_that_runs_it():
    """One that is killed by -9 cannot end anything itself."""
    child = "import os; print(os.getpid(), flush=True); import time; time.sleep(1000)"
    program = (
        f"import runpy, sys; run = runpy.run_path({processes.__file__!r})['run_with_deadline']\n"
        f"run([sys.executable, '-S', '-c', {child!r}], 1000, {{}}, heard=lambda line: print(line, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        pid = int(runner.stdout.readline())
        assert child in command_line(pid)
        runner.kill()
    deadline = time.monotonic() + 30
    while child in command_line(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_cells_of_different_commits_are_told(suite, tmp_path: Path, capsys):
    file, out = suite("good", "later"), tmp_path / "out"
    assert main(["bench", "suite", str(file), "--out", str(out), "--only", "good"]) == 0
    (cell,) = (out / "cells").glob("*.json")
    told = json.loads(cell.read_text())
    told["environment"]["git"] = {"commit": "0" * 40, "is_changed": False}
    cell.write_text(json.dumps(told))
    assert main(["bench", "suite", str(file), "--out", str(out)]) == 0
    assert "note: cells are of different commits: 1 of 000000000000, 1 of " in capsys.readouterr().out


def test_the_script_for_clusters_writes_a_suite_for_the_nodes_of_an_allocation(tmp_path: Path):
    """gnnsys is a stand-in: what is seen is the description."""
    (tmp_path / "gnnsys").write_text('#!/bin/sh\necho "$@" >> said.txt\n')
    (tmp_path / "gnnsys").chmod(0o755)
    script = Path(__file__).parents[2] / "launch" / "bench_cluster.sh"
    slurm = {"SLURM_JOB_NUM_NODES": "5", "SLURM_GPUS_ON_NODE": "8", "PARTS_ON_NODES": "/scratch/me"}
    env = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", script, "sbm-20k", "out"], cwd=tmp_path, env=env, check=True, timeout=60)
    assert (tmp_path / "said.txt").read_text() == "bench suite out.yaml --out out\nbench plot out\n"
    described = read_description(tmp_path / "out.yaml")
    assert {(cell.hosts, cell.trainers) for cell in described.cells} == {(1, 8), (2, 8), (4, 8)}
    assert described.cluster == ClusterOptions(slurm=True, parts_on_hosts="/scratch/me")
    outside = subprocess.run(["bash", script, "sbm-20k"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert outside.returncode != 0 and "there is no Slurm allocation" in outside.stderr


def test_the_reason_is_the_first_error_of_a_rank():
    output = "[rank0]: RuntimeError: x is gone\nShardLost: later\ntorch.distributed.DistError: agent"
    assert reason_of_output(Ended(1, output), 9) == "ended with 1: RuntimeError: x is gone"
    assert reason_of_output(Ended(-9, "last words\n\n"), 9) == "ended with -9: last words"
    assert reason_of_output(Ended(None, output), 9) == "ran past its deadline of 9 s"


@pytest.mark.long
def test_a_suite_runs_under_torchrun(tmp_path: Path):
    told = TINY | {"datasets": ["sbm-1k"], "trainers": [2], "defaults": SMALL_MODEL, "deadline": 300}
    (tmp_path / "suite.json").write_text(json.dumps(told))
    out = tmp_path / "out"
    assert main(["bench", "suite", str(tmp_path / "suite.json"), "--out", str(out), "--check"]) == 0
    (case,) = [c for n, c in read_results(out).cases.items() if n.endswith("seeds/s")]
    assert len(case.ours) == 2 and min(case.ours) > 0


@pytest.mark.long
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_a_suite_runs_on_hosts_of_the_lab(tmp_path: Path):
    told = TINY | {"datasets": ["sbm-1k"], "where": "lab", "hosts": [2], "deadline": 300}
    told |= {"options": {"random": {"partition": "random", "rate": "100mbit"}}, "defaults": SMALL_MODEL}
    (tmp_path / "suite.json").write_text(json.dumps(told))
    out = tmp_path / "out"
    assert main(["bench", "suite", str(tmp_path / "suite.json"), "--out", str(out), "--check"]) == 0
    (file,) = (out / "cells").glob("*.json")
    measures = json.loads(file.read_text())["measures"]
    rows, link = (measures[name]["samples"] for name in ("MB of remote rows/epoch", "MB on the busiest link/epoch"))
    assert len(rows) == len(link) == 2 and min(rows) > 0 < min(link)
