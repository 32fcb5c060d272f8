"""Pages of the documentation as code: their fenced blocks, run from top to bottom in one process.

Python blocks of a page share their names, as the lines of a script do. Of shell blocks each line runs: `gnnsys` in this
process, `torchrun` as ranks of its own, `python` as a process. A block that cannot run says why on the line above it:
`<!-- not run: needs two machines -->`. Such a block is still read: it must compile, what it imports must exist, its
commands must parse.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gnnsys.cli import main
from gnnsys.cli.main import build_parser
from tests.support.processes import clean_environment, run_ranks

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("bash", "console")
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
SHORT = ("--epochs", "1")  # of examples: what is shown is that they run
FACES = {
    "gnnsys.pyg": "torch_geometric",
    "torch_geometric": "torch_geometric",
    "gnnsys.dgl": "dgl",
    "pytorch_lightning": "pytorch_lightning",
}

_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run: (\S.*?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` is why it is not run, None where it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, replace: Mapping[str, str] | None = None) -> list[Block]:
    """Every fenced block of a page; `replace` puts small graphs in the place of large ones."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        indent, language, code = fence.groups()
        reason = _REASON.search(text[: fence.start()])
        for old, new in (replace or {}).items():
            code = code.replace(old, new)
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(name_of(page), line, language, code, reason and reason[1]))
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


@dataclass
class Ran:
    """What came of a page: the names that its Python has made, the programs that were called, what could not run."""

    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    programs: list[str] = field(default_factory=list)
    num_python: int = 0
    lacking: dict[str, str] = field(default_factory=dict)  # block -> what this machine has not


def run_page(page: Path, replace: Mapping[str, str] | None = None) -> Ran:
    """Runs a page's blocks here, in the current folder, which begins empty."""
    Path("examples").symlink_to(ROOT / "examples")
    ran = Ran()
    torch.manual_seed(0)
    for block in blocks(page, replace):
        lacks = lacking(block)
        if block.reason is not None or lacks is not None:
            check_unrun(block)
            if lacks is not None and block.reason is None:
                ran.lacking[str(block)] = lacks
        elif block.language == "python":
            exec(_compiled(block), ran.names)
            ran.num_python += 1
        else:
            assert block.language in SHELL, f"{block}: a block of {block.language!r} is neither run nor marked"
            ran.programs += [run_line(block, line) for line in commands(block)]
    return ran


def lacking(block: Block) -> str | None:
    """What a block needs that this machine has not."""
    if block.language != "python":
        return None
    for name, library in FACES.items():
        if name in block.text and importlib.util.find_spec(library) is None:
            return library
    return "a GPU" if '"cuda"' in block.text and not torch.cuda.is_available() else None


def commands(block: Block) -> list[str]:
    """The lines of a shell block, without the prompt, comments and what a command prints."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if shlex.split(line, comments=True)]


def run_line(block: Block, line: str) -> str:
    """Runs one command; the name of its program."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "gnnsys":
        assert main(arguments) == 0, f"{block}: {line}"
    elif program == "torchrun":
        if arguments[0] == "--standalone":
            arguments = arguments[1:]
        option, count, script, *rest = arguments
        assert option == "--nproc-per-node", f"{block}: {line}: several machines cannot be run here"
        paths = [Path(part).resolve() for part in (script, *rest)]  # ranks begin in a folder of their own
        run_ranks(RUN, int(count), *paths, *SHORT, timeout=240)
    elif program == "python":
        short = SHORT if arguments[0].startswith("examples/") else ()
        done = subprocess.run(
            [sys.executable, *arguments, *short],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{block}: {line}\n{done.stderr}"
    else:
        raise AssertionError(f"{block}: nothing runs {line!r}: mark the block as not run, with the reason")
    return program


def check_unrun(block: Block) -> None:
    """What can be said of a block without running it."""
    if block.language == "python":
        compiled = compile(block.text, str(block), "exec", flags=ast.PyCF_ONLY_AST)
        for node in ast.walk(compiled):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gnnsys":
                check_names(block, str(node.module), [alias.name for alias in node.names])
    elif block.language in SHELL:
        for line in commands(block):
            check_command(block, shlex.split(line, comments=True))


def check_names(block: Block, module: str, names: Sequence[str]) -> None:
    if importlib.util.find_spec(FACES.get(module, "gnnsys")) is not None:
        there = importlib.import_module(module)
        assert [name for name in names if not hasattr(there, name)] == [], f"{block}: {module} has not all of {names}"


def check_command(block: Block, words: Sequence[str]) -> None:
    """A command of ours parses, a target of make is there, a script of ours exists."""
    program, *arguments = words[1:] if words[0] == "sudo" else words
    if program == "gnnsys":
        build_parser().parse_args(arguments)
    elif program == "make":
        assert arguments[0] in make_targets(), f"{block}: there is no make {arguments[0]}"
    elif program in ("python", "torchrun"):
        ours = [word for word in arguments if re.match(r"(examples|launch|csrc|tests|docs)/", word)]
        assert all((ROOT / word).exists() for word in ours), f"{block}: {ours}"
        if "-m" in arguments and (module := arguments[arguments.index("-m") + 1]).split(".")[0] in ("gnnsys", "tests"):
            assert importlib.util.find_spec(module) is not None, f"{block}: there is no module {module}"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def options_missing(page: Path, command: str) -> set[str]:
    """Options of a subcommand that a page does not name."""
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    parser = dict(subparsers.choices or {})[command]
    options = {text for action in parser._actions for text in action.option_strings if text.startswith("--")}
    assert len(options) > 4
    text = page.read_text(encoding="utf-8")
    return {option for option in options - {"--help"} if not re.search(rf"{option}\b(?!-)", text)}


@functools.cache
def written_tests() -> set[str]:
    """The names of all test functions."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.M)}


def _compiled(block: Block) -> Any:
    """Lines of a traceback are lines of the page."""
    return compile("\n" * block.line + block.text, block.page, "exec")
