"""Plans on hosts that share nothing but a wire: they know themselves by name, and some of them run no rank at all."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.lab import Lab, available
from gnnsys.planning import LaunchPlan, PlacedSampler, PlannedHost
from gnnsys.session import ASSISTANTS, Assistants
from tests.session.test_plan import NUM_NODES, PLAN, hosts, make_parts
from tests.support.lab_host import on_host
from tests.support.processes import AGENT, ROOT, processes

needs_lab = pytest.mark.skipif(available() is not None, reason=str(available()))

ON_HOSTS = """
import json, os, socket, sys, gnnsys
os.chdir(os.path.join(sys.argv[1], socket.gethostname()))
with gnnsys.init(timeout=120, process_group=False) as session:
    graph = gnnsys.open("parts")  # it finds the plan
    print("TOLD", json.dumps([socket.gethostname(), graph.parts_here, session.local_rank, graph.num_nodes()]))
"""


ASSIST = """
import sys
from tests.support.spare_servers import keep_spares
keep_spares()
from gnnsys.session import run_assistant
sys.exit(run_assistant())
"""


def forked(lab: Lab, folder: Path, plan: LaunchPlan) -> str:
    """What `Lab.run` does, with agents and ranks that need not import torch."""
    given = [
        f"--nnodes={len(plan.hosts_with_ranks)}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=h1:29444",
        "--rdzv-id=plan",
    ]
    (folder / "agent.py").write_text(AGENT)
    (folder / "assist.py").write_text(ASSIST)
    told = {"GNNSYS_PLAN": plan.line_for_ranks(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    idle = [host for host in plan.hosts if not host.num_ranks]
    if idle:
        endpoints = {host.name: f"tcp://{lab.address(int(host.name[1:]))}:31444" for host in idle}
        told[ASSISTANTS] = Assistants.with_new_key(endpoints).text()
    with processes() as assisting, processes() as running:
        for number, host in enumerate(idle):
            env = on_host(lab, int(host.name[1:])) | told
            assisting.fork(f"assistant on {host.name}", number, folder / "assist.py", [], env)
        for number, host in enumerate(plan.hosts_with_ranks):
            env = on_host(lab, int(host.name[1:])) | told
            words = [
                *given,
                f"--nproc-per-node={host.num_ranks}",
                "--monitor-interval=0.1",
                folder / "program.py",
                folder,
            ]
            running.fork(f"agent of {host.name}", number, folder / "agent.py", words, env)
        ended = running.wait()
    assert all(agent.returncode == 0 for agent in ended), "\n".join(map(str, ended))
    return "\n".join(agent.stdout for agent in ended)


def fresh(lab: Lab, folder: Path, plan: LaunchPlan) -> str:
    (folder / "plan.json").write_text(plan.text())
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    results = lab.run([str(folder / "program.py"), str(folder)], timeout=300, env=env, plan=folder / "plan.json")
    return "\n".join(result.output for result in results)


@needs_lab
@pytest.mark.parametrize("run", [forked, pytest.param(fresh, marks=pytest.mark.long)])
def test_hosts_of_a_lab_find_the_plan_by_their_own_names(tmp_path, run):
    plan = LaunchPlan(hosts=hosts(("h2", 1, (0, 2)), ("h1", 2, (1,))))
    with Lab(hosts=2) as lab:
        for name, parts in (("h1", (1,)), ("h2", (0, 2))):
            path = make_parts(tmp_path / name / "parts", 3)
            for part in {0, 1, 2} - set(parts):
                shutil.rmtree(path / f"part-{part:04d}")
        (tmp_path / "program.py").write_text(ON_HOSTS)
        printed = run(lab, tmp_path, plan)
    told = [json.loads(line.split("TOLD ", 1)[1]) for line in printed.splitlines() if "TOLD" in line]
    assert sorted(told) == [["h1", [1], 0, NUM_NODES], ["h1", [1], 1, NUM_NODES], ["h2", [0, 2], 0, NUM_NODES]]


def launched(lab: Lab, folder: Path, plan: LaunchPlan) -> str:
    """By `gnnsys launch`, as users do it, with the lab's own command in the place of ssh."""
    (folder / "plan.json").write_text(plan.text())
    (folder / "hosts").write_text("".join(f"{name}\n" for name in lab.names))
    ssh = shlex.join([sys.executable, str(ROOT / "launch" / "lab.py"), "ssh", "--lab", lab.id, "--"])
    words = ["launch", "--hosts", folder / "hosts", "--plan", folder / "plan.json", "--ssh", ssh]
    words += ["--connect-timeout", "120", "--env", f"PYTHONPATH={ROOT}", "--env", "OMP_NUM_THREADS=1"]
    words += [folder / "program.py", folder, folder / "parts"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gnnsys.cli", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for host in lab.hosts:
        assert "run_assistant" not in lab.exec(host, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", check=False).output
    return ended.stdout


MAKES_BATCHES = """
import json, os, socket, sys, torch, gnnsys
with gnnsys.init(timeout=120, process_group=False) as session:
    graph = gnnsys.open(os.path.join(sys.argv[1], "parts"))
    seeds = graph.from_global(range(session.rank, 120, 2))
    loaders = [
        gnnsys.NeighborLoader(graph, [4, 3], input_nodes=seeds, batch_size=10, samplers=s) for s in (None, False)
    ]
    for one, other in zip(*loaders, strict=True):
        for name in ("n_id", "edge_index", "e_id", "x", "weight"):
            assert torch.equal(one[name], other[name]), name
    counts = loaders[0].counters()["sample"].counts
    told = [socket.gethostname(), graph.machine_of_part, counts.get("own", -1), len(session.status())]
    print("TOLD", json.dumps(told))
    session.barrier()
"""


@needs_lab
@pytest.mark.parametrize(
    "run", [forked, pytest.param(fresh, marks=pytest.mark.long), pytest.param(launched, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_hosts_without_ranks_serve_their_parts_and_make_batches_for_trainers_elsewhere(tmp_path, run, ranks):
    """h2 serves a part, h3 samples for the first rank of h1, which may be the only one."""
    first = PlacedSampler(host="h1", trainer=0)
    plan = LaunchPlan(
        hosts=(
            PlannedHost(name="h3", num_ranks=0, parts=(), samplers=(first,)),
            PlannedHost(name="h1", num_ranks=ranks, parts=(0,)),
            PlannedHost(name="h2", num_ranks=0, parts=(1, 2)),
        )
    )
    make_parts(tmp_path / "parts", 3)
    (tmp_path / "program.py").write_text(MAKES_BATCHES)
    with Lab(hosts=3) as lab:
        printed = run(lab, tmp_path, plan)
    told = [json.loads(line.split("TOLD ", 1)[1]) for line in printed.splitlines() if "TOLD" in line]
    expected = [
        ["h1", [0, 2, 2], 0, 3],
        ["h1", [0, 2, 2], -1, 3],
    ]  # machines behind h1 are numbered as the plan lists them
    assert sorted(told) == sorted(expected[:ranks])


def test_what_assists_is_told_by_two_variables_and_says_what_is_wrong_with_them(monkeypatch, capsys):
    monkeypatch.delenv("GNNSYS_PLAN", raising=False)
    monkeypatch.delenv(ASSISTANTS, raising=False)
    assert main(["assist"]) == 2
    assert "GNNSYS_PLAN and GNNSYS_ASSISTANTS must be set" in capsys.readouterr().err
    for wrong in ("h4", "h4=7000", "h4=tcp://h4"):
        assert main(["assist", "--make", wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["assist", "--make", "h4=tcp://127.0.0.1:7000"]) == 0
    text = capsys.readouterr().out.strip()
    made = Assistants.from_environment({ASSISTANTS: text})
    assert made is not None and made.names == ["h4"] and made.text() == text and made.own_address() == "127.0.0.1"
    monkeypatch.setenv(ASSISTANTS, text)
    monkeypatch.setenv("GNNSYS_PLAN", PLAN.line_for_ranks())
    monkeypatch.setenv("GNNSYS_LAUNCH_HOST", "h5")
    assert main(["assist"]) == 2
    assert "h5 is to assist, GNNSYS_ASSISTANTS has h4" in capsys.readouterr().err
    monkeypatch.setenv(ASSISTANTS, '{"hosts": {"h4": "tcp://h4:1"}, "key": {}}')
    with pytest.raises(
        ValueError, match=r"GNNSYS_ASSISTANTS must .* as gnnsys launch --plan sets it: keys are an object"
    ):
        Assistants.from_environment()


def test_a_lab_refuses_what_the_plan_says_already():
    lab = Lab(hosts=2)
    with pytest.raises(ValueError, match="the plan says which hosts take part and how many ranks each has"):
        lab.run(["--nproc-per-node=2", "train.py"], plan=PLAN)
    with pytest.raises(ValueError, match="the plan has host a, the lab has h1, h2"):
        lab.run(["train.py"], plan=PLAN)
