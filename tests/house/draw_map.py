"""The map of rooms as the code has it: `python -m tests.house.draw_map` prints it, `--write` puts it into the page.

An arrow means "imports". It is left out where a longer way leads there as well: a picture of all two hundred arrows
says nothing. Rooms stand in the order of the table in docs/architecture.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from tests.house.imports import MAP, room_of, rooms, uses

BEGIN, END = "```mermaid\n%% drawn by tests/house/draw_map.py\n", "```\n"


def imported() -> dict[str, set[str]]:
    """Which rooms each room imports."""
    order = rooms()
    found: dict[str, set[str]] = {room: set() for room in order}
    for use in uses("gnnsys"):
        me, other = room_of(use.file), use.room
        if me in found and other in found and me != other:
            found[str(me)].add(str(other))
    return found


def without_shortcuts(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The fewest arrows that say the same of who depends on whom (there are no cycles)."""

    def reached(room: str) -> set[str]:
        return arrows[room].union(*(reached(other) for other in arrows[room]))

    return {
        room: {to for to in others if not any(to in reached(other) for other in others)}
        for room, others in arrows.items()
    }


def drawing() -> str:
    """The map as a Mermaid graph, those who are used by others at the bottom."""
    order = rooms()
    arrows = without_shortcuts(imported())
    lines = [f"    {room} --> {other}" for room in reversed(order) for other in order[::-1] if other in arrows[room]]
    return BEGIN + "\n".join(["graph TD", *lines]) + "\n" + END


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the drawing in docs/architecture.md")
    drawn = drawing()
    if not parser.parse_args().write:
        print(drawn, end="")
        return
    page = MAP.read_text(encoding="utf-8")
    written, count = re.subn(re.escape(BEGIN) + r".*?^```\n", lambda _: drawn, page, flags=re.MULTILINE | re.DOTALL)
    if count != 1:
        raise SystemExit(f"{MAP.name} must have one drawing that begins with {BEGIN.splitlines()[1]!r}, has {count}")
    MAP.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
