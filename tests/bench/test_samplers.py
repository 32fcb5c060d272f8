"""What runs of samplers count: bytes by hand, accuracy between settings, and the lab's job through its phases."""

import importlib
import json

import pytest
import torch

from gnnsys.bench import Workload
from gnnsys.bench.dist.phase import BEGIN, READY, Phase, go_file, save
from gnnsys.bench.dist.task import Task as JobTask
from gnnsys.bench.samplers.lab_train import FROZEN, START
from gnnsys.bench.samplers.trial import NUM_PARTS, Outcome, Task, accuracy_at, cut, guided, train, uniform
from gnnsys.bench.workload import Sizes
from gnnsys.explain import GradientInput, pool_part, remote_ids
from gnnsys.graph import planted_noise
from gnnsys.partition import partition_graph
from tests.bench.verdicts import judged
from tests.support.processes import module_code, run_ranks

lab_bench = importlib.import_module("gnnsys.bench.samplers.lab")
TINY = Task(num_nodes=400, num_epochs=2, num_seeds=1, batch_size=16, fanout=3, every=2, pools=4)
COLUMNS = 24


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    graph = planted_noise(400, num_classes=4, num_features=12, noise_columns=12, train=0.5)
    return cut(graph, tmp_path_factory.mktemp("trial") / "parts")


def test_bfloat16_halves_the_bytes_of_rows_and_leaves_the_batches_alone(trial):
    whole, half = (train(trial, uniform(wire=wire), TINY, 0) for wire in (torch.float32, torch.bfloat16))
    assert half.megabytes == whole.megabytes / 2 > 0
    assert whole.explaining == half.explaining == 0


def test_explaining_costs_the_rows_of_all_remote_nodes_once(trial):
    columns_alone = guided(GradientInput(), nodes=False, share=0.5)
    rows = sum(remote_ids(trial.parts, part).numel() for part in range(NUM_PARTS))
    assert rows == sum(pool_part(trial.parts.parts.part(p), 4).ids.numel() for p in range(NUM_PARTS))
    assert train(trial, columns_alone, TINY, 0).explaining == pytest.approx(rows * COLUMNS * 4 / 1e6)


def test_half_of_the_columns_takes_half_of_the_bytes_once_they_are_chosen(trial):
    """The same draws: all that differs is rows after the first explanation, and the lists of columns in requests."""
    whole = train(trial, uniform(), TINY, 0)
    none_yet = train(trial, guided(GradientInput(), nodes=False, share=0.5, every=10_000), TINY, 0)
    narrow = train(trial, guided(GradientInput(), nodes=False, share=0.5), TINY, 0)
    assert none_yet.megabytes == whole.megabytes
    assert whole.megabytes / 2 < narrow.megabytes - narrow.explaining < whole.megabytes
    assert none_yet.as_read == none_yet.accuracy


def test_accuracy_between_two_settings_is_on_the_line_between_them():
    curve = [Outcome([10.0], [0.5]), Outcome([30.0], [0.9]), Outcome([20.0], [0.7])]
    assert accuracy_at(curve, 15) == pytest.approx(0.6)
    assert accuracy_at(curve, 25) == pytest.approx(0.8)
    assert (accuracy_at(curve, 1), accuracy_at(curve, 99)) == (0.5, 0.9)


def test_the_lab_judges_bytes_throughput_and_what_explaining_costs():
    with Workload(Sizes(2_000, 20_000)) as work:
        cases = list(lab_bench.lab(work))
    promised = {
        ("lab/columns/bytes", 1 / 0.9),
        ("lab/both/bytes", 1 / 0.76),
        ("lab/200mbit/input nodes/s", 1.1),
        ("lab/explaining/throughput", 0.95),
        ("lab/explaining/memory", 1 / 1.11),
    }
    assert promised <= judged(cases)


@pytest.mark.long
def test_trainers_of_the_lab_go_from_uniform_draws_to_masks_and_on_without_newer_ones(tmp_path):
    """On two machines that are processes of this host."""
    phases = [Phase(name=n, warm=1) for n in ("uniform", f"both{START}", "both", f"both{FROZEN}", "ladies")]
    graph = planted_noise(600, num_classes=4, num_features=12, noise_columns=12, train=0.5)
    partition_graph(graph, 2, tmp_path / "parts")
    JobTask(graph={"ladies": 20}, num_hosts=2, batch_size=8, fanouts=(3, 3), hidden=4, max_steps=8).save(tmp_path)
    save(phases, tmp_path)
    for phase in phases:
        for word in (READY, BEGIN):
            go_file(tmp_path, word, phase.name).touch()
    first, _ = run_ranks(module_code("gnnsys.bench.samplers.lab_train"), [1, 1], tmp_path, tmp_path / "parts")
    told = [line.split(maxsplit=2) for line in first.stdout.splitlines() if line.startswith("phase-figures")]
    assert [name for _, name, _ in told] == [phase.name for phase in phases]
    ranks = {name: json.loads(text) for _, name, text in told}
    for rank in ranks["both"]:
        assert rank["guide"]["guided_batches"] > 0 and rank["guide"]["num_columns"] == round(0.85 * COLUMNS)
        assert 0 < rank["explaining_memory"] < rank["memory"]
    assert all(rank["guide"] == {} and rank["input_nodes"] > 0 for rank in ranks["ladies"])
