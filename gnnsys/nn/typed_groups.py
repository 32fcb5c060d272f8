"""The edges of a typed block as `relation_conv` takes them: rows in slots by node type, one relation per edge type."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType, some
from gnnsys.nn.typed_inputs import TypedInputs
from gnnsys.ops import CSC, STRUCTURES, Relation, RelationGroups, group_structures, spmm

Widths: TypeAlias = int | Mapping[NodeType, int]


@dataclass(frozen=True, eq=False)
class TypedRelations:
    """Node types are slots of x and of outputs, in one order each."""

    groups: RelationGroups | None  # None: no edge type was given
    relations: list[Relation]  # of the edge types that were given
    x: list[Tensor]
    node_types: list[NodeType]  # of x
    out_types: list[NodeType]
    num_dst: list[int]
    cscs: list[CSC]  # of the relations

    def relations_of(self, slot: int) -> tuple[int, int]:
        """The relations that read a slot of x, one behind the other: the first of them, and the one after the last."""
        number = [relation.x for relation in self.relations]
        return bisect_left(number, slot), bisect_right(number, slot)

    @property
    def own(self) -> list[int]:
        """The slot of x that has the rows of each output's destinations, as its first."""
        return [self.node_types.index(t) for t in self.out_types]


def typed_relations(
    given: TypedInputs,
    edge_types: Sequence[EdgeType],
    weight_of: Mapping[EdgeType, tuple[int, int]],
    makes: Sequence[NodeType],
    reduce: str,
) -> TypedRelations:
    """`edge_types` in the layer's order; `weight_of` has the slot and row of each one's weight."""
    node_types = list(given.src)
    out_types = [t for t in makes if t in given.block.num_dst]
    # By source type: relations that read the same rows are summed together.
    there = [t for t in edge_types if t in given.block.csc and t[2] in out_types]
    there.sort(key=lambda t: node_types.index(t[0]))
    relations = [Relation(node_types.index(t[0]), out_types.index(t[2]), *weight_of[t]) for t in there]
    cscs = [given.block.csc[t] for t in there]
    groups = STRUCTURES.get(lambda: group_structures(cscs, reduce), *cscs, key=("relations", reduce)) if cscs else None
    num_dst = [given.block.num_dst[t] for t in out_types]
    return TypedRelations(groups, relations, [given.src[t] for t in node_types], node_types, out_types, num_dst, cscs)


def sum_wide_rows(typed: TypedRelations, out_channels: int) -> TypedRelations:
    """Rows that need no gradient and are wider than the results, summed up here: a row per (relation, destination).

    The op's gradient of weights is a product over all (relation, source), of which a sampled batch has several times as
    many. Sums are kept for the backward pass instead of being made again.
    """
    groups = typed.groups
    if groups is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return typed
    wide = []
    for slot, rows in enumerate(typed.x):
        first, last = typed.relations_of(slot)
        is_fewer = 0 < groups.ends[last] - groups.ends[first] < rows.shape[0]
        if is_fewer and not rows.requires_grad and rows.shape[1] > out_channels:
            wide.append(slot)
    if not wide:
        return typed
    slots = tuple(r.x for r in typed.relations)  # the next call on these structures may number node types otherwise
    key = ("summed", groups.is_mean, slots, *wide)
    cscs, summed = STRUCTURES.get(partial(_summed_groups, typed, wide), *typed.cscs, key=key)
    reduce = "mean" if groups.is_mean else "sum"
    made = [spmm(csc, typed.x[slot], reduce=reduce) for csc, slot in zip(cscs, wide, strict=True)]
    slot_of = {slot: len(typed.x) + number for number, slot in enumerate(wide)}  # destinations' own rows stay
    relations = [r._replace(x=slot_of.get(r.x, r.x)) for r in typed.relations]
    return replace(typed, groups=summed, relations=relations, x=[*typed.x, *made])


def _summed_groups(typed: TypedRelations, wide: Sequence[int]) -> tuple[list[CSC], RelationGroups]:
    """A structure for every slot that sums its groups up, and groups that have these sums as their only members.

    Sizes are known on the host: nobody waits for a device.
    """
    groups = typed.groups
    assert groups is not None and groups.indptr is not None
    edge_ends = list(accumulate((csc.indices.numel() for csc in typed.cscs), initial=0))
    cscs, indptr, indices, num_src, num_members = [], [], [], list(groups.num_src), 0
    for slot in range(len(typed.x)):
        first, last = typed.relations_of(slot)
        begin, end, at = groups.ends[first], groups.ends[last], edge_ends[first]
        members, starts = groups.indices[at : edge_ends[last]], groups.indptr[begin : end + 1] - at
        if slot in wide:
            cscs.append(CSC(starts, members, typed.x[slot].shape[0]))
            members = torch.arange(end - begin, dtype=members.dtype, device=members.device)
            starts = torch.arange(end - begin + 1, dtype=starts.dtype, device=starts.device)
            num_src[first:last] = [end - begin] * (last - first)
        indptr.append(starts[:-1] + num_members)
        indices.append(members)
        num_members += members.numel()
    indptr.append(indptr[0].new_full((1,), num_members))
    return cscs, RelationGroups(groups.ends, groups.dst, torch.cat(indptr), torch.cat(indices), num_src, groups.is_mean)


def check_widths(given: TypedInputs, widths: Mapping[NodeType, int], layer: str) -> None:
    """That rows are as wide as the layer was made for."""
    for node_type, rows in given.src.items():
        if node_type in widths and (rows.dim() != 2 or rows.shape[1] != widths[node_type]):
            raise ValueError(
                f"{layer} was made for {widths[node_type]} channels of node type {node_type!r}, and its rows have "
                f"shape {list(rows.shape)}: give in_channels by node type, or rows of one width to all types"
            )


def check_in_channels(in_channels: Any) -> None:
    """None says that there are no features."""
    if in_channels is not None and not isinstance(in_channels, (int, Mapping)):
        raise ValueError(f"in_channels must be a whole number of features, or one per node type, got {in_channels!r}")


def widths_by_type(
    in_channels: Widths | None, node_types: Collection[NodeType], instead: str = "which only RGCN takes: give"
) -> dict[NodeType, int]:
    """The width of each type; ValueError for one without, and `instead` is what to do besides giving it rows."""
    check_in_channels(in_channels)
    if isinstance(in_channels, int):
        return dict.fromkeys(node_types, in_channels)
    bare = [t for t in node_types if in_channels is None or in_channels.get(t, 0) is None]
    if bare:
        raise ValueError(
            f"in_channels is None for node types {some(bare)}, {instead} them rows by gnnsys.nn.InputEncoder(graph, "
            "width), and that width as in_channels"
        )
    given = in_channels or {}
    missing = [t for t in node_types if t not in given]
    if missing:
        raise ValueError(f"in_channels has no width for node types {some(missing)}: give all types one")
    return {t: given[t] for t in node_types}


def one_width(in_channels: Widths, layer: str) -> int:
    """Of layers whose weights meet rows of both ends of an edge."""
    if in_channels is None:
        raise ValueError(f"in_channels must be a number of features, {layer} does not look nodes up by id: got None")
    check_in_channels(in_channels)
    widths = {in_channels} if isinstance(in_channels, int) else set(widths_by_type(in_channels, in_channels).values())
    if min(widths, default=1) < 1:
        raise ValueError(f"in_channels must be positive, {layer} is not lazily sized: got {in_channels}")
    if len(widths) != 1:
        raise ValueError(
            f"{layer} needs rows of one width of all node types, got in_channels={some(sorted(widths))}: make them so "
            "with a linear layer per type"
        )
    return widths.pop()
