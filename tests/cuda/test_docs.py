"""The page about GPUs is code that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.docs import ROOT, run_page
from tests.support.open_sessions import close_sessions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_snippets_of_the_page_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        ran = run_page(ROOT / "docs" / "gpu.md")
    finally:
        close_sessions()
    assert ran.num_python >= 3
    placed, *rates, left = capsys.readouterr().out.splitlines()
    assert placed.startswith("place=")
    assert len(rates) == 2 and all(0 < float(rate) < 1 for rate in rates)  # of the rows, some were cached
    assert 0 < int(left.split()[0]) <= 8 << 30
