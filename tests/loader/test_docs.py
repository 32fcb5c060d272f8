"""The page about loaders is code that runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loaders.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    os.environ.setdefault("DGLBACKEND", "pytorch")
    pytest.importorskip("torch_geometric", reason="the page shows PyG")
    pytest.importorskip("dgl", reason="the page shows DGL")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 5
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    assert "edge_label_index=[2, 8000]" in capsys.readouterr().out  # 25 even batches of 100,000 edges, and negatives
    assert getattr(names["session"], "is_closed", False)
