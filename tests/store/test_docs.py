"""The page about tables is code that runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "store.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 6
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "torch.Size([3, 16]) DistTensor('scores', [1000, 16], torch.float32)" in said
    assert "0 shared" in said
    assert said.count("tensor([2., 1., 2.])") == 2, "id 3 was added to twice, and came back from disk"
