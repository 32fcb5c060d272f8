"""A session over two hosts that share nothing but a wire: names, addresses, keys, and each only its own part."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

import pytest
import torch

from gnnsys.graph import NODE
from gnnsys.lab import Lab, available
from gnnsys.partition import write_parts
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.lab_host import on_host
from tests.support.nursery import forks_ranks
from tests.support.processes import AGENT, processes

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, os, socket, sys, torch, torch.distributed as dist, gnnsys
os.chdir(os.path.join(sys.argv[1], socket.gethostname()))
with gnnsys.init(timeout=120) as session:
    graph = gnnsys.open("parts")
    seeds = gnnsys.split(graph, "train")
    total = torch.ones(1)
    dist.all_reduce(total)
    everything = torch.arange(graph.num_nodes())
    print("TOLD", json.dumps({
        "host": socket.gethostname(),
        "own": socket.getaddrinfo(socket.gethostname(), 1)[0][4][0],
        "parts": graph.parts_here,
        "peers": sorted(session.client.peers.values()),
        "seeds": graph.original_ids(seeds.ids).tolist(),
        "originals": graph.original_ids(everything).tolist(),
        "x": graph.node_data["node"]["x"][everything].tolist(),
    }))
"""


# what Debian's installer does: on the host itself its name means an address that nobody else reaches
OWN_NAME_IS_LOOPBACK = """
{{ echo "127.0.1.1 $(hostname)"; grep -v "$(hostname)" /etc/hosts; }} > {file}
mount --bind {file} /etc/hosts
"""


def launch(lab: Lab, folder: Path) -> str:
    """Runs the program on every host under torchrun, whose agents and ranks are forked; what all of them printed."""
    meeting = f"{lab.names[0]}:{29400 + secrets.randbelow(2000)}"
    given = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--rdzv-id=test"]
    given += ["--monitor-interval=0.1", str(folder / "program.py"), str(folder)]
    (folder / "agent.py").write_text(AGENT)
    with processes() as running:
        for machine, host in enumerate(lab.hosts):
            env = on_host(lab, host) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            running.fork(f"agent {machine}", machine, folder / "agent.py", given, env)
        ended = running.wait()
    assert [agent.returncode for agent in ended] == [0, 0], "\n".join(map(str, ended))
    return "\n".join(agent.stdout for agent in ended)


def launch_fresh(lab: Lab, folder: Path) -> str:
    """The same as users do it: every agent, rank and server in an interpreter of its own."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = ["--nproc-per-node=1", str(folder / "program.py"), str(folder)]
    results = lab.run(arguments, timeout=300, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    return "\n".join(result.output for result in results)


# Where both can be, fresh ones are long: lab/test_lab.py has fresh agents, test_torchrun_agent.py ranks and servers.
FORKED = [pytest.param(launch, id="forked")] if forks_ranks() else []
LAUNCHES = [*FORKED, pytest.param(launch_fresh, id="fresh", marks=[pytest.mark.long] if FORKED else [])]


@pytest.mark.parametrize("run", LAUNCHES)
def test_hosts_with_a_part_each_find_one_another_over_ipv6(tmp_path, run):
    graph = homogeneous(100, 400)
    with Lab(hosts=2, family=6) as lab:
        lab.exec(1, OWN_NAME_IS_LOOPBACK.format(file=tmp_path / "hosts"))
        for number, host in enumerate(lab.names):
            write_parts(graph, random_assignment(graph, 2, 1), tmp_path / host / "parts")
            shutil.rmtree(tmp_path / host / "parts" / f"part-{1 - number:04d}")
        (tmp_path / "program.py").write_text(PROGRAM)
        printed = run(lab, tmp_path)
        addresses = [f"tcp://[{lab.address(host, 6)}]:" for host in lab.hosts]
    lines = [line for line in printed.splitlines() if "TOLD" in line]
    told = {t["host"]: t for t in (json.loads(line.split("TOLD ", 1)[1]) for line in lines)}
    assert told[lab.names[0]]["own"] == "127.0.1.1"
    assert [told[host]["parts"] for host in sorted(told)] == [[0], [1]]
    for t in told.values():
        assert all(peer.startswith(address) for peer, address in zip(t["peers"], sorted(addresses), strict=True))
        assert torch.equal(torch.tensor(t["x"]), graph.node_data[NODE]["x"][torch.tensor(t["originals"])])
    seeds = sorted(node for t in told.values() for node in t["seeds"])
    assert seeds == graph.node_data[NODE]["train_mask"].nonzero().view(-1).tolist()
