"""Every public call that takes a user's ids refuses plain ones on parts, in one line that says what to write.

Calls are found by the names of their arguments: a new one fails here until it has a case.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gnnsys.graph import EDGE, NODE
from gnnsys.sampling import DistGraph
from tests.sampling.machines import homogeneous, machines

IDS_OF = {"input_nodes", "edge_label_index", "indices", "node_idx", "what", "x"}
BY_INPUT = {"input_time", "edge_label", "edge_label_time", "edge_label_weight"}  # a row for each input
ARGUMENTS = IDS_OF | BY_INPUT
ROOMS = ("loader", "seeds", "fullgraph", "pyg", "dgl")
BOTH_WAYS = r"graph\.from_original\(ids\) .* graph\.from_global\(ids\)"

IDS, MASK, LINKS = torch.arange(30), torch.arange(120) % 4 == 0, torch.zeros(2, 30, dtype=torch.int64)
NODES: tuple[Any, ...] = (IDS, [1, 2], range(5), IDS.numpy(), MASK, MASK.tolist(), (NODE, IDS))
PAIRS: tuple[Any, ...] = (LINKS, LINKS.numpy(), (EDGE, LINKS))

# What each call is given: a function of its room, the parts and the argument.
REFUSED: dict[tuple[str, str, str], tuple[tuple[Any, ...], Callable[[Any, DistGraph, Any], Any]]] = {
    ("loader", "NeighborLoader", "input_nodes"): (
        (*NODES, {NODE: IDS}),
        lambda of, g, ids: of.NeighborLoader(g, [2], input_nodes=ids),
    ),
    ("loader", "LinkNeighborLoader", "edge_label_index"): (
        (*PAIRS, {EDGE: LINKS}),
        lambda of, g, ids: of.LinkNeighborLoader(g, [2], edge_label_index=ids),
    ),
    ("seeds", "split", "what"): (
        (*NODES[:-1], {NODE: IDS}, {EDGE: IDS}),
        lambda of, g, ids: of.split(g, ids),
    ),
    ("seeds", "resolve_nodes", "input_nodes"): (NODES, lambda of, g, ids: of.resolve_nodes(g, ids)),
    ("pyg", "NeighborLoader", "input_nodes"): (NODES, lambda of, g, ids: of.NeighborLoader(g, [2], input_nodes=ids)),
    ("pyg", "LinkNeighborLoader", "edge_label_index"): (
        PAIRS,
        lambda of, g, ids: of.LinkNeighborLoader(g, [2], edge_label_index=ids),
    ),
    ("dgl", "DataLoader", "indices"): (
        (IDS, MASK, {NODE: IDS}, {"_N": MASK}),
        lambda of, g, ids: of.DataLoader(g, ids, of.NeighborSampler([2])),
    ),
}
ROWS = {("fullgraph", "infer", "x")}  # by place among nodes, see below
BY_INPUTS: dict[tuple[str, str, str], int] = {  # how many inputs there are, where they are not listed
    (room, *of): count
    for room in ("loader", "pyg")
    for of, count in {
        ("NeighborLoader", "input_time"): 120,
        ("LinkNeighborLoader", "edge_label"): 900,
        ("LinkNeighborLoader", "edge_label_time"): 900,
        ("LinkNeighborLoader", "edge_label_weight"): 900,
    }.items()
}
NOT_ON_PARTS = {("pyg", "ShaDowKHopSampler", "node_idx")}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistGraph]:
    with machines(homogeneous(), tmp_path_factory.mktemp("ids") / "parts", 2) as (mine, _):
        yield mine


def room(name: str) -> Any:
    if name in ("pyg", "dgl"):
        pytest.importorskip({"pyg": "torch_geometric", "dgl": "dgl"}[name])
    return importlib.import_module(f"gnnsys.{name}")


@pytest.mark.parametrize("name", ROOMS)
def test_every_call_that_takes_ids_has_a_case(name: str) -> None:
    of, found = room(name), set()
    for called in of.__all__:
        value = getattr(of, called)
        takes = callable(value) and (inspect.isfunction(value) or "__init__" in vars(value))
        names = set(inspect.signature(value).parameters) if takes else set()
        if names & {"graph", "data"}:
            found |= {(name, called, argument) for argument in names & ARGUMENTS}
    assert found == {case for case in {*REFUSED, *ROWS, *BY_INPUTS, *NOT_ON_PARTS} if case[0] == name}


@pytest.mark.parametrize("case", REFUSED, ids=":".join)
def test_plain_ids_are_refused_on_parts(case: tuple[str, str, str], parts: DistGraph) -> None:
    given, call = REFUSED[case]
    of = room(case[0])
    for ids in given:
        with pytest.raises(ValueError, match=BOTH_WAYS) as refusal:
            call(of, parts, ids)
        assert "\n" not in str(refusal.value)


def test_rows_without_a_name_are_refused_on_parts(parts: DistGraph) -> None:
    from gnnsys.fullgraph import infer
    from gnnsys.nn import SAGEConv

    with pytest.raises(ValueError, match=r"ambiguous on parts: write the name of an array .*share_of\(graph"):
        infer([SAGEConv(4, 2)], parts, torch.zeros(120, 4))


@pytest.mark.parametrize("case", BY_INPUTS, ids=":".join)
def test_rows_of_inputs_that_are_not_listed_are_refused_on_parts(case: tuple[str, str, str], parts: DistGraph) -> None:
    name, loader, argument = case
    rows = torch.ones(BY_INPUTS[case], dtype=torch.float32 if argument == "edge_label_weight" else torch.int64)
    options: dict[str, Any] = {"time_attr": "t"} if "time" in argument else {}
    with pytest.raises(ValueError, match=rf"{argument}: inputs that are not listed come in the order of the parts"):
        getattr(room(name), loader)(parts, [2], **{argument: rows}, **options)
