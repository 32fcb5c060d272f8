"""The lab's job on links through its phases, on two machines that are processes of this host."""

import json

import pytest
import torch

from gnnsys.bench import SuiteOptions, run_suite
from gnnsys.bench.dist.phase import BEGIN, READY, SYNCHRONOUS, Phase, go_file, save
from gnnsys.bench.dist.task import Task as JobTask
from gnnsys.bench.links.lab import KINDS, UNIFORM, LinkLabSettings, lab, phases
from gnnsys.bench.links.lab_train import EDGES, NAMES
from gnnsys.bench.workload import Sizes, Workload
from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from tests.support.processes import module_code, run_ranks


def test_every_kind_of_negatives_stands_beside_uniform_ones():
    with Workload(Sizes(2_000, 20_000)) as work:
        names = {case.name for case in lab(work)}
    assert [phase.name for phase in phases(LinkLabSettings())] == list(KINDS)
    for kind in KINDS:
        assert (f"lab/{kind}/bytes of a batch" in names) == (kind != UNIFORM)


def test_without_a_lab_its_rows_are_missing_with_the_reason_and_nothing_has_failed(monkeypatch):
    monkeypatch.setattr("gnnsys.bench.lab_jobs.available", lambda: "the lab needs root")
    shown: list[str] = []
    report = run_suite("links", [lab], SuiteOptions(quick=True), show=shown.append)
    assert {(row.ours, row.reason) for row in report.rows} == {(None, "the lab needs root")}
    assert report.failures() == []
    assert not any("failed" in line for line in shown)


@pytest.mark.long
def test_negatives_of_the_part_are_never_asked_for_and_joint_ones_read_fewer_rows(tmp_path):
    """Uniform negatives, of which half are elsewhere, have their names looked up; local ones do not."""
    graph = sbm(600, num_classes=4, num_features=8)
    graph.set_edge_data("train_mask", torch.ones(graph.num_edges(), dtype=torch.bool))
    partition_graph(graph, 2, tmp_path / "parts", balance=["train_edges"])
    asked = [Phase(name=name, mode=SYNCHRONOUS, warm=1) for name in ("uniform", "joint", "local")]
    JobTask(num_hosts=2, batch_size=16, fanouts=(3, 2), hidden=4, max_steps=4).save(tmp_path)
    save(asked, tmp_path)
    for phase in asked:
        for word in (READY, BEGIN):
            go_file(tmp_path, word, phase.name).touch()
    first, _ = run_ranks(module_code("gnnsys.bench.links.lab_train"), [1, 1], tmp_path, tmp_path / "parts")
    told = [line.split(maxsplit=2) for line in first.stdout.splitlines() if line.startswith("phase-figures")]
    ranks = {name: json.loads(text) for _, name, text in told}
    assert list(ranks) == [phase.name for phase in asked]
    for of in ranks.values():
        assert all(rank["steps"] == 4 and rank["counts"][EDGES] >= 4 for rank in of)
    inputs = {name: sum(rank["input_nodes"] for rank in of) for name, of in ranks.items()}
    assert inputs["joint"] < inputs["uniform"]
    names = {name: sum(rank["counts"].get(NAMES, 0) for rank in of) for name, of in ranks.items()}
    assert 0 < names["local"] < names["uniform"]  # the other ends of links that lead here from elsewhere
