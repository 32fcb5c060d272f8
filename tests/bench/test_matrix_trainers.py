"""What a rank of a cell trains and measures: epochs and trainings, by every sampler, and on the whole graph."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.bench.matrix.cell import MODELS, SAMPLERS, SCHEDULES, Cell, CellOptions
from gnnsys.bench.matrix.cluster import read_figures
from gnnsys.bench.matrix.figures import cell_measures
from gnnsys.bench.matrix.train import PIECE, write_figures
from gnnsys.bench.matrix.train import main as train
from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from tests.support.processes import run_ranks

SMALL = {"batch_size": 8, "hidden": 8, "steps": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """In two parts: a rank alone has both, two have one each."""
    out = tmp_path_factory.mktemp("trainers") / "parts"
    partition_graph(sbm(400, num_classes=4, separation=6.0, seed=1), 2, out, edge_ids=False)
    return out


def cell_of(parts: Path, sampler: str = "neighbor", repeats: int = 2, **options) -> Cell:
    return Cell(
        dataset="parts", model="GraphSAGE", sampler=sampler, fanouts=(3, 3), trainers=1, hosts=1, option="a",
        options=CellOptions(**{"device": "cpu", **options}), repeats=repeats, parts=str(parts),
    )  # fmt: skip


@pytest.mark.parametrize("loading", ["synchronous", "keeping"])
def test_a_rank_measures_epochs(parts: Path, tmp_path: Path, capsys, loading: str):
    cell = cell_of(parts, **SMALL, loading=loading)
    assert Cell.from_text(cell.to_text()) == cell
    train(cell, str(tmp_path / "result.json"))
    told = json.loads((tmp_path / "result.json").read_text())
    (repeats,) = told["ranks"]
    assert [repeat["steps"] for repeat in repeats] == [3, 3] and repeats[0]["seeds"] == 24
    for repeat in repeats:
        assert 0 < repeat["computed"] + repeat["waited"] <= repeat["seconds"]
        assert repeat["stages"]["fetch"]["bytes_local"] > 0 <= repeat["stages"]["sample"]["busy"]
    if loading == "synchronous":
        assert [repeat["stages"]["sample"]["batches"] for repeat in repeats] == [3, 3]
    (facts,) = told["hosts"].values()
    assert facts["cores"] >= 1 and "torch" in told["versions"]
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "suite-ready",
        *(f"suite-repeat {number}" for number in range(3)),
    ]


def test_a_rank_trains_until_the_accuracy_is_reached(parts: Path, tmp_path: Path):
    options = {"batch_size": 16, "hidden": 32, "learning_rate": 0.02, "accuracy": 0.5, "max_epochs": 30}
    cell = replace(cell_of(parts, "labor", **options, loading="non-stop"), fanouts=(5, 5), warmup=0)
    train(cell, str(tmp_path / "result.json"))
    ((first, second),) = json.loads((tmp_path / "result.json").read_text())["ranks"]
    for repeat in (first, second):
        assert [accuracy >= 0.5 for _, accuracy in repeat["curve"]] == [False] * (repeat["epochs"] - 1) + [True]
        assert repeat["curve"][-1][0] == pytest.approx(repeat["seconds"])


def alone(cell: Cell, folder: Path) -> list[dict]:
    """Repeats of the only rank."""
    train(cell, str(folder / "alone"))
    (repeats,) = json.loads((folder / "alone").read_text())["ranks"]
    return repeats


WHOLE = {"hidden": 8, "training": "full-graph"}
WAYS = [*({**WHOLE, "schedule": name, "bins": 3} for name in SCHEDULES), {"hidden": 8, "training": "replicated"}]


def test_every_schedule_and_replication_train_alike_on_the_whole_graph(parts: Path, tmp_path: Path):
    """As HybridParallel by default does."""
    wanted = alone(cell_of(parts, **WHOLE, repeats=3), tmp_path)
    for options in WAYS:
        found = alone(cell_of(parts, **options, repeats=3), tmp_path)
        assert [repeat["loss"] for repeat in found] == pytest.approx([r["loss"] for r in wanted], rel=1e-4)
        assert [repeat["seeds"] for repeat in found] == [repeat["seeds"] for repeat in wanted]


def test_full_graph_training_ends_at_the_accuracy_too(parts: Path, tmp_path: Path):
    options = {"hidden": 32, "learning_rate": 0.05, "accuracy": 0.5, "max_epochs": 50}
    for training in ("full-graph", "replicated"):
        (repeat,) = alone(cell_of(parts, **options, training=training, repeats=1), tmp_path)
        assert [accuracy >= 0.5 for _, accuracy in repeat["curve"]] == [False] * (repeat["epochs"] - 1) + [True]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_and_is_validated(parts: Path, tmp_path: Path, model: str):
    for options in ({}, {"training": "full-graph"}, {"training": "replicated"}):
        cell = cell_of(parts, **SMALL, **options, accuracy=1.0, max_epochs=2, repeats=1)
        (repeat,) = alone(replace(cell, model=model), tmp_path)
        assert repeat["epochs"] == 2 and 0 < repeat["curve"][-1][1] <= 1


@pytest.mark.parametrize("sampler", ["ladies", "fastgcn"])
def test_layer_wise_samplers_train_and_are_validated(parts: Path, tmp_path: Path, sampler: str):
    cell = replace(cell_of(parts, sampler, **SMALL, accuracy=1.0, max_epochs=2, repeats=1), fanouts=(32, 32))
    (repeat,) = alone(cell, tmp_path)
    assert repeat["steps"] == 6 and len(repeat["curve"]) == 2 and 0 < repeat["curve"][-1][1] <= 1


TRAIN = """
import sys
from gnnsys.bench.matrix.cell import Cell
from gnnsys.bench.matrix.train import main
for number, text in enumerate(open(sys.argv[1]).read().splitlines()):
    main(Cell.from_text(text), f"{sys.argv[1]}.{number}")
