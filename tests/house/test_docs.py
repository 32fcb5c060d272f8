"""The documentation is code that runs, and names files, links and targets that exist."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.house.imports import public_names, rooms_on_disk
from tests.support.docs import (
    FACES,
    ROOT,
    SHELL,
    blocks,
    check_unrun,
    make_targets,
    name_of,
    pages,
    prose,
    run_page,
    written_tests,
)
from tests.support.open_sessions import close_sessions
from tests.support.processes import run_ranks


@dataclass(frozen=True)
class Setup:
    """How a page is run: small graphs for large ones, libraries that it shows, what it must print or make."""

    replace: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    prints: tuple[str, ...] = ()  # "a | b" is either
    python: int = 1  # blocks that run, at least
    programs: tuple[str, ...] = ()  # that are called, in order
    explainers: int = 0  # explaining processes that it starts: forked, where they need not import torch


SMALL = {"sbm-20k": "sbm-2k", "typed-20k": "typed-1k"}
PAGES = {
    "CONTRIBUTING.md": Setup(python=3),
    "README.md": Setup(SMALL, python=6, programs=("gnnsys", "torchrun") * 3 + ("gnnsys",) * 2),
    "docs/benchmarks.md": Setup(python=2, prints=("gather_rows True",)),
    "docs/checkpoints.md": Setup(
        python=3,
        prints=("step-0000000010\n10 0 10\n", "odd['window'] is a slice, which a checkpoint cannot hold"),
    ),
    "docs/distributed.md": Setup(
        python=5,
        prints=("Session(rank 0 of 1, machine 0 of 1): Seeds(", "IdRange(0, ", "True"),
    ),
    "docs/explanation.md": Setup(
        python=2, prints=("'guided_batches': ", "0 1 torch.Size([", "1 1 torch.Size(["), explainers=3
    ),
    "docs/fullgraph.md": Setup(
        python=9,
        prints=(
            "rank 0 of 1, 2,000 nodes, 0 in the halo",
            "\nTrue\n",
            "torch.Size([2000, 16])",
            "ChebConv gives other rows on a piece of a graph | without PyG",
            "step-0000000020",
        ),
    ),
    "docs/graphs.md": Setup(
        SMALL,
        needs=("torch_geometric",),
        python=9,
        prints=("src must be in [0, 2), got 2 at position 2",),
    ),
    "docs/jobs.md": Setup(python=2, prints=("['queued', 'queued', 'queued', 'queued']",)),
    "docs/launch.md": Setup(python=1, prints=("{'python': '3.",)),
    "docs/layers.md": Setup(needs=("torch_geometric",), python=3),
    "docs/loaders.md": Setup(
        needs=("torch_geometric", "dgl"),
        python=9,
        prints=("edge_label_index=[2, 8000]",),  # 25 even batches of 100,000 edges, and negatives
    ),
    "docs/partitioning.md": Setup(
        SMALL,
        python=6,
        prints=(
            "train: the heaviest subpart has 1.0",
            "4 parts agree with the source, bit for bit: 5,000 nodes",
        ),
        programs=("gnnsys", "gnnsys"),
    ),
    "docs/policies.md": Setup(python=1, prints=("[76.0]\n[602.0]\n",)),
    "docs/samplers.md": Setup(
        python=9,
        prints=(
            "in each layer the mean",
            "LadiesSampler [64, ",
            "8 batches of clusters",
            "drawn by these scores",
            "subgraphs were counted",
        ),
    ),
    "docs/sampling.md": Setup(python=4),
    "docs/schedules.md": Setup(
        python=1,
        prints=("chosen: mix; ", "of DAHA's plans, which copy rows every epoch, pre-transform is the fastest"),
        programs=("gnnsys", "gnnsys", "gnnsys"),
    ),
    "docs/suites.md": Setup(python=1, prints=("'sbm-20k/GraphSAGE/10,5/2x1/default'",)),
    "docs/typed.md": Setup(python=4),
    "docs/store.md": Setup(
        python=6,
        prints=(
            "torch.Size([3, 16]) DistTensor('scores', [1000, 16], torch.float32)",
            "0 shared",
            "tensor([2., 1., 2.])\ntensor([2., 1., 2.])\n",  # id 3 was added to twice, and came back from disk
        ),
    ),
}
ON_A_GPU = {"docs/gpu.md"}  # tests/cuda/test_docs.py runs it

every_page = pytest.mark.parametrize("page", pages(), ids=name_of)


@every_page
def test_its_blocks_run_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch, capsys):
    setup = PAGES.get(name_of(page), Setup(python=0))
    os.environ.setdefault("DGLBACKEND", "pytorch")
    for library in setup.needs:
        pytest.importorskip(library, reason=f"the page shows {library}")
    if name_of(page) in ON_A_GPU and not torch.cuda.is_available():
        pytest.skip("the page needs a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GNNSYS_DATA", raising=False)
    if setup.explainers:
        (ended,) = run_ranks(RUN_PAGE, 1, page, tmp_path, setup.explainers)
        said, (num_blocks, programs) = ended.stdout, json.loads(ended.stdout.splitlines()[-1])
    else:
        num_blocks, programs = run_here(page, setup)
        said = capsys.readouterr().out
    assert [text for text in setup.prints if not any(either in said for either in text.split(" | "))] == []
    assert num_blocks >= setup.python and tuple(programs) == setup.programs


def run_here(page: Path, setup: Setup) -> tuple[int, list[str]]:
    """Runs a page; its blocks of Python and the programs that it called."""
    try:
        ran = run_page(page, setup.replace)
        session = ran.names.get("session")
        assert session is None or session.is_closed
    finally:
        close_sessions()
    return ran.num_python + len(ran.lacking), ran.programs


# The same in a process that has explaining processes ready, which this one, with its threads, cannot fork.
RUN_PAGE = """
import json, os, sys
from pathlib import Path
page, folder, count = sys.argv[1:]
from tests.support.spare_servers import keep_spare_explainers
keep_spare_explainers(int(count))
os.chdir(folder)
from tests.house.test_docs import PAGES, name_of, run_here
print(json.dumps(run_here(Path(page), PAGES[name_of(Path(page))])))
"""


@every_page
def test_a_block_runs_or_says_why_it_does_not(page: Path):
    wrong = [str(b) for b in blocks(page) if b.reason is None and b.language not in ("python", *SHELL)]
    assert wrong == [], "write <!-- not run: REASON --> on the line above"


@every_page
def test_what_is_not_run_compiles_parses_and_names_what_is_there(page: Path):
    for block in blocks(page):
        if block.reason is not None:
            check_unrun(block)


@every_page
def test_code_stands_in_fences_where_it_is_seen(page: Path):
    """An indented block after an empty line is code that nothing would run; the text of a list item is not."""
    lines = prose(page).splitlines()
    found, in_list = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.strip() and not line.startswith(" "):
            in_list = re.match(r"[-*]|\d+\.", line) is not None
        if line.startswith("    ") and not before.strip() and not in_list:
            found.append(line)
    assert found == []


@every_page
def test_every_file_that_it_names_exists(page: Path):
    folders = "gnnsys|csrc|tests|docs|examples|launch|docker|requirements"
    named = set(re.findall(rf"(?<![\w./-])(?:{folders})/[\w./*-]*[\w*/]", prose(page)))
    named = {name for name in named if "NAME" not in name}  # stands for any
    assert {name for name in named if "*" not in name and not (ROOT / name).exists()} == set()
    assert {name for name in named if "*" in name and not list(ROOT.glob(name))} == set()


@every_page
def test_the_names_of_ours_that_it_shows_are_public(page: Path):
    shown = re.findall(r"(?<![\w/.-])gnnsys((?:\.\w+)+)", page.read_text(encoding="utf-8"))
    wrong = []
    for dotted in set(shown):
        room, *names = dotted.lstrip(".").split(".")
        allowed = public_names(room) if room in rooms_on_disk() else public_names()
        if (names[0] if room in rooms_on_disk() and names else room) not in {*allowed, *rooms_on_disk()}:
            wrong.append(f"gnnsys{dotted}")
    assert wrong == []


@every_page
def test_its_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), target
        if anchor:
            assert anchor in headings(there), target


@every_page
def test_the_make_targets_that_it_names_are_there(page: Path):
    assert set(re.findall(r"`make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"))) <= make_targets()


@every_page
def test_the_tests_that_it_names_are_there(page: Path):
    named = set(re.findall(r"`(test_\w+_\w+_\w+)`", page.read_text(encoding="utf-8")))
    assert named <= written_tests()
    assert len(named) >= {"docs/fullgraph.md": 5, "docs/failure.md": 20}.get(name_of(page), 0)


def test_the_sentences_about_security_are_names_of_tests():
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    sentences = re.findall(r"(?<![*\w])\*([a-z][^*]{15,})\*(?!\*)", page)
    named = {"test_" + re.sub(r"\W+", "_", sentence) for sentence in sentences}
    assert len(named) > 8 and named <= written_tests()


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("loaders", "gnnsys.loader.NeighborLoader"),
        ("loaders", "gnnsys.loader.LinkNeighborLoader"),
        ("loaders", "gnnsys.loader.PipelineOptions"),
        ("loaders", "gnnsys.pyg.NeighborLoader"),
        ("loaders", "gnnsys.pyg.LinkNeighborLoader"),
        ("loaders", "gnnsys.dgl.NeighborSampler"),
        ("distributed", "gnnsys.session.init"),
        ("distributed", "gnnsys.session.open"),
        ("distributed", "gnnsys.seeds.split"),
        ("checkpoints", "gnnsys.checkpoint.resume"),
        ("fullgraph", "gnnsys.fullgraph.HybridParallel"),
    ],
)
def test_every_argument_is_on_the_page(page: str, name: str):
    os.environ.setdefault("DGLBACKEND", "pytorch")
    room, _, member = name.rpartition(".")
    if room in FACES:
        pytest.importorskip(FACES[room], reason=f"{room} needs it")
    arguments = set(inspect.signature(getattr(importlib.import_module(room), member)).parameters)
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for_users = {each for each in arguments if not each.startswith("_")}
    missing = {each for each in for_users if not re.search(rf"\b{each}\b", text)}
    assert missing <= {"self", "args", "kwargs", "path"}


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_lists_every_page_once_with_a_line_of_what_is_there():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w.]+)\]\(([\w./]+)\) \| (.+) \|$", index, re.MULTILINE)
    listed = [target for _, target, _ in rows if not target.startswith("../")]
    there = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(there)
    assert all(target.endswith(name) and len(said) > 20 for name, target, said in rows)
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_set_up_is_of_a_page():
    assert set(PAGES) | ON_A_GPU <= {name_of(page) for page in pages()}


def test_a_block_that_is_neither_run_nor_marked_fails(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tests.support.docs.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```rust\nfn main() {}\n```\n\n<!-- not run: another language -->\n```rust\nfn main() {}\n```\n")
    assert [block.reason for block in blocks(page)] == [None, "another language"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="neither run nor marked"):
        run_page(page)


def test_a_python_block_that_fails_names_the_line_of_its_page(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tests.support.docs.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n1 / 0\n```\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError) as error:
        run_page(page)
    assert error.traceback[-1].lineno + 1 == 5
