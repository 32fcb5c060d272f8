"""The page about partitioning is code that runs, and names every option that the commands have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gnnsys.cli.main import build_parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "partitioning.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 6
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "train: the heaviest subpart has 1.0" in shown
    assert "4 parts agree with the source, bit for bit: 5,000 nodes" in shown


@pytest.mark.parametrize("command", ["partition", "inspect"])
def test_every_option_of_the_commands_is_on_the_page(command, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) >= 5
    page = PAGE.read_text(encoding="utf-8")
    assert {option for option in options if not re.search(rf"{option}\b(?!-)", page)} == set()
