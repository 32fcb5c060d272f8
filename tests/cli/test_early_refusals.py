"""Mistakes that can be seen in names alone are refused without waiting for torch, in the words of the rooms."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gnnsys.cli import early_refusals as early
from gnnsys.graph import dataset, find_dataset
from gnnsys.partition import check_halo_hops, check_part_counts, check_parts_target, open_parts
from tests.support.processes import ROOT


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("GNNSYS_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "nowhere"],
        ["inspect", "."],
        ["serve", "nowhere"],
        ["inspect", ".", "--fanouts", "a"],
        ["inspect", ".", "--json", "nowhere/numbers.json"],
        ["partition", "nowhere.npz", "--parts", "2", "--out", "parts"],
        ["partition", "data/nowhere", "--parts", "2", "--out", "parts"],
        ["partition", "sbm-1k", "--parts", "0", "--out", "parts"],
        ["partition", "sbm-1k", "--parts", "2", "--halo-hops", "0", "--out", "parts"],
        ["partition", "sbm-1k", "--parts", "2", "--out", "data"],
    ],
)
def test_torch_is_not_waited_for(here: Path, words: list[str]) -> None:
    """In a process of its own: this one has torch."""
    program = """
import sys
from gnnsys.cli import main
assert main(sys.argv[1:]) == 2
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=here, timeout=120, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"gnnsys {words[0]}: error: ") and done.stderr.count("\n") == 1
    assert sorted(path.name for path in here.iterdir()) == ["data"]


@pytest.mark.parametrize("name", ["nowhere", "data", "/no/where"])
def test_what_are_no_parts_is_said_as_it_is_where_parts_are_opened(here: Path, name: str) -> None:
    assert refusal(lambda: early.check_are_parts(Path(name))) == refusal(lambda: open_parts(name))


@pytest.mark.parametrize(
    "name", ["edges.csv", "a/b", "/no/where.npz", "graph.npz", "x.TXT", "./y.tsv", "z.parquet", "../up"]
)
def test_a_file_that_is_not_there_is_said_as_it_is_where_graphs_are_found(here: Path, name: str) -> None:
    assert refusal(lambda: early.check_source(name)) == refusal(lambda: find_dataset(name))


def test_sources_that_may_be_something_are_left_to_who_reads_them(here: Path) -> None:
    (here / "edges.csv").touch()
    (here / "data" / "there.npz").touch()
    (here / "data" / "named.txt.npz").touch()
    for name in ("edges.csv", "there", "there.npz", "named.txt", "cora", "sbm-1k", "sbm-1.5k", "sbm-1k:num_classes=4"):
        early.check_source(name)
    for name in ("there", "there.npz", "named.txt"):
        assert find_dataset(name).exists()
    assert dataset("sbm-1.5k:num_features=1").num_nodes() == 1500


def test_a_directory_that_is_there_is_said_as_it_is_where_parts_are_written(here: Path) -> None:
    early.check_is_free(Path("nowhere"), overwrite=False)
    early.check_is_free(Path("data"), overwrite=True)
    with_words = refusal(lambda: early.check_is_free(Path("data"), overwrite=False))
    assert with_words == refusal(lambda: check_parts_target("data", overwrite=False))


def test_counts_below_one_are_said_as_they_are_where_graphs_are_cut() -> None:
    early.check_counts(1, 1, 1)
    assert refusal(lambda: early.check_counts(0, 1, 1)) == refusal(lambda: check_part_counts(0, 1))
    assert refusal(lambda: early.check_counts(1, -1, 1)) == refusal(lambda: check_part_counts(1, -1))
    assert refusal(lambda: early.check_counts(1, 1, 0)) == refusal(lambda: check_halo_hops(0))
