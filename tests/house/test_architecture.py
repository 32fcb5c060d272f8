"""docs/architecture.md leads to files that answer. test_rooms.py compares its map with the code."""

from __future__ import annotations

import re

from tests.house.imports import MAP, ROOT


def test_every_file_it_names_is_there():
    named = set(re.findall(r"`((?:gnnsys|csrc|tests|docs|examples)/[\w./]*)`", MAP.read_text(encoding="utf-8")))
    assert len(named) > 60
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_the_files_of_the_walk_have_the_names_that_it_finds_there():
    walk = MAP.read_text(encoding="utf-8").split("## A newcomer's walk")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in walk.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20 and len({question for question, _ in rows}) == len(rows)
    for question, answer in rows:
        quoted = re.findall(r"`([^`]+)`", answer)
        files = [ROOT / each for each in quoted if "/" in each]
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        assert files, question
        for name in (each for each in quoted if "/" not in each):
            assert re.search(rf"\b{re.escape(name)}\b", text), (question, name)
