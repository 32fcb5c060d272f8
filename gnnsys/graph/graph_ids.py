"""GraphIds: ids that say which numbering they are in, which plain ids on a graph in parts do not.

A graph in memory has one numbering, the user's own. Parts have two: the user's, and the global ids that partitioning
gave. `from_original` and `from_global` of both kinds of graph make `GraphIds`; every call that takes a user's ids reads
them by `numbered_ids`, which refuses plain ones on parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gnnsys.graph.names_in_errors import some
from gnnsys.graph.schema import EdgeType, NodeType
from gnnsys.graph.user_ids import as_ids, as_integers, as_links, chosen_ids, is_column

ORIGINAL, GLOBAL = "original", "global"


class NumberedGraph(Protocol):
    """A graph in memory or in parts."""

    @property
    def numbering(self) -> str:
        """`ORIGINAL` of a graph in memory, of parts the digest of their manifest."""

    @property
    def node_types(self) -> list[NodeType]: ...
    @property
    def edge_types(self) -> list[EdgeType]: ...
    def num_nodes(self, node_type: NodeType | None = None) -> int: ...
    def num_edges(self, edge_type: EdgeType | None = None) -> int: ...


@dataclass(frozen=True, eq=False)
class GraphIds:
    """Ids of nodes, edges or links that carry their numbering, made by `graph.from_original` or `graph.from_global`.

    `ids` are int64 on the host, in the graph's own numbering: original ids in memory, global ids on parts. Nodes and
    edges are [n]; links are [2, n], the ids of both ends. `type` is the node type or the edge type.
    """

    ids: Tensor
    type: NodeType | EdgeType
    numbering: str

    def __len__(self) -> int:
        return self.ids.shape[-1]

    def __repr__(self) -> str:
        what = "nodes" if isinstance(self.type, str) else "edges" if self.ids.dim() == 1 else "links"
        return f"GraphIds({len(self)} {what} of {self.type!r})"


def numbered_ids(graph: NumberedGraph, given: Any, type: NodeType | EdgeType, name: str) -> Any:
    """Ids or a mask that a user gave for `type`, as `graph` numbers them.

    ValueError on parts for plain ones, and for `GraphIds` of another graph or type.
    """
    if not isinstance(given, GraphIds):
        if graph.numbering == ORIGINAL:
            return given
        raise ValueError(
            f"{name}: plain ids and masks are ambiguous on parts: write graph.from_original(ids) for ids of the graph "
            "before it was cut, or graph.from_global(ids) for ids that parts and batches have"
        )
    check_numbering(graph, given.numbering, name)
    if given.type != type:
        raise ValueError(f"{name} must be of {type!r}, got ids of {given.type!r}")
    return given.ids


def check_order(graph: NumberedGraph, order: str | None, where: str) -> None:
    """Raises ValueError unless `order` says which ids order the rows. In memory it may be None."""
    if order not in (ORIGINAL, GLOBAL, None):
        raise ValueError(f'{where}: order must be "original" or "global", got {order!r}')
    if order is None and graph.numbering != ORIGINAL:
        raise ambiguous_rows(where)


def ambiguous_rows(where: str) -> ValueError:
    """The error for a tensor of rows on parts without an order."""
    return ValueError(
        f'{where}: rows of a tensor are ambiguous on parts: write order="original" for rows by the ids of the '
        'graph before it was cut, or order="global" for rows by the ids that parts and batches have'
    )


def check_rows_of_inputs(graph: NumberedGraph, inputs: Any, **rows: Any) -> None:
    """ValueError on parts for rows of inputs that are not listed: those inputs come in the order of the parts.

    `inputs` is what the user gave a loader; `rows` are its arguments with a row for each input. A name of an array is
    read by id, and may be given.
    """
    is_pair = isinstance(inputs, (tuple, list)) and len(inputs) == 2
    chosen = inputs[1] if is_pair and isinstance(inputs[0], (str, tuple)) else inputs
    is_type = isinstance(chosen, tuple) and len(chosen) == 3 and all(isinstance(name, str) for name in chosen)
    if graph.numbering == ORIGINAL or not (chosen is None or isinstance(chosen, str) or is_type):
        return
    for name, values in rows.items():
        if values is not None and not isinstance(values, str):
            raise ValueError(
                f"{name}: inputs that are not listed come in the order of the parts, which these rows may not have: "
                "list the inputs, graph.from_original(ids), or give gnnsys.split and rows in the order of its ids"
            )


def check_numbering(graph: NumberedGraph, numbering: str | None, name: str) -> None:
    """ValueError for ids that carry another numbering than the graph's; None is none."""
    if numbering == graph.numbering or (numbering is None and graph.numbering == ORIGINAL):
        return
    if numbering is None:
        raise ValueError(f"{name}: ids of this share have no numbering: give Seeds graph.from_original(ids)")
    raise ValueError(
        f"{name}: these ids were made by another graph, or by other parts of it: make them with the graph that takes "
        "them, graph.from_original(ids)"
    )


def make_graph_ids(
    graph: NumberedGraph,
    given: Any,
    type: NodeType | EdgeType | None,
    name: str,
    translate: Callable[[Tensor, NodeType | EdgeType], Tensor] | None = None,
) -> Any:
    """`GraphIds` of ids, a mask, or links; a dict of them for a dict by type.

    `translate(ids, type)` turns checked ids into the graph's own.
    """
    if isinstance(given, Mapping):
        if type is not None:
            raise ValueError(f"{name}: ids are a dict by type: leave the type away")
        return {t: make_graph_ids(graph, ids, t, name, translate) for t, ids in given.items()}
    if isinstance(given, GraphIds):
        raise ValueError(f"{name}: these ids carry their numbering already: give them to the loader as they are")
    is_pair = isinstance(given, (list, tuple)) and len(given) == 2 and all(isinstance(end, Tensor) for end in given)
    is_links = is_pair and given[0].dim() == 1
    if not is_links:
        given = as_integers(given, name)
        if is_column(given) and (given.shape[0] != 2 or isinstance(type, str)):  # mask.nonzero()
            given = given.view(-1)
        is_links = given.dim() == 2
    type = _one_type(graph, type, is_links, name)
    own = translate or (lambda ids, _: ids)
    if isinstance(type, str):
        return GraphIds(own(_checked(given, graph.num_nodes(type), name, "node"), type), type, graph.numbering)
    if not is_links:
        return GraphIds(own(_checked(given, graph.num_edges(type), name, "edge"), type), type, graph.numbering)
    ends = zip(as_links(given, name), (type[0], type[2]), strict=True)
    links = [own(as_ids(ids, graph.num_nodes(t), name).long().cpu(), t) for ids, t in ends]
    return GraphIds(torch.stack(links), type, graph.numbering)


def _checked(given: Any, num_ids: int, name: str, what: str) -> Tensor:
    return chosen_ids(given, num_ids, name, what).long().cpu()


def _one_type(graph: NumberedGraph, type: NodeType | EdgeType | None, is_links: bool, name: str) -> NodeType | EdgeType:
    known: list[Any] = graph.edge_types if is_links else [*graph.node_types, *graph.edge_types]
    if type is not None and type not in known:
        what = "links are of an edge type, one of" if is_links else "the type must be one of"
        raise ValueError(f"{name}: {what} {some(known, near=type)}, got {type!r}")
    if type is not None:
        return type
    types: list[Any] = graph.edge_types if is_links else graph.node_types
    if len(types) != 1:
        raise ValueError(f"{name}: the type must be given, one of {some(known)}")
    return types[0]
