"""docs/architecture.md shows the imports that there are, and its walk leads to files that answer."""

from __future__ import annotations

import re

from tests.house.draw_map import drawing, without_shortcuts
from tests.house.imports import MAP, ROOT


def test_the_drawn_map_is_that_of_the_code():
    drawn = drawing()
    assert drawn in MAP.read_text(encoding="utf-8"), f"run python -m tests.house.draw_map --write\n{drawn}"
    assert drawn.count("-->") > 15


def test_an_arrow_is_left_out_where_a_longer_way_says_the_same():
    arrows: dict[str, set[str]] = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert without_shortcuts(arrows) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}


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
