"""What users give as links: both ends, edges of the graph, a share, or these by edge type. And links' reverses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EDGE, EdgeType, Graph, GraphIds, IdsLike, as_links, check_rows_of_inputs, numbered_ids, some
from gnnsys.loader.link_inputs import check_labels, give_weights, make_seeder
from gnnsys.loader.links import EdgeInputs, Exclusion, LinkReader, Links
from gnnsys.loader.negatives import NegativeSampling
from gnnsys.loader.subgraph import reverse_of
from gnnsys.loader.typed_links import TypedLinks
from gnnsys.sampling import AnyGraph, Asked, Sampler
from gnnsys.seeds import InputIds, Share, check_alone, check_share

InputLinks: TypeAlias = "Tensor | GraphIds | IdsLike | EdgeType | tuple[EdgeType, Any] | Share | None"


def resolve_inputs(
    graph: AnyGraph, given: InputLinks, label: Tensor | None, time: Tensor | None
) -> tuple[EdgeType, LinkReader, int, dict[str, int]]:
    """The edge type, the links, how many there are, and what a schedule must know of other ranks' shares."""
    if isinstance(given, Share):
        check_share(graph, given, "edge_label_index")
        if given.type not in graph.edge_types:
            raise ValueError(f"the share is of {given.type!r}, links must be of one of {some(graph.edge_types)}")
        inputs = EdgeInputs(InputIds(given.ids), ends_of(graph, given.type), label, time)
        return given.type, inputs, len(given.ids), {"largest": given.largest}
    edge_type, index = named_links(graph, given)
    if index is not None or isinstance(graph, Graph):
        src, dst = check_links(graph, edge_type, index)
        numbers = torch.arange(src.numel(), device="cpu")
        links = Links(numbers, src, dst, label, time, edge_id=numbers if index is None else None)
        return edge_type, links, src.numel(), {}
    check_alone(graph, edge_type, None)
    num_edges = graph.num_edges(edge_type)
    if num_edges == 0:
        raise ValueError("edge_label_index is empty: no links to start from")
    return edge_type, EdgeInputs(InputIds(_AllEdges(num_edges)), ends_of(graph, edge_type), label, time), num_edges, {}


def resolve_typed_links(
    graph: AnyGraph,
    sampler: Sampler,
    given: Mapping[EdgeType, Any],
    labels: Any,
    weights: Any,
    neg_sampling: Any,
    exclude: bool | str,
) -> dict[EdgeType, TypedLinks]:
    """What a dict of links by edge type stands for; ValueError where types or labels do not fit."""
    if not given:
        raise ValueError("edge_label_index is empty: no edge types")
    by_type = {}
    all_given = {
        "edge_label_index": given, "edge_label": labels, "edge_label_weight": weights, "neg_sampling": neg_sampling,
    }  # fmt: skip
    for name, of in all_given.items():
        by_type[name] = isinstance(of, Mapping) and (name != "neg_sampling" or any(isinstance(t, tuple) for t in of))
        for edge_type in of if by_type[name] else ():
            if edge_type not in graph.edge_types:
                raise ValueError(f"{name}: edge type {edge_type!r} does not exist, only {some(graph.edge_types)}")
            if edge_type not in given:
                raise ValueError(f"{name}: there are no links of type {edge_type!r}, only of {some(list(given))}")
    for name in ("edge_label", "edge_label_weight"):
        if all_given[name] is not None and not by_type[name]:
            raise ValueError(f"{name} must be a dict by edge type, as edge_label_index is")
    found = {}
    for edge_type, links in given.items():
        negatives = NegativeSampling.cast(neg_sampling.get(edge_type) if by_type["neg_sampling"] else neg_sampling)
        label = None if labels is None else labels.get(edge_type)
        weight = None if weights is None else weights.get(edge_type)
        check_rows_of_inputs(graph, links, edge_label=label, edge_label_weight=weight)
        label = check_labels(negatives, None if label is None else label.cpu())
        if isinstance(links, Share) and links.type != edge_type:
            raise ValueError(f"edge_label_index: the links given for {edge_type!r} are a share of {links.type!r}")
        named = links if isinstance(links, Share) else (edge_type, links)
        _, inputs, num_links, shares = resolve_inputs(graph, named, label, None)
        if label is not None and label.shape[0] != num_links:
            raise ValueError(f"edge_label of {edge_type!r} must have one entry per link, {num_links}, got {len(label)}")
        of_links = give_weights(graph, edge_type, inputs, num_links, weight)
        seeder = make_seeder(graph, edge_type, negatives, False, None, num_links, inputs.has_edge_ids)
        reverse = resolve_reverse(graph, edge_type, None, exclude)
        ends = [inputs.src, inputs.dst] if isinstance(inputs, Links) else [inputs.ids]  # type: ignore[attr-defined]
        found[edge_type] = TypedLinks(
            inputs, num_links, shares.get("largest"), seeder,
            [*ends, label, *([] if of_links is None else [of_links])], negatives,
            Exclusion(sampler, edge_type, reverse) if exclude else None, label is not None, weight is not None,
        )  # fmt: skip
    return found


