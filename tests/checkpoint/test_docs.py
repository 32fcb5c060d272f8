"""The page about checkpoints is code that runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["step-0000000010", "10 0 10"]
    assert "odd['window'] is a slice, which a checkpoint cannot hold" in said[2]
