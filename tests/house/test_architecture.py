"""docs/architecture.md shows the imports that there are."""

from __future__ import annotations

from tests.house.draw_map import drawing, without_shortcuts
from tests.house.imports import MAP


def test_the_drawn_map_is_that_of_the_code():
    drawn = drawing()
    assert drawn in MAP.read_text(encoding="utf-8"), f"run python -m tests.house.draw_map --write\n{drawn}"
    assert drawn.count("-->") > 15


def test_an_arrow_is_left_out_where_a_longer_way_says_the_same():
    arrows: dict[str, set[str]] = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert without_shortcuts(arrows) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}
