"""What runs of samplers count: bytes by hand, accuracy between settings, and the lab's job through its phases."""

import importlib
import json
import math
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
import torch

from gnnsys.bench import Report, Workload
from gnnsys.bench.dist.phase import BEGIN, READY, Phase, go_file, save
from gnnsys.bench.dist.task import Task as JobTask
from gnnsys.bench.measure import RoundLimits, measure
from gnnsys.bench.samplers.curve import LINES, PANELS, draw
from gnnsys.bench.samplers.lab_train import FROZEN, START
from gnnsys.bench.samplers.outcome import (
    Outcome,
    RunFigures,
    differences,
    paired_noise,
    roc_area,
    table_cases,
    value_at,
)
from gnnsys.bench.samplers.trial import NUM_PARTS, Task, cut, edge_shares, guided, train, uniform
from gnnsys.bench.samplers.wide import VARIANTS
from gnnsys.bench.workload import QUICK, Sizes
from gnnsys.explain import GradientInput, make_masks, pool_part, remote_ids
from gnnsys.graph import planted_noise
from gnnsys.partition import partition_graph
from tests.bench.verdicts import judged
from tests.support.processes import module_code, run_ranks

lab_bench, wide_bench, explaining_bench = (
    importlib.import_module(f"gnnsys.bench.samplers.{name}") for name in ("lab", "wide", "explaining")
)
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
    assert train(trial, columns_alone, TINY, 0).explaining == pytest.approx(rows * COLUMNS * 2 / 1e6)


def test_half_of_the_columns_takes_half_of_the_bytes_once_they_are_chosen(trial):
    """The same draws: all that differs is rows after the first explanation, and the lists of columns in requests."""
    whole = train(trial, uniform(), TINY, 0)
    none_yet = train(trial, guided(GradientInput(), nodes=False, share=0.5, every=10_000), TINY, 0)
    narrow = train(trial, guided(GradientInput(), nodes=False, share=0.5), TINY, 0)
    assert none_yet.megabytes == whole.megabytes
    assert whole.megabytes / 2 < narrow.megabytes - narrow.explaining < whole.megabytes
    assert none_yet.as_read == none_yet.accuracy


class Truth:
    """Masks that know what was planted."""

    needs_target = False

    def __init__(self, graph):
        self.is_signal = torch.ones(COLUMNS)
        self.is_signal[torch.tensor(graph.info["noise_columns"])] = 0

    def importance(self, model, graph):
        return make_masks(graph.requester, graph.ids, torch.ones(graph.num_remote), self.is_signal)


def test_a_run_tells_what_of_the_planted_its_last_masks_found(trial):
    found = train(trial, guided(Truth(trial.graph), share=0.5), TINY, 0)
    assert (found.signal_kept, found.column_auc, found.node_auc) == (1.0, 1.0, 0.5)
    half = train(trial, guided(Truth(trial.graph), share=0.25), TINY, 0)
    assert half.signal_kept == 0.5 and half.last_epoch < half.megabytes - half.explaining
    assert math.isnan(train(trial, uniform(), TINY, 0).signal_kept)


def test_an_area_is_the_share_of_pairs_in_the_right_order():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(6, (40,), generator=generator).float()
    is_positive = torch.rand(40, generator=generator) < 0.4
    pairs = scores[is_positive][:, None] - scores[~is_positive][None]
    assert roc_area(scores, is_positive) == pytest.approx(float(((pairs > 0) + 0.5 * (pairs == 0)).double().mean()))
    assert math.isnan(roc_area(scores, torch.ones(40, dtype=torch.bool)))


def test_edges_between_parts_are_of_one_class_only_where_parts_are_not_classes(tmp_path):
    options = {"num_classes": 4, "num_features": 2, "noise_columns": 0, "homophily": 0.7, "avg_degree": 12}
    classes = planted_noise(960, **options)
    mixed = planted_noise(960, num_communities=8, locality=0.8, **options)
    by_classes, by_communities = (edge_shares(cut(g, tmp_path / str(i))) for i, g in enumerate((classes, mixed)))
    assert by_classes.same_between < 0.3 < 0.6 < by_communities.same_between
    for graph, shares in ((classes, by_classes), (mixed, by_communities)):
        src, dst = graph.edge_index().long()
        labels = graph.node_data["node"]["y"]
        together = shares.between * shares.same_between + (1 - shares.between) * shares.same_inside
        assert together == pytest.approx(float((labels[src] == labels[dst]).double().mean()))


