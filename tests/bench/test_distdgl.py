"""DistDGL trains on two hosts of the lab, so that there is something to stand beside."""

import json
import math
import re

import pytest

from gnnsys.bench import peers
from gnnsys.bench.dist.distdgl import best_samples_per_s, run_distdgl
from gnnsys.bench.dist.distdgl_run import partition
from gnnsys.bench.dist.task import Task
from gnnsys.lab import Lab, available

REASON = available() or peers.missing("dgl").get("dgl")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
GRAPH = {"num_nodes": 2000, "num_features": 16, "num_classes": 4, "avg_degree": 8.0, "train": 0.5}


TASK = Task(graph=GRAPH, trainers_per_host=1, batch_size=100, fanouts=(4, 3), hidden=8, num_epochs=2, max_steps=4)


def test_its_graph_is_partitioned_once_for_every_host_and_the_best_epoch_counts(tmp_path):
    TASK.save(tmp_path)
    partition(tmp_path)
    made = json.loads((tmp_path / "partition.json").read_text())
    assert made["num_edges"] > 10_000 and len(list(tmp_path.rglob("part[01]"))) == TASK.num_hosts
    assert best_samples_per_s({"epochs": [{"samples_per_s": 3.0}, {"samples_per_s": 5.0}]}) == 5.0


@pytest.mark.long  # a peer's job: how it is partitioned and counted is above, what runs jobs on hosts is in tests/lab
def test_distdgl_trains_across_hosts_and_its_samples_are_counted(tmp_path):
    TASK.save(tmp_path)
    partition(tmp_path)
    with Lab(hosts=2) as lab:
        figures = run_distdgl(lab, tmp_path, timeout=120)
    assert figures["steps"] == 4 and len(figures["epochs"]) == 2
    for epoch in figures["epochs"]:
        assert epoch["samples"] == 4 * 100 * 2
        assert epoch["samples"] < epoch["input_nodes"] < epoch["samples"] * (1 + 4 + 4 * 3)
        assert epoch["samples_per_s"] == pytest.approx(epoch["samples"] / epoch["seconds"])
        assert math.isfinite(epoch["loss"])
    assert figures["epochs"][1]["loss"] < figures["epochs"][0]["loss"]
    assert best_samples_per_s(figures) == figures["epochs"][1]["samples_per_s"]
    assert min(figures["bytes_in"].values()) > 100_000  # rows and samples of the other host


def test_a_task_for_more_hosts_than_the_lab_has_is_refused(tmp_path):
    Task(graph=GRAPH, num_hosts=3).save(tmp_path)
    with Lab(hosts=2) as lab, pytest.raises(ValueError, match=re.escape("the task needs 3 hosts, the lab has 2")):
        run_distdgl(lab, tmp_path)
