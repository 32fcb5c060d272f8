"""The page about several machines is code that runs, alone as it says."""

from __future__ import annotations

import re
from pathlib import Path

from gnnsys.graph import sbm
from gnnsys.partition import partition_graph

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"


def test_the_snippet_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    partition_graph(sbm(2000, seed=1), 2, "parts")
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 1
    names: dict[str, object] = {}
    exec(compile(snippets[0], PAGE.name, "exec"), names)
    assert names["session"].is_closed  # type: ignore[attr-defined]
