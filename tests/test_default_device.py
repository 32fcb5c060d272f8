"""torch.set_default_device decides where a user's tensors are made, never where ours are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from gnnsys.graph import Graph, dataset, load, save
from gnnsys.partition import partition_graph, stream_assignment, verify_parts

PACKAGE = Path(__file__).parents[1] / "gnnsys"
MAKERS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "tensor", "zeros",
}  # fmt: skip
MAKES = re.compile(rf"torch\.({'|'.join(sorted(MAKERS))})\(")  # few files have one, and to parse a file takes long
# Parameters are to be made on the default device. Full-graph training plans inside `torch.device("cpu")`, and tests of
# its own hold it to that. Benchmarks and commands are processes of ours.
ELSEWHERE = {"nn", "fullgraph", "bench", "cli"}


def unsaid(source: str) -> Iterator[int]:
    """Lines that make a tensor and do not say where."""
    for node in ast.walk(ast.parse(source)) if MAKES.search(source) else ():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS):
            continue
        is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if is_torch and not any(keyword.arg in ("device", None) for keyword in node.keywords):
            yield node.lineno


def test_every_tensor_is_made_on_a_device_that_is_named():
    assert [*unsaid("torch.zeros(3)\ntorch.ones(2, device=x.device)\ntorch.empty(*shape)")] == [1, 3]
    files = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in ELSEWHERE]
    assert len(files) > 100
    found = [f"{path.relative_to(PACKAGE)}:{line}" for path in files for line in unsaid(path.read_text("utf-8"))]
    assert not found


def test_graphs_are_made_saved_and_partitioned_whatever_the_default_device_is(tmp_path):
    def work(folder: Path) -> tuple[Graph, torch.Tensor]:
        graph = dataset("sbm-2k")
        save(graph, folder / "graph")
        graph = load(folder / "graph")
        partition_graph(graph, 2, folder / "parts", add_reverse=True)
        assert not verify_parts(folder / "parts").problems
        return graph, stream_assignment(graph, 2, memory_limit=1 << 30).part

    want, want_part = work(tmp_path / "plain")
    with torch.device("meta"):  # whatever is made there has no values
        got, got_part = work(tmp_path / "meta")
    assert torch.equal(got.csc().indices, want.csc().indices) and torch.equal(got_part, want_part)
    files = sorted(p.relative_to(tmp_path / "plain") for p in (tmp_path / "plain").rglob("*.npy"))
    assert files and all(
        (tmp_path / "plain" / name).read_bytes() == (tmp_path / "meta" / name).read_bytes() for name in files
    )
