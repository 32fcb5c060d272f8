"""The page about several machines is code that runs, and names every option of `gnnsys serve`; that about failures
names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gnnsys.cli.main import build_parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"


def test_the_snippets_of_the_page_run_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 3
    names: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "Session(rank 0 of 1, machine 0 of 1): Seeds(" in shown and "IdRange(0, " in shown and "True" in shown


def test_every_option_of_the_command_is_on_the_page(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = PAGE.read_text(encoding="utf-8")
    assert len(options) >= 5 and {option for option in options if not re.search(rf"{option}\b(?!-)", page)} == set()


def test_every_promise_about_failures_names_a_test_that_exists():
    page = PAGE.with_name("failure.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    written = {name for file in Path(__file__).parents[1].rglob("test_*.py") for name in names_in(file)}
    assert len(rows) > 15 and all("`test_" in row for row in rows)
    assert set(re.findall(r"`(test_\w+)`", page)) <= written


def names_in(file: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
