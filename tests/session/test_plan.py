"""A plan names hosts, not numbers: who serves what follows it, and one that does not fit is one line on every rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import gnnsys
from gnnsys.partition import write_parts
from gnnsys.planning import LaunchPlan, PlannedHost, manifest_digest
from gnnsys.session.planned_hosts import find_plan, serve_by_plan
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.processes import run_ranks

NUM_NODES = 120


def make_parts(path: Path, num_parts: int = 4, seed: int = 0) -> Path:
    graph = homogeneous(NUM_NODES, 900, seed)
    write_parts(graph, random_assignment(graph, num_parts, 1), path)
    return path


def hosts(*given: tuple[str, int, tuple[int, ...] | None]) -> tuple[PlannedHost, ...]:
    return tuple(PlannedHost(name=name, num_ranks=ranks, parts=parts) for name, ranks, parts in given)


def report(have=(0, 1, 2, 3), num_parts=4):
    return {"crc32": 255, "num_parts": num_parts, "on_disk": list(have), "path": "/data/parts"}


PLAN = LaunchPlan(hosts=hosts(("a", 2, (3, 0)), ("b", 1, (1, 2))), parts_digest=255)


@pytest.mark.parametrize(
    ("names", "ranks", "machines"),
    [(["a", "b"], [0, 0, 1], [0, 1, 1, 0]), (["b", "a.lan"], [0, 1, 1], [1, 0, 0, 1])],
)
def test_whoever_has_the_name_serves_the_parts_whatever_its_number(names, ranks, machines):
    assert serve_by_plan(PLAN, names, ranks, [report(), report()]) == machines
    silent = LaunchPlan(hosts=hosts(("a", 2, None), ("b", 1, None)))
    assert serve_by_plan(silent, names, ranks, [report(), report()]) is None


@pytest.mark.parametrize(
    ("names", "ranks", "reports", "words"),
    [
        (["a", "c"], [0, 0, 1], [report()] * 2, "host c takes part, the plan has a, b: start it by gnnsys launch"),
        (["a"], [0, 0], [report()], "the plan has host b, which does not take part: start it by"),
        (["a", "a"], [0, 0, 1], [report()] * 2, "2 machines are called a"),
        (["a", "b"], [0, 1, 1], [report()] * 2, "host a runs 1 rank, the plan has 2"),
        (["a", "b"], [0, 0, 1], [{**report(), "crc32": 1}] * 2, "digest 000000ff, /data/parts has 00000001"),
        (["a", "b"], [0, 0, 1], [report(num_parts=5)] * 2, "the plan has 4 parts, /data/parts has 5"),
        (["a", "b"], [0, 0, 1], [report(), report([0, 1])], "2 served by b, where /data/parts/part-0002 is missing"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_says_why_in_one_line(names, ranks, reports, words):
    with pytest.raises(ValueError, match=words) as caught:
        serve_by_plan(PLAN, names, ranks, reports)
    assert "\n" not in str(caught.value)


def test_a_plan_is_found_by_argument_and_by_environment(tmp_path, monkeypatch):
    assert find_plan(None) is None and find_plan(PLAN) is PLAN
    (tmp_path / "plan.json").write_text(PLAN.text())
    monkeypatch.setenv("GNNSYS_PLAN", str(tmp_path / "plan.json"))
    assert find_plan(None) == find_plan(tmp_path / "plan.json") == PLAN and find_plan(False) is None
    monkeypatch.setenv("GNNSYS_PLAN", PLAN.line_for_ranks())
    assert find_plan(None) == PLAN
    with pytest.raises(ValueError, match="plan must be the path of a plan"):
        find_plan(3)  # type: ignore[arg-type]


def test_a_process_that_is_alone_refuses_a_plan_for_more(tmp_path):
    path = make_parts(tmp_path / "parts")
    here = os.uname().nodename
    few = LaunchPlan(hosts=hosts((here, 1, (0, 1, 2, 3))), parts_digest=manifest_digest(path))
    with gnnsys.init(process_group=False) as session:
        with pytest.raises(ValueError, match=f"host {here} runs 1 rank, the plan has 2"):
            session.open(path, plan=LaunchPlan(hosts=hosts((here, 2, None))))
        with pytest.raises(ValueError, match="no plan"):
            session.open(path, plan=tmp_path / "nothing.json")
        with pytest.raises(ValueError, match="a plan says who serves which part, and so do servers"):
            session.open(path, plan=few, servers=["tcp://127.0.0.1:1"])
        assert session.open(path, plan=few).num_nodes() == NUM_NODES


PROGRAM = """
import hashlib, json, os, sys, torch, gnnsys
names, folder = sys.argv[1].split(","), sys.argv[2]
os.environ["GNNSYS_LAUNCH_HOST"] = names[int(os.environ["GROUP_RANK"])]
told = []
with gnnsys.init(timeout=120, process_group=False) as session:
    for plan in sys.argv[3:]:
        if plan == "differs":
            plan = "right.json" if session.rank else "ranks.json"
        try:
            graph = gnnsys.open(os.path.join(folder, "parts"), plan=os.path.join(folder, plan))
        except ValueError as error:
            told.append(str(error))
    seeds = gnnsys.split(graph, "train")
    loader = gnnsys.NeighborLoader(
        graph, [4, 3], input_nodes=graph.from_global(range(session.rank, 120, 6)), batch_size=7, shuffle=True, seed=5
    )
    batches = []
    for batch in loader:
        digest = hashlib.sha256()
        for part in (batch.n_id, batch.edge_index, batch.e_id, batch.x, batch.weight):
            digest.update(part.contiguous().numpy().tobytes())
        batches.append(digest.hexdigest())
    print(json.dumps([told, graph.parts_here, graph.machine_of_part, seeds.ids.tolist(), seeds.largest, batches]))
