"""What imports what, read from the source: every `import`, wherever it stands, and every `gnnsys.room.name`.

Nothing is imported for it. A room is a folder of `gnnsys/`; the order of rooms is that of the table in
docs/architecture.md, which is the one place where the order is written.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gnnsys"
MAP = ROOT / "docs" / "architecture.md"
_ATTRIBUTE = re.compile(r"(?<!from )(?<!import )\bgnnsys\s*\.")  # what may be `gnnsys.room.name`
_BODIES = ("body", "orelse", "handlers", "finalbody", "cases")  # where statements have statements


@dataclass(frozen=True)
class Use:
    """A file uses `name` of module `module` of the package; without a name, the module itself."""

    file: str  # from the root of the repository
    line: int
    module: str  # "gnnsys.comm", "gnnsys.comm.wire"
    name: str | None = None

    @property
    def room(self) -> str | None:
        """The room that is used; None where it is the package alone."""
        parts = self.module.split(".")
        if len(parts) > 1:
            return parts[1]
        if self.name in rooms_on_disk():
            return self.name
        return rooms_of_names().get(self.name or "")

    def __str__(self) -> str:
        what = f"{self.module}.{self.name}" if self.name else self.module
        return f"{self.file}:{self.line}: {what}"


def rooms() -> list[str]:
    """The rooms in the order of the map: a room may import those before it."""
    return re.findall(r"^\| `gnnsys/(\w+)/` \|", MAP.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def rooms_on_disk() -> frozenset[str]:
    return frozenset(file.parent.name for file in PACKAGE.glob("*/__init__.py"))


@cache
def public_names(room: str | None = None) -> frozenset[str]:
    """`__all__` of a room, or of the package."""
    file = PACKAGE.joinpath(*([room] if room else []), "__init__.py")
    return frozenset(ast.literal_eval(_assigned(file, "__all__")))


@cache
def rooms_of_names() -> dict[str, str]:
    """The room of each name that the package itself has, such as `gnnsys.NeighborLoader`."""
    return dict(ast.literal_eval(_assigned(PACKAGE / "__init__.py", "_ROOM_OF")))


def room_of(file: str) -> str | None:
    """The room that a file is in; None for what is in no room, such as examples."""
    parts = Path(file).parts
    return parts[1] if parts[0] == PACKAGE.name and len(parts) > 2 else None


@cache
def uses(folder: str) -> tuple[Use, ...]:
    """Uses of the package in the Python files below `folder`, which is named from the root of the repository."""
    files = sorted(ROOT.joinpath(folder).rglob("*.py"))
    gc.disable()  # trees are no garbage: to look for some took most of the time
    try:
        return tuple(use for file in files for use in _uses_in(file))
    finally:
        gc.freeze()
        gc.enable()


def _uses_in(file: Path) -> Iterator[Use]:
    name = file.relative_to(ROOT).as_posix()
    inner: set[ast.expr] = set()  # `gnnsys.store` inside `gnnsys.store.Table` is no use of its own
    for node in ast.walk(parsed(file)) if _ATTRIBUTE.search(_text(file)) else statements(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    yield Use(name, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, file)
            if _is_ours(module):
                for alias in node.names:
                    yield Use(name, node.lineno, module, alias.name)
        elif isinstance(node, ast.Attribute) and (dotted := _dotted(node)) and dotted[0] == PACKAGE.name:
            inner.add(node.value)  # outer nodes are walked before inner ones
            if node in inner:
                continue
            yield _attribute(name, node.lineno, dotted)


def _attribute(file: str, line: int, dotted: list[str]) -> Use:
    """`gnnsys.room.name` is a use of that name; `gnnsys.room.module.name` reaches past the room, and says so."""
    folder = PACKAGE
    depth = 1
    while depth < len(dotted) and ((folder / dotted[depth]).is_dir() or (folder / f"{dotted[depth]}.py").is_file()):
        folder /= dotted[depth]
        depth += 1
    return Use(file, line, ".".join(dotted[:depth]), dotted[depth] if depth < len(dotted) else None)


def _dotted(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return before and [*before, node.attr]
    return None


def _absolute(node: ast.ImportFrom, file: Path) -> str:
    if not node.level:
        return node.module or ""
    folder = file.relative_to(ROOT).parts[: -node.level]
    return ".".join([*folder, *([node.module] if node.module else [])])


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE.name


def _assigned(file: Path, name: str) -> ast.expr:
    for node in parsed(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, ast.Assign)
            return node.value
    raise AssertionError(f"{file.relative_to(ROOT)} has no {name}")


def statements(file: Path) -> Iterator[ast.AST]:
    """All statements of a file, those inside functions and classes too. Most of a tree is expressions."""
    found: list[ast.AST] = [parsed(file)]
    for node in found:
        for field in _BODIES:
            found += getattr(node, field, ())
        if not isinstance(node, (ast.ExceptHandler, ast.match_case)):
            yield node


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(_text(file), str(file))


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