def outcome(*runs: tuple[float, float]) -> Outcome:
    return Outcome(tuple(RunFigures(megabytes, accuracy) for megabytes, accuracy in runs))


def test_accuracy_between_two_settings_is_on_the_line_between_them():
    curve = [(10.0, 0.5), (30.0, 0.9), (20.0, 0.7)]
    assert value_at(curve, 15) == pytest.approx(0.6)
    assert value_at(curve, 25) == pytest.approx(0.8)
    assert (value_at(curve, 1), value_at(curve, 99)) == (0.5, 0.9)


def test_runs_are_compared_seed_by_seed():
    """Graphs of the two seeds differ by 20 points, the samplers by 1 and 3."""
    ours, other = outcome((10, 0.60), (10, 0.80)), outcome((10, 0.59), (10, 0.77))
    ahead = differences(ours, [other])
    assert ahead == pytest.approx([0.01, 0.03]) and paired_noise(ahead) == pytest.approx(0.02)
    fanouts = [outcome((5, 0.50), (5, 0.70)), outcome((15, 0.60), (15, 0.80))]
    assert differences(ours, fanouts) == pytest.approx([0.05, 0.05])


def test_a_cache_keeps_runs(tmp_path, monkeypatch):
    trained = []

    def count(trial, variant, task, seed):
        trained.append(seed)
        return RunFigures(1.0, 0.5)

    monkeypatch.setattr(wide_bench, "train", count)
    monkeypatch.setattr(wide_bench._Runs, "trial", lambda *_: None)
    for _ in range(2):
        with Workload(QUICK, cache=tmp_path) as work:
            runs = wide_bench._Runs(work, wide_bench.WIDE)
            assert runs.found("columns").mean("megabytes") == 1.0
    assert trained == [0]
    with Workload(QUICK, cache=tmp_path) as work:
        wide_bench._Runs(work, wide_bench.RICH).found("columns")
    assert trained == [0, 0]


def test_the_curve_has_every_line_and_every_point():
    """Of a report as the benchmark makes it."""
    report = Report("samplers", True)
    figures = {name: outcome((10.0 + place, 0.5 + place / 100)) for place, name in enumerate(VARIANTS)}
    for case in table_cases("wide", figures.__getitem__, VARIANTS, "uniform"):
        report.add(case, measure(case, RoundLimits(least=1, most=1, seconds=0.0)))
    root = ElementTree.fromstring(draw({"rows": [asdict(row) for row in report.rows]}))
    assert len(root.findall(".//{*}polyline")) == len(PANELS) * len(LINES)
    assert len(root.findall(".//{*}circle")) == len(PANELS) * sum(len(names) for names, _, _ in LINES.values())
    with pytest.raises(ValueError, match="run gnnsys bench samplers first"):
        draw({"rows": []})


def test_the_lab_judges_bytes_throughput_and_what_explaining_costs():
    with Workload(Sizes(2_000, 20_000)) as work:
        cases = list(lab_bench.lab(work))
    promised = {
        ("lab/columns/bytes", 1 / 0.9),
        ("lab/both/bytes", 1 / 0.76),
        ("lab/200mbit/input nodes/s", 1.1),
        ("lab/throughput while explaining", 0.95),
        ("lab/memory while explaining", 1 / 1.11),
    }
    assert promised <= judged(cases)


def test_what_explaining_costs_is_judged_without_the_lab_too():
    with Workload(Sizes(2_000, 20_000)) as work:
        cases = [*explaining_bench.explaining(work), *lab_bench.lab(work)]
    alone = [case for case in cases if "explaining/" in case.name]  # what --only takes
    assert judged(alone) == {("explaining/throughput", 0.95), ("explaining/memory", 1 / 1.11)}
    assert not any(case.name.startswith("lab/") for case in alone)


def test_every_run_whose_bytes_are_judged_is_counted_from_a_new_loader_on():
    names = [phase.name for phase in lab_bench.phases(lab_bench.SamplerLabSettings())]
    for name in ("uniform", "nodes", "columns", "both", "uniform-bf16", "both-bf16"):
        assert names.index(name) == names.index(name + START) + 1


@pytest.mark.long
def test_trainers_of_the_lab_go_from_uniform_draws_to_masks_and_on_without_newer_ones(tmp_path):
    """On two machines that are processes of this host."""
    phases = [
        Phase(name=n, warm=1) for n in (f"uniform{START}", "uniform", f"both{START}", "both", f"both{FROZEN}", "ladies")
    ]
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
