"""Imports keep to the map in docs/architecture.md: a room uses the rooms above it, by the names in their `__all__`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house import imports
from tests.house.draw_map import drawing, without_shortcuts
from tests.house.imports import MAP, PACKAGE, ROOT, Use, public_names, room_of, rooms, rooms_on_disk, uses

OUTSIDE = ("examples", "launch", "docker")
NATIVE = ("_C", "_cuda")  # the libraries built from csrc/, loaded by `ops` alone

# What a file may use although no `__all__` names it: (file, module) -> why.
EXCEPTIONS = {
    ("gnnsys/cli/commands/info.py", "gnnsys._C"): "says where the native core was loaded from, or why it was not",
    (
        "gnnsys/bench/store/pull_checks.py",
        "gnnsys.comm.wire",
    ): "counts instructions of the wire's own checks",
}


def between_rooms() -> list[Use]:
    """Uses of one room in another. The package's own `__init__` is in no room."""
    return [use for use in uses("gnnsys") if (me := room_of(use.file)) and use.room not in (None, me, *NATIVE)]


def problem(use: Use) -> str | None:
    """What is wrong with a use of another room's insides, or of a name that the package has not."""
    room, depth = use.room, use.module.count(".")
    if room is None:
        dunder = use.name is not None and use.name.startswith("__") and use.name.endswith("__")
        return None if use.name is None or dunder else "the package has no such name"
    if room in NATIVE:
        return "the native library is loaded by gnnsys.ops"
    if depth > 1:
        return f"reaches past what gnnsys.{room} names"
    if depth == 1 and use.name is not None and use.name not in public_names(room):
        return f"gnnsys.{room}.__all__ does not name it"
    return None


def excepted(use: Use) -> bool:
    name = f"{use.module}.{use.name}" if use.name else use.module
    return any((use.file, module) in EXCEPTIONS for module in (use.module, name))


def test_the_map_has_every_room_once():
    assert len(rooms()) == len(set(rooms())) and set(rooms()) == rooms_on_disk()


def test_the_drawn_map_is_that_of_the_code():
    drawn = drawing()
    assert drawn in MAP.read_text(encoding="utf-8"), f"run python -m tests.house.draw_map --write\n{drawn}"
    assert drawn.count("-->") > 15


def test_an_arrow_is_left_out_where_a_longer_way_says_the_same():
    arrows: dict[str, set[str]] = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert without_shortcuts(arrows) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}


def test_a_room_imports_only_rooms_above_it():
    order = {room: number for number, room in enumerate(rooms())}
    found = between_rooms()
    assert len(found) > 500
    assert [str(use) for use in found if order[str(use.room)] > order[str(room_of(use.file))]] == []


def test_a_room_uses_of_others_what_their_init_names():
    others = [use for use in uses("gnnsys") if (me := room_of(use.file)) and use.room != me]
    wrong = [f"{use}: {why}" for use in others if (why := problem(use)) and not excepted(use)]
    assert wrong == []


def test_every_exception_is_needed_and_they_are_few():
    needed = [use for use in uses("gnnsys") if room_of(use.file) != use.room and problem(use)]
    left = {key for key in EXCEPTIONS if not any(key[0] == use.file and excepted(use) for use in needed)}
    assert left == set() and len(EXCEPTIONS) <= 3


def test_no_room_knows_the_command_line_which_comes_last():
    assert [str(use) for use in uses("gnnsys") if use.room == "cli" and room_of(use.file) != "cli"] == []
    assert rooms()[-1] == "cli"


@pytest.mark.parametrize("folder", OUTSIDE)
def test_scripts_outside_the_package_use_public_names_only(folder: str):
    wrong = [f"{use}: {why}" for use in uses(folder) if (why := problem(use))]
    assert wrong == []
    assert uses(folder) or not list(ROOT.joinpath(folder).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(rooms_on_disk()))
def test_what_a_room_names_is_there(room: str):
    """Every name of `__all__` is bound by the `__init__`, or is a module of the room."""
    bound: set[str] = set()
    for node in ast.walk(imports.parsed(PACKAGE / room / "__init__.py")):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    assert public_names(room) <= bound


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    from gnnsys.comm.wire import Header", "gnnsys.comm.wire.Header"),
        ("if TYPE_CHECKING:\n    from gnnsys.comm import _secret", "gnnsys.comm._secret"),
        ("import gnnsys.store.table", "gnnsys.store.table"),
        ("import gnnsys\nx = gnnsys.store.table.Table", "gnnsys.store.table.Table"),
        ("from gnnsys import nothing_of_the_kind", "gnnsys.nothing_of_the_kind"),
        ("from .. import _C", "gnnsys._C"),
    ],
)
def test_a_use_that_is_not_allowed_is_found_wherever_it_stands(text: str, expected: str, tmp_path: Path, monkeypatch):
    file = tmp_path / "gnnsys" / "loader" / "made_up.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    wrong = [str(use) for use in imports._uses_in(file) if problem(use)]
    assert wrong and all(line.endswith(f": {expected}") for line in wrong)
