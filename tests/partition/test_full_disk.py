"""A disk that fills up while a graph is saved or partitioned: file and remedy are named, and nothing is left."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gnnsys.cli import main
from gnnsys.graph import Graph, disk_room, external_graph, save
from gnnsys.partition import levels, open_parts, partition_graph, stream_assignment
from tests.support.limits import files_up_to

LIMIT = 1 << 18


@pytest.fixture(scope="module")
def graph() -> Graph:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(4000, (2, 100_000), generator=generator)
    return Graph.from_edge_index(edges, 4000, {"x": torch.rand(4000, 64, generator=generator)})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    np.savetxt(tmp_path / "edges.txt", generator.integers(4000, size=(200_000, 2)), fmt="%d")
    return tmp_path / "edges.txt"


def check_full(write: Callable[[], object], tmp_path: Path, what: str) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with files_up_to(LIMIT), pytest.raises(disk_room.NoRoom) as caught:
        write()
    assert caught.value.errno == errno.EFBIG
    assert str(tmp_path) in str(caught.value.filename), "it names the file"
    assert f"while writing {what}" in str(caught.value) and "run it again" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is left behind"


def test_partitioning_and_the_second_run_is_accepted(graph: Graph, tmp_path: Path):
    check_full(lambda: partition_graph(graph, 2, tmp_path / "parts"), tmp_path, "a directory of parts to")
    partition_graph(graph, 2, tmp_path / "parts")
    assert open_parts(tmp_path / "parts").book.num_parts == 2


def test_parts_that_were_to_be_overwritten_stay(graph: Graph, tmp_path: Path):
    partition_graph(graph, 2, tmp_path / "parts")
    check_full(lambda: partition_graph(graph, 4, tmp_path / "parts", overwrite=True), tmp_path, "a directory of parts")
    assert open_parts(tmp_path / "parts").book.num_parts == 2


def test_saving_a_graph(graph: Graph, tmp_path: Path):
    check_full(lambda: save(graph, tmp_path / "graph"), tmp_path, "a saved graph to")


def test_building_a_graph_outside_memory(table: Path, tmp_path: Path):
    check_full(lambda: external_graph(table, tmp_path / "graph", memory_limit=64 << 20), tmp_path, "the saved graph")


def test_streaming(graph: Graph, tmp_path: Path):
    check_full(
        lambda: stream_assignment(graph, 2, memory_limit=1 << 30, folder=tmp_path),
        tmp_path,
        "temporary files of partitioning",
    )


def test_levels_that_are_put_away(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(levels, "_SPILL_FROM", 1)
    check_full(lambda: partition_graph(graph, 2, tmp_path / "parts"), tmp_path, "temporary files of partitioning")


def test_the_command_says_it_in_one_line(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with files_up_to(LIMIT):
        assert main(["partition", str(table), "--parts", "2", "--out", str(tmp_path / "parts")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "File too large while writing a directory of parts to" in error and "ulimit -f" in error and ".npy" in error
    assert main(["partition", str(table), "--parts", "2", "--out", str(tmp_path / "parts")]) == 0


def test_too_little_room_is_refused_before_anything_is_partitioned(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk_room.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(disk_room.NoRoom, match=r"No space left on device: a directory of parts .* needs 1 MB at least"):
        partition_graph(graph, 2, tmp_path / "parts", progress=lambda *_: pytest.fail("it began"))
