"""`gnnsys plan`: what it prints for machines that are described, and one line for what cannot be planned."""

from __future__ import annotations

import json

import pytest
import torch

from gnnsys.cli import main
from gnnsys.graph import Graph, save, sbm, typed_graph
from tests.planning.machines import FOLDER, printed_by, shown_on_page

H200, M1 = str(FOLDER / "h200.json"), str(FOLDER / "m1-rates.json")
PRODUCTS = ["--sizes", "nodes=2449029,edges=123718280,features=100,classes=47", "--machine", H200]
PHYSICS = ["--sizes", "nodes=34493,edges=495924,features=8415,classes=5", "--full-graph", "--model", "gcn:16x2"]


def test_it_compares_all_plans_of_a_graph_that_is_described(capsys):
    assert main(["plan", *PRODUCTS, "--memory", "1g"]) == 0
    shown = capsys.readouterr().out
    assert "2,449,029 nodes" in shown and "widths 100 256 256 47" in shown and "NVIDIA H200" in shown
    for rule in ("pure GPU, rows over the bus", "pre-transform", "pre-aggregate", "split", "bound:", "chosen:"):
        assert rule in shown
    chosen = shown.splitlines()[-1]
    assert "times as fast as without a plan" in chosen and "pre-transform" not in chosen


def test_ranks_share_cores_and_bus(capsys):
    plans = []
    for ranks in ("1", "4"):
        assert main(["plan", *PRODUCTS, "--memory", "1g", "--ranks", ranks, "--json", "-"]) == 0
        plans.append({one["name"]: one for one in json.loads(capsys.readouterr().out)["plans"]})
    for name in plans[0].keys() & plans[1].keys() - {"mix"}:
        alone, shared = plans[0][name]["busy"], plans[1][name]["busy"]
        assert shared["gpu"] == alone["gpu"] and shared["bus up"] >= alone["bus up"]
        assert shared["cores"] >= alone["cores"] and sum(shared.values()) > sum(alone.values())


def test_with_room_for_all_it_is_pure_gpu_and_says_so(capsys):
    assert main(["plan", *PRODUCTS, "--memory", "100g"]) == 0
    shown = capsys.readouterr().out
    assert "chosen: pure GPU, rows on the device, device samples" in shown
    assert "pre-aggregate: not possible, all of the graph fits the device" in shown


def test_a_real_graph_is_sampled_for_its_sizes_and_its_hottest_rows_are_cached(tmp_path, capsys):
    save(sbm(3000, num_features=32, seed=3), tmp_path / "graph")
    numbers = tmp_path / "numbers.json"
    arguments = ["--model", "sage:16x2", "--fanouts", "5,3", "--batch-size", "64", "--memory", "600k"]
    assert main(["plan", str(tmp_path / "graph"), *arguments, "--machine", H200, "--json", str(numbers)]) == 0
    shown, found = capsys.readouterr().out, json.loads(numbers.read_text())
    assert "3,000 nodes" in shown and "a cache has" in shown and "64 seeds" in shown
    assert any(plan["name"].startswith("split") for plan in found["plans"])
    assert found["chosen"] in [plan["name"] for plan in found["plans"]] and found["bound"]["seconds"] > 0
    assert found["model"] == ["sage", 32, 16, sbm(10).info["num_classes"]] and found["memory"] == 600 << 10


@pytest.mark.parametrize("kind", ["sage", "gcn", "gin", "gat"])
def test_a_graph_without_edges_can_be_planned(kind, tmp_path, capsys):
    alone = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 40, {"x": torch.ones(40, 3)})
    save(alone, tmp_path / "graph")
    for more in (["--memory", "1k"], ["--memory", "1g"], ["--memory", "1k", "--full-graph"]):
        model = ["--model", f"{kind}:8x2", "--batch-size", "16"]
        assert main(["plan", str(tmp_path / "graph"), *model, "--machine", H200, *more]) == 0
        assert "chosen: " in capsys.readouterr().out


def test_the_papers_machine_makes_the_papers_choice_beside_the_better_order(capsys):
    assert main(["plan", *PHYSICS, "--machine", M1, "--memory", "12g"]) == 0
    shown = capsys.readouterr().out
    assert "of DAHA's plans, which copy rows every epoch, pre-transform is the fastest" in shown
    assert "order alone, A(HW) on the GPU" in shown and "rows stay on the device; pure GPU" in shown


