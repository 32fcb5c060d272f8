"""Samplers as processes: a plan starts them, trainers ask them, and kill -9 of one changes no bit of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gnnsys
from gnnsys.partition import write_parts
from gnnsys.planning import LaunchPlan, PlacedSampler, PlannedHost
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.processes import run_ranks

NUM_NODES = 400

# Ranks step together; each takes its batches from samplers that the plan has for it. In mid-epoch rank 0 kills one.
TRAIN = """
import hashlib, json, os, signal, sys, torch, torch.nn.functional as F, gnnsys
from gnnsys.nn import GraphSAGE

def train(graph, session, victim=None):
    torch.manual_seed(0)
    model = GraphSAGE(3, 8, 2, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    seeds = graph.from_global(range(session.rank, graph.num_nodes(), session.world_size))
    loader = gnnsys.NeighborLoader(graph, [4, 3], input_nodes=seeds, batch_size=8, shuffle=True, seed=1,
                                   samplers=None if samplers else False)
    for epoch in range(3):
        for number, batch in enumerate(loader):
            if victim is not None and (epoch, number) == (1, 3):
                os.kill(victim, signal.SIGKILL)
            loss = F.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], (batch.input_id % 2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest(), loader.counters()["sample"].counts

if __name__ == "__main__":
    path, plan, samplers = sys.argv[1], sys.argv[2], True
    if "RANK" in os.environ:
        os.environ["GNNSYS_LAUNCH_HOST"] = ["h2", "h1"][int(os.environ["GROUP_RANK"])]
    with gnnsys.init(timeout=120, process_group=False) as session:
        graph = gnnsys.open(path, plan=plan)
        pids = session.group.gather("pids", session._graphs.samplers.pids)
        victim = pids[1][0] if session.rank == 0 else None
        print(json.dumps([*train(graph, session, victim), [len(each) for each in pids], session.rank]))
        session.barrier()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    graph = homogeneous(NUM_NODES, 4000)
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "parts")
    return tmp_path / "parts"


def test_kill_9_of_a_sampler_in_mid_epoch_leaves_every_weight_as_it_would_have_been(tmp_path, path):
    """Machine 0 is h2, machine 1 is h1. Rank 0 has a sampler on each host, rank 1 one on the other host."""
    first, second = PlacedSampler(host="h2", trainer=0), PlacedSampler(host="h1", trainer=0)
    hosts = [
        PlannedHost(name="h1", num_ranks=1, parts=(1,), samplers=(first,)),
        PlannedHost(name="h2", num_ranks=1, parts=(0,), samplers=(first, second)),
    ]
    (tmp_path / "plan.json").write_text(LaunchPlan(hosts=tuple(hosts)).text())
    ended = run_ranks(TRAIN, [1, 1], path, tmp_path / "plan.json", environment={"SPARE_SERVERS": "4"})
    told = [json.loads(rank.stdout) for rank in ended]
    assert [rank[2] for rank in told] == [[2, 1]] * 2
    killed, spared = told[0][1], told[1][1]
    assert killed["from_samplers"] > 38 and killed["late"] + killed["failed"] > 0
    assert spared["from_samplers"] >= 75 and spared["own"] == 0

    space: dict[str, object] = {"__name__": "trainer", "samplers": False}
    exec(TRAIN, space)
    for rank, (weights, *_) in enumerate(told):
        with gnnsys.init(process_group=False) as session:
            graph = session.open(path)
            alone = type("Rank", (), {"rank": rank, "world_size": 2})
            assert space["train"](graph, alone)[0] == weights  # type: ignore[operator]


ALONE = """
import sys, torch, gnnsys
with gnnsys.init(process_group=False) as session:
    graph = session.open(sys.argv[1], samplers=2)
    assert session.open(sys.argv[1]) is graph and len(session._graphs.samplers.pids) == 2
    ours, own = (gnnsys.NeighborLoader(graph, [4], batch_size=100, samplers=samplers) for samplers in (True, False))
    for one, other in zip(ours, own, strict=True):
        assert torch.equal(one.x, other.x) and torch.equal(one.edge_index, other.edge_index)
    assert ours.counters()["sample"].counts["own"] == 0
"""


def test_a_process_that_is_alone_has_samplers_by_number(path):
    run_ranks(ALONE, 1, path)


def test_a_number_of_samplers_that_cannot_be_is_refused(path):
    with gnnsys.init(process_group=False) as session:
        for wrong in (-1, 65, True):
            with pytest.raises(ValueError, match="samplers must be a whole number from 0 to 64"):
                session.open(path, samplers=wrong)
        with pytest.raises(ValueError, match="leave samplers or servers away"):
            session.open(path, samplers=1, servers=["tcp://127.0.0.1:1"])
