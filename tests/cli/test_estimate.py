"""`gnnsys estimate`: the table, the numbers as JSON, and one line for bad use."""

from __future__ import annotations

import json

import pytest

from gnnsys.cli import main

JOB = "tests.planning.memory.jobs:gnn"


def test_the_table_says_what_the_peak_is_made_of(capsys):
    assert main(["estimate", JOB, "--args", '{"kind": "GraphSAGE", "hidden": 16}']) == 0
    out = capsys.readouterr().out
    assert out.startswith("peak on cpu, traced: ")
    assert "activations" in out and "optimizer state" in out and "convs.0.lin_l" in out


def test_the_numbers_are_written_as_json(capsys, tmp_path):
    file = tmp_path / "estimate.json"
    assert main(["estimate", JOB, "--device", "h200", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert sum(written["by_kind"].values()) == sum(share["num_bytes"] for share in written["shares"])
    assert written["device"] == "h200"


def test_the_largest_value_that_fits_is_told(capsys):
    job = "tests.planning.memory.test_fit:job"
    assert main(["estimate", job, "--fit", "batch_size", "--args", '{"batch_size": 1000}', "--memory", "1m"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("batch_size=") and "fits 1.00 MiB; " in first and first.endswith(" does not")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([JOB, "--args", "{hidden: 3}"], "--args must be JSON"),
        ([JOB, "--args", "[3]"], "--args must be a JSON object"),
        ([JOB, "--device", "tpu"], "device must be one of cpu, h200"),
        ([JOB, "--memory", "1g", "--measure"], "leave --fit and --memory away"),
        ([JOB, "--calibrate"], "--calibrate measures the GPU alone"),
        ([JOB, "--quick"], "--quick is of --calibrate"),
        ([], "name a job, MODULE:FUNCTION"),
        ([JOB, "--fit", "hidden", "--memory", "much"], "much"),
        (["nothing"], "a job is MODULE:FUNCTION"),
        ([JOB, "--json", "/nowhere/found.json"], "the folder /nowhere does not exist"),
    ],
)
def test_bad_use_is_one_line(capsys, arguments, said):
    assert main(["estimate", *arguments]) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_memory_that_is_known_is_stated(capsys):
    assert main(["estimate", JOB, "--memory", "6g", "--device", "h200"]) == 0
    assert capsys.readouterr().out.startswith("peak on h200, stated: 6.00 GiB")


def test_a_job_that_cannot_be_traced_is_probed_and_the_operator_named(capsys):
    assert main(["estimate", "tests.planning.memory.test_probe:chosen_rows", "--args", '{"batch_size": 64}']) == 0
    told = capsys.readouterr()
    assert told.out.startswith("peak on cpu, probed: ")
    assert told.err.startswith("not traced: aten::") and "depends on rows" in told.err