"""


def figures_of(cells: list[Cell], folder: Path) -> list[dict]:
    """Of two ranks that are machines to gnnsys."""
    file = folder / "cells"
    file.write_text("\n".join(cell.to_text() for cell in cells))
    run_ranks(TRAIN, [1, 1], file)
    return [json.loads(Path(f"{file}.{number}").read_text()) for number in range(len(cells))]


@pytest.mark.long  # alone: test_every_schedule_and_replication_train_alike_on_the_whole_graph
def test_two_machines_train_as_one_does_and_only_hybrid_parallel_ones_exchange_rows(parts: Path, tmp_path: Path):
    wanted = alone(cell_of(parts, **WHOLE, repeats=3), tmp_path)
    cells = [cell_of(parts, **options, repeats=3) for options in WAYS]
    for cell, told in zip(cells, figures_of(cells, tmp_path), strict=True):
        for rank in told["ranks"]:
            assert [repeat["loss"] for repeat in rank] == pytest.approx([r["loss"] for r in wanted], rel=1e-4)
        assert sum(rank[0]["seeds"] for rank in told["ranks"]) == wanted[0]["seeds"]
        bytes_sent = cell_measures(cell, told)["MB of remote rows/epoch"]["samples"]
        assert (min(bytes_sent) > 0) == (cell.options.training == "full-graph"), cell.options


@pytest.mark.long  # samplers alone: the tests before; what a guide does: tests/explain
def test_every_sampler_trains_on_two_machines_and_a_guide_reads_less(parts: Path, tmp_path: Path):
    options = {**SMALL, "batch_size": 2, "steps": 8, "loading": "non-stop", "guide": {"num_features": 0.5, "every": 4}}
    cells = [cell_of(parts, sampler, **options) for sampler in SAMPLERS]
    left_out, remote = {}, {}
    for cell, told in zip(cells, figures_of(cells, tmp_path), strict=True):
        repeats = [repeat for rank in told["ranks"] for repeat in rank]
        assert [repeat["steps"] for repeat in repeats] == [8] * 4
        remote[cell.sampler] = sum(repeat["stages"]["fetch"]["bytes_remote"] for repeat in repeats)
        left_out[cell.sampler] = sum(repeat["stages"]["fetch"]["bytes_left_out"] for repeat in repeats)
        assert ("guide" in repeats[0]["stages"]) == cell.sampler.startswith("guided")
    assert {sampler for sampler, count in left_out.items() if count} == {"guided", "guided columns"}
    assert 0 < remote["guided columns"] < 0.75 * remote["neighbor"] and 0 < remote["guided"] < 0.75 * remote["neighbor"]


@pytest.mark.parametrize("length", [10, PIECE, 2 * PIECE + 17])
def test_figures_that_are_printed_are_put_together_again(capsys, length: int):
    """As a launcher prints them, among other lines."""
    told = {"ranks": "x" * (length - len('{"ranks": ""}'))} if length > 20 else {"a": [1]}
    write_figures(json.dumps(told), "-")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == -(-max(length, 1) // PIECE)
    output = "".join(f"h1:0 | {line}\nh2:1 | something\n" for line in lines)
    assert read_figures(output) == told
    assert read_figures(output.replace(f"{lines[-1]}\n", "\n")) is None
