"""The page about GPUs is code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 3
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    assert 0 < float(capsys.readouterr().out) < 1  # of the rows, some were cached