def resolve_reverse(
    graph: AnyGraph, edge_type: EdgeType, given: EdgeType | None, exclude: bool | str
) -> EdgeType | None:
    """The type whose edges are the reverses of links; ValueError where reverses were asked for and there are none."""
    if exclude not in (True, False, "self", "reverse"):
        raise ValueError(f"exclude_supervision must be True, False, 'self' or 'reverse', got {exclude!r}")
    if exclude == "self":
        if given is not None:
            raise ValueError("exclude_supervision='self' leaves reverses in: leave reverse_edge_type away")
        return None
    if graph.is_homogeneous:
        return EDGE
    if given is not None:
        graph.num_edges(given)  # ValueError where there is no such type
        return given
    found = reverse_of(edge_type, graph)
    if found is None and exclude == "reverse":
        src, relation, dst = edge_type
        raise ValueError(
            f"exclude_supervision='reverse': edge type {edge_type!r} has no reverse type "
            f"{(dst, 'rev_' + relation, src)!r}: name it, reverse_edge_type=..., or write exclude_supervision='self'"
        )
    return found


class _AllEdges:
    """All edges of a type: the i-th has id i."""

    def __init__(self, num_edges: int) -> None:
        self._num_edges = num_edges

    def __len__(self) -> int:
        return self._num_edges

    def __getitem__(self, chosen: Tensor) -> Tensor:
        return chosen


def _is_edge_type(given: Sequence[Any]) -> bool:
    return len(given) == 3 and all(isinstance(name, str) for name in given)


def ends_of(graph: AnyGraph, edge_type: EdgeType) -> Callable[[Tensor], Asked[tuple[Tensor, Tensor]]]:
    """From edge ids to the edges' ends."""
    if not isinstance(graph, Graph):
        return partial(graph.begin_edge_ends, edge_type=edge_type)
    src, dst = edge_index_of(graph, edge_type)
    return lambda ids: Asked(lambda: (src[ids], dst[ids]), waits=False)


def named_links(graph: AnyGraph, given: Any) -> tuple[EdgeType, Tensor | None]:
    """The edge type and the links, if any, that a user's `edge_label_index` names."""
    edge_type, index = None, given
    if isinstance(given, GraphIds):
        edge_type = _type_of_links(given)
    elif isinstance(given, (tuple, list)):
        if _is_edge_type(given):
            edge_type, index = tuple(given), None
        elif len(given) == 2 and isinstance(given[0], (tuple, list)) and _is_edge_type(given[0]):
            edge_type, index = tuple(given[0]), given[1]
    if edge_type is None:
        if len(graph.edge_types) != 1:
            raise ValueError(
                "edge_label_index must name an edge type, as a type or (type, links), for heterogeneous data, one of "
                f"{some(graph.edge_types)}"
            )
        edge_type = graph.edge_types[0]
    graph.num_edges(edge_type)  # ValueError where there is no such type
    if index is None:
        return edge_type, None
    return edge_type, as_links(numbered_ids(graph, index, edge_type, "edge_label_index"), "edge_label_index")


def _type_of_links(given: GraphIds) -> EdgeType:
    """ValueError for ids of nodes or edges."""
    if isinstance(given.type, str) or given.ids.dim() != 2:
        raise ValueError(
            f"edge_label_index must be links [2, num_links], got {given!r}: of edges gnnsys.split(graph, ids) makes a "
            "share"
        )
    return given.type


def check_links(graph: AnyGraph, edge_type: EdgeType, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ends (int64) of links, all edges by default; ValueError where there are none, or some are no nodes."""
    if index is None:
        assert isinstance(graph, Graph)
        index = edge_index_of(graph, edge_type)
    if index.shape[1] == 0:
        raise ValueError("edge_label_index is empty: no links to start from")
    for end, node_type in zip(index, (edge_type[0], edge_type[2]), strict=True):
        bound = graph.num_nodes(node_type)
        if not 0 <= int(end.min()) <= int(end.max()) < bound:
            raise ValueError(f"edge_label_index must be in [0, {bound}), got {int(end.min())} to {int(end.max())}")
    src, dst = index.long().cpu()
    return src, dst


def edge_index_of(graph: Graph, edge_type: EdgeType) -> Tensor:
    """All edges of a type, in the order the user gave them, int64 [2, num_edges], on the host."""
    return graph.edge_index(edge_type).cpu()