"""


def test_six_ranks_of_four_hosts_serve_as_planned_and_make_the_batches_of_one_process(tmp_path):
    """Machines are numbered otherwise than the plan lists hosts; before that, plans that do not fit are refused."""
    path = make_parts(tmp_path / "parts")
    right = hosts(("h1", 2, (3,)), ("h2", 2, (0, 2)), ("h3", 1, ()), ("h4", 1, (1,)))
    digest = manifest_digest(path)
    for name, plan in {
        "right": LaunchPlan(hosts=right, parts_digest=digest),
        "parts": LaunchPlan(hosts=right, parts_digest=digest ^ 1),
        "hosts": LaunchPlan(hosts=(*right[:3], PlannedHost(name="h5", num_ranks=1, parts=(1,)))),
        "ranks": LaunchPlan(hosts=(PlannedHost(name="h1", num_ranks=3, parts=(3,)), *right[1:])),
    }.items():
        (tmp_path / f"{name}.json").write_text(plan.text())
    given = ["nothing.json", "parts.json", "hosts.json", "ranks.json", "differs", "right.json"]
    ended = run_ranks(PROGRAM, [1, 2, 2, 1], "h4,h2,h1,h3", tmp_path, *given)
    ranks = [json.loads(rank.stdout) for rank in ended]
    errors = ranks[0][0]
    assert all(rank[0] == errors for rank in ranks)
    nothing, parts, others, count, differs = errors
    assert "there is no plan" in nothing and f"for parts with the digest {digest ^ 1:08x}" in parts
    assert "host h4 takes part, the plan has h1, h2, h3, h5" in others and "h1 runs 2 ranks, the plan has 3" in count
    assert "the plan must be the same on all ranks: rank 1 on h2 has another than rank 0" in differs
    assert [rank[1] for rank in ranks] == [[1], [0, 2], [0, 2], [3], [3], []]
    assert all(rank[2] == [1, 0, 1, 2] for rank in ranks)

    with gnnsys.init(process_group=False) as session:
        graph = session.open(path)
        train = gnnsys.split(graph, "train").ids.tolist()
        assert sorted(node for rank in ranks for node in rank[3]) == train
        assert {rank[4] for rank in ranks} == {max(len(rank[3]) for rank in ranks)}
        for number, rank in enumerate(ranks):
            inputs = graph.from_global(range(number, NUM_NODES, 6))
            loader = gnnsys.NeighborLoader(graph, [4, 3], input_nodes=inputs, batch_size=7, shuffle=True, seed=5)
            assert rank[5] == [digest_of(batch) for batch in loader]


def digest_of(batch) -> str:
    import hashlib

    parts = (batch.n_id, batch.edge_index, batch.e_id, batch.x, batch.weight)
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()
