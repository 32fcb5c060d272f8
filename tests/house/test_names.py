"""A name has one meaning: no class name in two rooms, no two modules of a room that differ by an s only."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.house.imports import PACKAGE, ROOT, room_of, rooms_on_disk

# The faces are called like what they take the place of.
FACES = {"pyg", "dgl"}
SHARED_WITH_FACES = {"NeighborLoader", "LinkNeighborLoader", "NeighborSampler", "LaborSampler", "PinSAGESampler"}
SHARED_WITH_FACES |= {"ShaDowKHopSampler"}
CLASS = re.compile(r"^[ \t]*class[ \t]+(\w+)[ \t]*[(:]", re.MULTILINE)  # to parse all files takes three seconds


def classes() -> dict[str, set[str]]:
    """Where every class is defined, those inside functions and classes too: name -> files."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in CLASS.findall(file.read_text(encoding="utf-8")):
            found[name].add(file.relative_to(ROOT).as_posix())
    return found


def test_no_class_name_is_used_in_two_rooms():
    several = {}
    for name, files in classes().items():
        rooms = {room_of(file) for file in files}
        if name in SHARED_WITH_FACES and len(rooms - FACES) <= 1:
            continue
        if len(rooms) > 1:
            several[name] = sorted(files)
    assert several == {}


@pytest.mark.parametrize("room", sorted(rooms_on_disk()))
def test_no_two_modules_of_a_room_differ_by_an_s_only(room: str):
    for folder in (PACKAGE / room, *(path for path in (PACKAGE / room).rglob("*") if path.is_dir())):
        names = {path.stem for path in folder.glob("*.py")} | {
            path.parent.name for path in folder.glob("*/__init__.py")
        }
        pairs = sorted((name, f"{name}s") for name in names if f"{name}s" in names)
        assert pairs == [], f"in {folder.relative_to(ROOT)}"