@pytest.mark.parametrize("more", [[], ["--forward"]])
def test_wide_rows_on_the_host_are_transformed_there(more, capsys):
    assert main(["plan", *PHYSICS, "--machine", H200, "--memory", "1g", *more]) == 0
    assert "chosen: pre-transform, rows are streamed" in capsys.readouterr().out


def test_rates_of_a_data_sheet_are_a_machine(tmp_path, capsys):
    rates = {"cores": 8, "host_gbs_per_core": 5, "host_gflops_per_core": 30, "bus_gbs": 20, "device_gbs": 800,
             "device_tflops": 20, "gpu": "a GPU"}  # fmt: skip
    (tmp_path / "rates.json").write_text(json.dumps(rates))
    sizes = ["--sizes", "nodes=100000,edges=1000000,features=64", "--memory", "16m", "--json", "-"]
    assert main(["plan", *sizes, "--machine", str(tmp_path / "rates.json")]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == "batch", "nothing else is printed"


def test_what_the_documentation_shows_is_what_is_printed():
    shown = shown_on_page()
    assert len(shown) == 3
    for line, output in shown.items():
        assert printed_by(line) == output, "python -m tests.planning.machines writes it anew"


def test_bad_use_is_one_line(tmp_path, capsys):
    save(typed_graph(200), tmp_path / "typed")
    edges = sbm(50).edge_index()
    save(Graph.from_edge_index(edges, 50), tmp_path / "bare")
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "wrong.json").write_text('{"cores": 4, "speed": 9}')
    (tmp_path / "host.json").write_text('{"cores": 4, "host_gbs_per_core": 5, "host_gflops_per_core": 30}')
    memory = ["--memory", "1g"]
    no_gpu = [] if torch.cuda.is_available() else [(["sbm-100", *memory], "describe one by --machine FILE")]
    for arguments, told in [
        *no_gpu,
        ([], "name a DATASET, or describe one"),
        (["sbm-100", *PRODUCTS], "name a DATASET, or describe one"),
        ([*PRODUCTS], "--memory 24g"),
        ([*PRODUCTS, "--memory", "much"], "a size must look like"),
        ([*PRODUCTS, *memory, "--model", "sage"], "KIND:WIDTHxLAYERS"),
        ([*PRODUCTS, *memory, "--model", "mlp:16x2"], "one of sage, gcn, gin, gat"),
        ([*PRODUCTS, *memory, "--fanouts", "5,5"], "2 hops, the model 3 layers"),
        ([*PRODUCTS, *memory, "--fanouts", "a,b,c"], "whole numbers with commas"),
        ([*PRODUCTS, *memory, "--device", "cpu"], 'execution="auto"'),
        ([*PRODUCTS, *memory, "--batch-size", "0"], "at least 1"),
        ([*PRODUCTS, *memory, "--ranks", "0"], "--ranks must be at least 1"),
        ([*PRODUCTS, *memory, "--forward"], "--full-graph"),
        ([*PRODUCTS, *memory, "--json", str(tmp_path / "no" / "where.json")], "does not exist"),
        (["--sizes", "nodes=10,edges=5", "--machine", H200, *memory], "needs features=N"),
        (["--sizes", "nodes=10,size=5", "--machine", H200, *memory], "'size=5'"),
        (["sbm-100", "--machine", str(tmp_path / "absent.json"), *memory], "absent.json"),
        (["sbm-100", "--machine", str(tmp_path / "text.json"), *memory], "no JSON"),
        (["sbm-100", "--machine", str(tmp_path / "wrong.json"), *memory], "neither a profile nor rates"),
        (["sbm-100", "--machine", str(tmp_path / "host.json"), *memory], "has no GPU"),
        (["nonsense", "--machine", H200, *memory], "nonsense"),
        ([str(tmp_path / "typed"), "--machine", H200, *memory], "several types"),
        ([str(tmp_path / "bare"), "--machine", H200, *memory], "no features 'x'"),
    ]:
        assert main(["plan", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("gnnsys plan: error: ") and told in error, (arguments, error)
