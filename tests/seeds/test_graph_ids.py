"""Ids on parts carry their numbering: original ids make the batches of a graph in memory, others' are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, EdgeType, Graph, GraphIds
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.partition import Parts
from gnnsys.sampling import DistGraph
from gnnsys.sampling.find_ids import global_ids_of
from gnnsys.seeds import Seeds, split
from tests.sampling.machines import CITES, WRITES, homogeneous, machines, typed
from tests.support.grid import grid


def chosen(num_ids: int, count: int = 25) -> Tensor:
    return torch.randperm(num_ids, generator=torch.Generator().manual_seed(3))[:count]


def some_links(graph: Graph, edge_type: EdgeType) -> Tensor:
    return torch.stack([chosen(graph.num_nodes(t), 30) for t in (edge_type[0], edge_type[2])])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Graph, DistGraph]]]:
    """A graph in memory and the second of two machines that have its three parts."""
    folder: Path = tmp_path_factory.mktemp("parts")
    plain, several = homogeneous(), typed()
    with (
        machines(plain, folder / "plain", 3, machine_of_part=[0, 1, 1]) as (_, one),
        machines(several, folder / "typed", 3, machine_of_part=[0, 1, 1]) as (_, other),
    ):
        yield {"plain": (plain, one), "typed": (several, other)}


# What a user may give, and the loader it is given to.
NODES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "ids": ("plain", lambda g: g.from_original(chosen(120))),
    "list": ("plain", lambda g: g.from_original(chosen(120).tolist())),
    "ids with a type": ("plain", lambda g: (NODE, g.from_original(chosen(120), NODE))),
    "mask": ("plain", lambda g: g.from_original(torch.arange(120) % 4 == 1)),
    "column": ("plain", lambda g: g.from_original((torch.arange(120) % 4 == 1).nonzero())),
    "ids of one type": ("typed", lambda g: g.from_original(chosen(90), "paper")),
    "mask of one type": ("typed", lambda g: ("author", g.from_original(torch.arange(40) % 3 == 1, "author"))),
    "by type": ("typed", lambda g: g.from_original({"paper": chosen(90), "author": torch.arange(40) % 3 == 1})),
}
LINKS: dict[str, tuple[str, Callable[[Any, Graph], Any]]] = {
    "links": ("plain", lambda g, m: g.from_original(some_links(m, EDGE))),
    "two ends": ("plain", lambda g, m: g.from_original(tuple(some_links(m, EDGE)))),
    "as many links as nodes": ("plain", lambda g, m: g.from_original(torch.arange(240).view(2, 120) % 2)),
    "links of a type": ("typed", lambda g, m: g.from_original(some_links(m, WRITES), WRITES)),
    "type and links": ("typed", lambda g, m: (WRITES, g.from_original(some_links(m, WRITES), WRITES))),
    "by type": ("typed", lambda g, m: g.from_original({t: some_links(m, t) for t in (WRITES, CITES)})),
}


def assert_same_batches(parts: DistGraph, ours: Any, theirs: Any) -> None:
    """The same original nodes and edges in the same batches, with the same rows."""
    num_batches = 0
    for mine, other in zip(ours, theirs, strict=True):
        num_batches += 1
        for t in other.node_types:
            assert torch.equal(parts.original_ids(mine.nodes[t]["n_id"], t), other.nodes[t]["n_id"])
            for name in {"x", "t"} & set(other.nodes[t]):
                assert torch.equal(mine.nodes[t][name], other.nodes[t][name])
        for t in other.edge_types:
            assert torch.equal(mine.edges[t]["edge_index"], other.edges[t]["edge_index"])
            assert torch.equal(parts.original_edge_ids(mine.edges[t]["e_id"], t), other.edges[t]["e_id"])
    assert num_batches > 1


@pytest.mark.usefixtures("one_epoch")
@grid(given=NODES)
def test_original_nodes_make_the_batches_of_a_graph_in_memory(cases: dict, given: Any) -> None:
    memory, parts = cases[given[0]]
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 3, "num_threads": 0}
    ours = NeighborLoader(parts, [3, 2], input_nodes=given[1](parts), **options)
    assert_same_batches(parts, ours, NeighborLoader(memory, [3, 2], input_nodes=given[1](memory), **options))


@pytest.mark.usefixtures("one_epoch")
@grid(given=LINKS)
def test_original_links_make_the_batches_of_a_graph_in_memory(cases: dict, given: Any) -> None:
    memory, parts = cases[given[0]]
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 3, "num_threads": 0, "neg_sampling": "binary"}
    ours, theirs = (
        LinkNeighborLoader(where, [3], edge_label_index=given[1](where, memory), **options) for where in (parts, memory)
    )
    assert_same_batches(parts, ours, theirs)


def test_the_numbering_of_ids_is_of_their_own_graph(cases: dict) -> None:
    memory, parts = cases["typed"]
    ids = chosen(90)
    assert torch.equal(memory.from_original(ids, "paper").ids, ids) and len(memory.from_global(ids, "paper")) == 25
    assert torch.equal(parts.from_global(ids, "paper").ids, ids)
    assert torch.equal(parts.original_ids(parts.from_original(ids, "paper").ids, "paper"), ids)
    edges = chosen(300)
    assert torch.equal(parts.original_edge_ids(parts.from_original(edges, WRITES).ids, WRITES), edges)
    assert repr(parts.from_original(edges, WRITES)) == f"GraphIds(25 edges of {WRITES!r})"


def test_ids_are_found_without_a_table_of_them(cases: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    _, parts = cases["typed"]
    ids = torch.cat([chosen(90), chosen(90)])
    expected = parts.global_ids(ids, "paper")
    monkeypatch.setattr(Parts, "has_global_ids", False)
    for piece in (7, 64, 1000):
        assert torch.equal(global_ids_of(parts, ids, "paper", piece), expected)
    assert global_ids_of(parts, ids[:0], "paper").numel() == 0


@pytest.mark.usefixtures("one_epoch")
def test_original_ids_are_split_into_shares(cases: dict) -> None:
    for name, type, count in (
        ("plain", NODE, 120),
        ("typed", "author", 40),
        ("plain", EDGE, 900),
        ("typed", CITES, 500),
    ):
        memory, parts = cases[name]
        original_of = parts.original_ids if isinstance(type, str) else parts.original_edge_ids
        for given in (chosen(count), torch.arange(count) % 3 == 0):
            share = split(parts, parts.from_original(given, type))
            assert torch.equal(original_of(share.ids, type).sort().values, split(memory, given, type=type).ids)
            assert share.recipe is not None and torch.equal(share.recipe.share(share.recipe.placement).ids, share.ids)


def test_ids_of_another_graph_or_type_are_refused(cases: dict, tmp_path: Path) -> None:
    memory, parts = cases["plain"]
    _, typed_parts = cases["typed"]
    ids = parts.from_original(chosen(90))
    with machines(memory, tmp_path / "other", 2, machine_of_part=[0, 0]) as (other,):
        for there in (memory, other):
            for given in (ids, split(parts, ids), Seeds(ids, NODE, 90, 90)):  # type: ignore[arg-type]
                with pytest.raises(ValueError, match="input_nodes: these ids were made by another graph"):
                    NeighborLoader(there, [2], input_nodes=given)
    with pytest.raises(ValueError, match="input_nodes: these ids were made by another graph"):
        NeighborLoader(parts, [2], input_nodes=memory.from_original(chosen(90)))
    with pytest.raises(ValueError, match=r"this share have no numbering: give Seeds graph.from_original\(ids\)"):
        NeighborLoader(parts, [2], input_nodes=Seeds(chosen(90), NODE, 90, 90))
    papers = typed_parts.from_original(chosen(90), "paper")
    wrong: dict[str, Callable[[], Any]] = {
        "must be of 'author', got ids of 'paper'": lambda: NeighborLoader(
            typed_parts, [2], input_nodes=("author", papers)
        ),
        "must be of 'author', got GraphIds": lambda: Seeds(papers, "author", 90, 90),
        "input_nodes must be ids of nodes, got GraphIds": lambda: NeighborLoader(
            parts, [2], input_nodes=parts.from_original([1], EDGE)
        ),
        "edge_label_index must be links": lambda: LinkNeighborLoader(
            parts, [2], edge_label_index=parts.from_original([1], EDGE)
        ),
        "carry their numbering already": lambda: parts.from_original(ids),
        "leave the type away": lambda: parts.from_original({NODE: [1]}, NODE),
        "type must be given": lambda: typed_parts.from_original([1]),
        "links are of an edge type": lambda: typed_parts.from_original([[0, 1], [1, 2]], "paper"),
        r"from_original must be in \[0, 120\)": lambda: memory.from_original([120]),
        r"from_global must be in \[0, 90\)": lambda: typed_parts.from_global([90], "paper"),
        "from_original: a mask must have 120 entries": lambda: parts.from_original([True]),
        "column is for masks": lambda: split(parts, ids, column=1),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_share_is_made_of_ids_that_carry_their_numbering(cases: dict) -> None:
    _, parts = cases["plain"]
    mine = Seeds(parts.from_original(chosen(120)), NODE, 25, 25)  # type: ignore[arg-type]
    batch = next(iter(NeighborLoader(parts, [2], input_nodes=mine, batch_size=25)))
    assert torch.equal(parts.original_ids(batch.n_id[:25]), chosen(120)) and isinstance(batch.n_id, Tensor)
    assert not isinstance(mine.ids, GraphIds)


def test_rows_that_are_set_on_parts_are_by_the_ids_that_are_named(cases: dict) -> None:
    """A mask that is set and then named chooses the nodes that it chooses in memory."""
    memory, parts = cases["typed"]
    mask, numbers, weight = torch.arange(90) % 4 == 1, torch.arange(90), torch.arange(500.0)
    ids, edge_ids = torch.arange(90), torch.arange(500)
    try:
        for graph in (memory, parts):
            graph.set_node_data("picked_mask", mask, "paper", order="original")
            graph.set_edge_data("number", weight, CITES, order="original")
        chosen = split(parts, "picked", type="paper").ids
        assert torch.equal(parts.original_ids(chosen, "paper").sort().values, split(memory, "picked", type="paper").ids)
        assert torch.equal(parts.edge_data[CITES]["number"].long(), parts.original_edge_ids(edge_ids, CITES))
        parts.set_node_data("number", numbers, "paper", order="global")
        assert torch.equal(parts.node_data["paper"]["number"], ids)
        for call, given in ((parts.set_node_data, (mask, "paper")), (parts.set_edge_data, (weight, CITES))):
            with pytest.raises(ValueError, match=r'ambiguous on parts: write order="original" .* or order="global"'):
                call("other", *given)
            with pytest.raises(ValueError, match='order must be "original" or "global", got'):
                call("other", *given, order="local")
        with pytest.raises(ValueError, match="a source is read by global id: leave order away"):
            parts.set_node_data("other", parts.node_data["paper"]["x"], "paper", order="original")
        parts.set_node_data("other", parts.node_data["paper"]["x"], "paper")
    finally:
        for graph in (memory, parts):
            for name in ("picked_mask", "number", "other"):
                graph.node_data["paper"].pop(name, None)
            graph.edge_data[CITES].pop("number", None)


def test_a_tensor_assigned_to_the_rows_of_parts_is_refused_by_every_way(cases: dict) -> None:
    _, parts = cases["typed"]
    for data, rows, setter in (
        (parts.node_data["paper"], torch.arange(90) % 4 == 1, "set_node_data"),
        (parts.edge_data[CITES], torch.arange(500.0), "set_edge_data"),
    ):
        before, table = list(data), data[next(iter(data))]
        message = rf"'\]\['mine'\] \(use graph.{setter}\): .* ambiguous on parts: write order=|'\)\]\['mine'\] \(use"
        for assign in (
            lambda data=data, rows=rows: data.__setitem__("mine", rows),
            lambda data=data, rows=rows: data.update(mine=rows),
            lambda data=data, rows=rows: data.__ior__({"mine": rows}),
            lambda data=data, rows=rows: data.setdefault("mine", rows),
        ):
            with pytest.raises(ValueError, match=message):
                assign()
            assert list(data) == before
        data["mine"] = table
        assert data.pop("mine") is table
