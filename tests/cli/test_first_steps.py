"""`gnnsys partition` on what people bring: edges one way only, sparse features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gnnsys.cli import main
from gnnsys.graph import load
from gnnsys.partition import open_parts


def sparse_npz(path: Path, num_rows: int, num_columns: int) -> Path:
    generator = np.random.default_rng(0)
    np.savez_compressed(
        path,
        edge_index=generator.integers(num_rows, size=(2, 4 * num_rows)),
        x_data=np.ones(num_rows, np.uint8),
        x_indices=generator.integers(num_columns, size=num_rows).astype(np.int32),
        x_indptr=np.arange(num_rows + 1),
        x_shape=np.array([num_rows, num_columns]),
    )
    return path


def test_reverse_edges_are_added_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 1\n3 0\n")
    out = str(tmp_path / "parts")
    assert main(["partition", str(tmp_path / "edges.txt"), "--parts", "2", "--out", out, "--add-reverse"]) == 0
    assert "with reverse edges: Graph(nodes {node: 4}, edges {node|to|node: 6})" in capsys.readouterr().out
    made = open_parts(out).merge()
    assert torch.equal(made.edge_index(), load(tmp_path / "edges.txt").add_reverse().edge_index())


def test_reverse_edges_that_would_not_fit_the_limit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--parts", "2", "--out", str(tmp_path / "out"), "--add-reverse", "--memory-limit", "64M"]
    assert main(["partition", "rmat-50k", *arguments]) == 2
    assert "--add-reverse works in memory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_sparse_features_take_as_dense_ones_is_said_before_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = sparse_npz(tmp_path / "g.npz", 500, 1000)
    assert main(["partition", str(source), "--parts", "2", "--out", str(tmp_path / "parts")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("x is sparse, 500 x 1,000 with 0.1 % of it filled")
    assert "takes 2.0 MB" in first


def test_sparse_features_that_do_not_fit_the_limit_are_made_dense_on_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    source = sparse_npz(tmp_path / "g.npz", 500, 40_000)
    monkeypatch.setattr("gnnsys.graph.npz._dense", lambda *_: pytest.fail("80 MB in memory"))
    arguments = ["--parts", "2", "--out", str(tmp_path / "parts"), "--memory-limit", "64M"]
    assert main(["partition", str(source), *arguments]) == 0
    x = open_parts(tmp_path / "parts").merge().node_data["node"]["x"]
    assert x.shape == (500, 40_000) and int(x.sum()) == 500


def test_sparse_features_that_fit_nowhere_are_refused_with_what_they_would_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = sparse_npz(tmp_path / "g.npz", 500, 2**31 - 1)
    for more in ([], ["--memory-limit", "64M"]):
        assert main(["partition", str(source), "--parts", "2", "--out", str(tmp_path / "parts"), *more]) == 2
        error = capsys.readouterr().err
        assert "becomes dense and needs 4.3 TB" in error and "keep fewer columns" in error
    assert [path.name for path in tmp_path.iterdir()] == ["g.npz"]
