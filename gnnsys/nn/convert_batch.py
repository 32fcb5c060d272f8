"""A typed batch as one of a single type, and back: what `x` + `edge_type` models read, and what typed ones read.

Rows are copied only where they must be: types that lie one behind the other in memory are one tensor already, and a
type whose nodes are together is a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, EdgeType, NodeType, some
from gnnsys.loader import Batch, TypeValues
from gnnsys.nn.typed_inputs import Metadata, types_of


def to_homogeneous(batch: Batch) -> Batch:
    """All node types as one, all edge types as one.

    The seeds' node type comes first, so `batch_size` still counts the first rows; then the others, in the batch's
    order. Where seeds are of several types, none comes first, and there is no `batch_size`. `node_type` and `edge_type`
    are int64 and number `batch.node_types` and `batch.edge_types`. Of other names those are kept that every type has
    with rows of one shape and dtype, `num_sampled_nodes` not among them: nodes no longer come hop by hop.
    """
    if not isinstance(batch, Batch):
        raise ValueError(
            f"to_homogeneous takes a batch of ours, got {type(batch).__name__}: a HeteroData has a to_homogeneous() of "
            "its own"
        )
    if batch.is_homogeneous:
        raise ValueError("the batch has one node type and one edge type already: pass batch.x and batch.edge_index")
    if not any("edge_index" in values for values in batch.edges.values()):
        raise ValueError("the batch has blocks and no edge_index: make it without expand='frontier'")
    first = batch.input_type if batch.input_type in batch.nodes else None
    order = sorted(batch.node_types, key=lambda t: t != first)
    sizes = [batch.nodes[t]["n_id"].numel() for t in order]
    offsets = dict(zip(order, accumulate(sizes, initial=0), strict=False))
    nodes = _joined([batch.nodes[t] for t in order], sizes)
    numbers = [batch.node_types.index(t) for t in order]
    nodes["node_type"] = _numbers(numbers, sizes, batch.device)
    if first is not None:
        nodes.update({n: batch.nodes[first][n] for n in ("batch_size", "input_id", "y") if n in batch.nodes[first]})
    ends = [_shifted(batch.edges[t]["edge_index"], offsets[t[0]], offsets[t[2]]) for t in batch.edge_types]
    counts = [index.shape[1] for index in ends]
    edges = _joined([batch.edges[t] for t in batch.edge_types], counts)
    edges["edge_index"] = torch.cat(ends, 1)
    edges["edge_type"] = _numbers(range(len(counts)), counts, batch.device)
    return Batch({NODE: nodes}, {EDGE: edges}, is_homogeneous=True, input_type=NODE)


def to_typed(
    batch: Batch, metadata: Metadata, node_type: Tensor | None = None, edge_type: Tensor | None = None
) -> Batch:
    """The batch of several types that a batch of one is made of.

    `metadata` has the names: node types and edge types, in the order in which `node_type` [num_nodes] and `edge_type`
    [num_edges] number them. These are the batch's own by default. Nodes keep their order within a type, and so do
    edges. Where the nodes of a type are together, its rows are a view.
    """
    if not batch.is_homogeneous:
        raise ValueError(f"the batch has types already: {some(batch.node_types)}")
    node_types, edge_types = types_of(metadata)
    nodes, edges = next(iter(batch.nodes.values())), next(iter(batch.edges.values()))
    of_nodes = _given(nodes, "node_type", node_type, len(node_types), nodes["n_id"].numel())
    of_edges = _given(edges, "edge_type", edge_type, len(edge_types), edges["edge_index"].shape[1])
    places = [_places(of_nodes, number) for number in range(len(node_types))]
    local = torch.empty_like(of_nodes)
    for place in places:
        local[place] = torch.arange(local[place].numel(), device=local.device)
    typed_nodes: dict[NodeType, TypeValues] = {}
    for name, place in zip(node_types, places, strict=True):
        typed_nodes[name] = _chosen(nodes, place, of_nodes.numel(), {"node_type", "batch_size", "num_sampled_nodes"})
    seeds = nodes.get("batch_size")
    input_type = None
    if seeds and bool((of_nodes[:seeds] == of_nodes[0]).all()):
        input_type = node_types[int(of_nodes[0])]
        typed_nodes[input_type]["batch_size"] = seeds
    typed_edges: dict[EdgeType, TypeValues] = {}
    for number, each in enumerate(edge_types):
        place = _places(of_edges, number)
        values = _chosen(edges, place, of_edges.numel(), {"edge_type", "edge_index", "num_sampled_edges"})
        index = edges["edge_index"][:, place]
        _check_ends(each, index, of_nodes, node_types)
        values["edge_index"] = local[index]
        typed_edges[each] = values
    return Batch(typed_nodes, typed_edges, is_homogeneous=False, input_type=input_type)


def _joined(stores: Sequence[TypeValues], sizes: Sequence[int]) -> TypeValues:
    """Names that all have, with rows of one shape and dtype."""
    out = TypeValues()
    for name in stores[0]:
        rows = [store.get(name) for store in stores]
        if name == "edge_index" or not all(isinstance(r, Tensor) and r.dim() for r in rows):
            continue
        alike = len({(r.shape[1:], r.dtype) for r in rows}) == 1  # type: ignore[union-attr]
        if alike and all(r.shape[0] == n for r, n in zip(rows, sizes, strict=True)):  # type: ignore[union-attr]
            out[name] = _behind_each_other(rows)  # type: ignore[arg-type]
    return out


def _behind_each_other(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor: a view where they lie so in one storage and have no gradient, else a copy."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        is_next = part.data_ptr() == end or part.numel() == 0
        if not (is_next and part.is_contiguous() and not part.requires_grad and _same_storage(first, part)):
            return torch.cat(list(parts))
        end += part.numel() * part.element_size()
    num_rows = sum(part.shape[0] for part in parts)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _numbers(numbers: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.cat([torch.full((n,), k, device=device) for k, n in zip(numbers, sizes, strict=True)])


def _shifted(edge_index: Tensor, src: int, dst: int) -> Tensor:
    return edge_index + torch.tensor([[src], [dst]], device=edge_index.device)


def _given(values: Mapping[str, object], name: str, given: Tensor | None, num_types: int, size: int) -> Tensor:
    found = values.get(name) if given is None else given
    if not isinstance(found, Tensor):
        raise ValueError(
            f"{name} must be given: the batch has none. It is int64 [{size}], the number of each one's type"
        )
    if found.shape != (size,):
        raise ValueError(f"{name} must have {size} entries, got shape {list(found.shape)}")
    found = found.long()
    if size and not 0 <= int(found.min()) <= int(found.max()) < num_types:
        raise ValueError(f"{name} must be in [0, {num_types}), the number of types in metadata")
    return found


def _places(types: Tensor, number: int) -> slice | Tensor:
    """Where a type is: a slice where it is together."""
    found = (types == number).nonzero().view(-1)
    if not found.numel():
        return slice(0, 0)
    first, last = int(found[0]), int(found[-1])
    return slice(first, last + 1) if last - first + 1 == found.numel() else found


def _chosen(values: TypeValues, place: slice | Tensor, size: int, without: set[str]) -> TypeValues:
    rows = {n: v for n, v in values.items() if n not in without and isinstance(v, Tensor) and v.dim()}
    return TypeValues({n: v[place] for n, v in rows.items() if v.shape[0] == size})


def _check_ends(name: EdgeType, index: Tensor, of_nodes: Tensor, node_types: Sequence[NodeType]) -> None:
    for row, node_type in ((0, name[0]), (1, name[2])):
        if bool((of_nodes[index[row]] != node_types.index(node_type)).any()):
            raise ValueError(f"edges of type {name!r} have ends that are not of type {node_type!r}: check edge_type")
