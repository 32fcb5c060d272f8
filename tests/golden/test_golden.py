"""Batches, losses and passes are those that were recorded; tests/golden/record.py writes records anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.golden.cases import CASES
from tests.golden.record import RECORDS, differences, reason_to_skip, record_of

EXPECTED = json.loads(RECORDS.read_text())
PORTABLE = {name: case for name, case in CASES.items() if case.is_portable}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("name", PORTABLE)
def test_results_are_those_that_were_recorded(name: str, folder: Path) -> None:
    case = CASES[name]
    reason = reason_to_skip(case)
    if reason is not None:
        pytest.skip(reason)
    assert name in EXPECTED, "not recorded: python -m tests.golden.record"
    lines = differences(record_of(case, folder), EXPECTED[name])
    assert not lines, f"{name} differs:\n" + "\n".join(lines)


def test_every_record_is_of_a_case() -> None:
    assert set(EXPECTED) == set(PORTABLE)


def test_what_changed_is_named() -> None:
    record = {"ids": "aa", "losses": [0.5, 0.25], "rows": [{"dtype": "f", "shape": [2], "numbers": [5, 7, 3, 4]}]}
    assert differences(record, record) == []
    assert differences(record | {"losses": [0.5, 0.25 * (1 + 1e-5)]}, record) == []
    assert differences(record | {"ids": "ab"}, record) == ["ids: other values"]
    assert differences(record | {"losses": [0.5, 0.2501]}, record) == ["losses: entry 1 is 0.2501, recorded was 0.25"]
    assert differences(record | {"losses": [0.5]}, record) == ["losses: 1 numbers or tensors, recorded were 2"]
    rows = [{"dtype": "f", "shape": [2], "numbers": [5, 7, 3.1, 4]}]
    assert differences(record | {"rows": rows}, record)[0].startswith("rows: entry 0 is")
    assert differences({"ids": "aa", "more": "a"}, record)[:2] == [
        "losses: not there any more",
        "rows: not there any more",
    ]
    assert "more: new" in differences({"ids": "aa", "more": "a"}, record)


def test_a_draw_under_another_seed_is_another_record(folder: Path) -> None:
    """The records of two cases that differ by their seed alone differ in what is sampled, and not in the seeds."""
    lines = differences(EXPECTED["nodes, other seed"], EXPECTED["nodes, uniform"])
    assert "node n_id: other values" in lines and not any("input_id" in line for line in lines)


def test_bits_dtypes_and_shapes_are_part_of_a_record(folder: Path) -> None:
    from tests.golden.case import Case

    def record(tensor: torch.Tensor) -> dict:
        return record_of(Case(lambda _: {"rows": [tensor]}), folder)

    rows = torch.tensor([[0.0, 1.0]])
    others = [-rows, rows.double(), rows.view(2), torch.nextafter(rows, rows + 1)]
    assert record(rows.clone()) == record(rows) and all(record(other) != record(rows) for other in others)
