"""README's lines run from top to bottom, as they are written: each file that a line needs is made by one before."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from gnnsys.cli import main
from tests.support.processes import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
NEEDS = {"gnnsys.pyg": "torch_geometric", "gnnsys.dgl": "dgl"}
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
SHORT = ["--epochs", "1"]  # what is shown is that they run


def blocks() -> list[tuple[str, str]]:
    """Language and text of every fenced block, on smaller graphs of the same kinds."""
    page = PAGE.read_text(encoding="utf-8").replace("sbm-20k", "sbm-2k").replace("typed-20k", "typed-1k")
    return re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_page_has_no_block_that_this_does_not_run():
    assert {language for language, _ in blocks()} == {"bash", "python"}


def test_its_lines_run_from_top_to_bottom_in_a_clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GNNSYS_DATA", raising=False)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {}
    ran = []
    for number, (language, text) in enumerate(blocks()):
        if language == "bash":
            ran += [run_line(line) for line in text.splitlines()]
        elif can_run(text):
            torch.manual_seed(0)
            exec(compile(text, f"{PAGE.name}, block {number}", "exec"), names)
        else:
            compile(text, f"{PAGE.name}, block {number}", "exec")
    assert [ran.count(program) for program in ("gnnsys", "torchrun")] == [5, 3]
    assert float(names["loss"].detach()) > 0  # type: ignore[attr-defined]


def can_run(text: str) -> bool:
    for face, library in NEEDS.items():
        if face in text:
            try:
                __import__(library)
            except ImportError:
                return False
    return '"cuda"' not in text or torch.cuda.is_available()


def run_line(line: str) -> str:
    """Commands run in this process, trainers as ranks of their own; what needs minutes (`make`) must be there."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "gnnsys":
        assert main(arguments) == 0, line
    elif program == "torchrun":
        option, count, script, *rest = arguments
        assert option == "--nproc-per-node", f"{line}: several machines are no line of the page"
        paths = [Path(part).resolve() for part in (script, *rest)]  # ranks begin in a folder of their own
        run_ranks(RUN, int(count), *paths, *SHORT, timeout=240)
    else:
        assert program == "make", f"nothing runs {line!r}"
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    return program
