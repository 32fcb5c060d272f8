"""The page about full-graph training is code that runs, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fullgraph.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 9
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "rank 0 of 1, 2,000 nodes, 0 in the halo" in said and "\nTrue\n" in said
    assert "torch.Size([2000, 16])" in said and said.splitlines()[-1] == "step-0000000020"
    assert "ChebConv gives other rows on a piece of a graph" in said or "without PyG" in said


def test_the_page_names_tests_that_exist():
    written = {
        name
        for file in PAGE.parents[1].joinpath("tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) >= 5 and named <= written
