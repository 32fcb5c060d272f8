"""The page about graphs is code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "graphs.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch_geometric", reason="the page shows PyG")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 8
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    assert "src must be in [0, 2), got 2 at position 2" in capsys.readouterr().out
