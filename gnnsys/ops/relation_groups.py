"""Edges of many relations, grouped by (relation, destination) and by (relation, source): what relation_conv reads.

Groups are made once for a structure and kept. What else layers need of them (edges by destination, the scales of means)
is made when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops.csc import CSC, refuse_to_capture


@dataclass(frozen=True, eq=False)
class SourceGroups:
    """Edges by (relation, source), relation by relation; what the gradient reads."""

    ends: list[int]  # [relations + 1], groups of each relation
    src: Tensor  # [groups]
    indptr: Tensor | None  # [groups + 1]; None: one edge each
    indices: Tensor | None  # [edges], destinations; None: those are the groups
    group: Tensor | None  # [edges], int32, the group by (relation, destination) that an edge is in


@dataclass(frozen=True, eq=False)
class JointEdges:
    """Edges of all relations by destination, the destinations of all outputs one behind the other."""

    csc: CSC  # sources are pairs (relation, source), as `pairs_of` numbers them
    group: Tensor  # [edges], int32, the group by (relation, destination) of each position


@dataclass(eq=False)
class RelationGroups:
    """Edges by (relation, destination), relation by relation.

    `dst` None: every group has a row of its own in the result. `scale` divides by the number of edges in the group.
    """

    ends: list[int]  # [relations + 1], groups of each relation
    dst: Tensor | None  # [groups], local ids
    indptr: Tensor | None  # [groups + 1]; None: one edge each
    indices: Tensor  # [edges], sources
    num_src: list[int]  # per relation
    is_mean: bool
    _by_source: SourceGroups | None = field(default=None, repr=False)
    _joint: dict[tuple[int, ...], JointEdges] = field(default_factory=dict, repr=False)
    _scales: dict[torch.dtype, tuple[Tensor, Tensor | None]] = field(default_factory=dict, repr=False)

    @property
    def num_groups(self) -> int:
        return self.ends[-1]

    def by_source(self) -> SourceGroups:
        """Made once, then kept."""
        if self._by_source is None:
            refuse_to_capture("edges by relation and source", self.indices)
            assert self.indptr is not None and self.dst is not None
            if _by_kernels(self.indices):
                ends, src, indptr, indices, group = native.group_by_source.default(
                    self.indptr, self.indices, self.dst, self.ends, self.num_src
                )
                told = ends.tolist()
                num_groups = told[-1]
                self._by_source = SourceGroups(told, src[:num_groups], indptr[: num_groups + 1], indices, group)
                return self._by_source
            group = torch.empty(self.indices.numel(), dtype=torch.int64, device=self.indices.device)
            native.expand_indptr(self.indptr, 0, group)
            first = list(accumulate(self.num_src, initial=0))
            edge_ends = self.indptr[torch.tensor(self.ends, device=self.indices.device)]
            shift = _by_segment(edge_ends, first[:-1], self.indices.numel())
            ids, indptr, groups = _grouped(group, self.indices + shift, self.num_groups, first[-1])
            ends, src = _split(ids, first)
            narrow = groups.to(torch.int32)
            self._by_source = SourceGroups(ends, src, indptr, self.dst.index_select(0, narrow), narrow)
        return self._by_source

    def by_destination(self, first: Sequence[int], num_dst: int) -> JointEdges:
        """`first[r]` is where the destinations of relation r begin among all `num_dst`. Made once, then kept."""
        key = (*first, num_dst)
        found = self._joint.get(key)
        if found is None:
            by = self.by_source()
            assert by.indptr is not None and by.indices is not None and by.group is not None
            num_edges, num_pairs = self.indices.numel(), by.ends[-1]
            pair = torch.empty(num_edges, dtype=torch.int64, device=self.indices.device)
            native.expand_indptr(by.indptr, 0, pair)
            ends = by.indptr[torch.tensor(by.ends, device=pair.device)]
            dst = by.indices + _by_segment(ends, first, num_edges)
            csc = CSC.from_edge_index(torch.stack([pair, dst]), num_pairs, num_dst, narrow=True)
            group = by.group if csc.edge_ids is None else by.group.index_select(0, csc.edge_ids)
            found = self._joint[key] = JointEdges(CSC(csc.indptr, csc.indices, num_pairs), group)
        return found

    def scales(self, dtype: torch.dtype, by_source: bool) -> tuple[Tensor | None, Tensor | None]:
        """1 / size of each group, and the same for each edge by source; None where sums are asked for."""
        if not self.is_mean:
            return None, None
        scale, weight = self._scales.get(dtype, (None, None))
        if scale is None:
            assert self.indptr is not None
            scale = native.inverse_degrees(self.indptr, dtype)
        if by_source and weight is None:
            group = self.by_source().group
            assert group is not None
            weight = scale.index_select(0, group)
        self._scales[dtype] = scale, weight
        return scale, weight


def _by_kernels(tensor: Tensor) -> bool:
    """Whether kernels make groups, in one call: on a device every op of torch's costs the host more than the device."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


def _by_segment(ends: Tensor, values: Sequence[int], size: int) -> Tensor:
    """values[r] at the places [ends[r], ends[r + 1])."""
    out = torch.empty(size, dtype=torch.int64, device=ends.device)
    native.expand_indptr(ends, 0, out)
    return torch.tensor(values, dtype=torch.int64, device=ends.device).index_select(0, out) if size else out


def _split(ids: Tensor, first: Sequence[int]) -> tuple[list[int], Tensor]:
    """Ascending ids in ranges that begin at `first`: how many are in each, and their places there, int32."""
    starts = torch.tensor(first, dtype=torch.int64, device=ids.device)
    ends = torch.searchsorted(ids, starts)
    local = ids - _by_segment(ends, list(first[:-1]), ids.numel())
    return ends.tolist(), local.to(torch.int32)


def _grouped(values: Tensor, key: Tensor, num_values: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values by key, in their order: the keys that there are, ascending, where the values of each begin, the values."""
    if num_keys > 4 * key.numel() + 1024:  # counting would take longer than sorting, and more memory
        ids, place = key.unique(return_inverse=True)
        csc = CSC.from_edge_index(torch.stack([values, place]), num_values, ids.numel(), narrow=True)
        return ids, csc.indptr, csc.indices
    csc = CSC.from_edge_index(torch.stack([values.long(), key]), num_values, num_keys, narrow=True)
    ids, indptr = _without_empty(csc.indptr)
    return ids, indptr, csc.indices


def _without_empty(indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have entries, and where these begin."""
    ids = indptr.diff().nonzero().view(-1)
    return ids, torch.cat([indptr.index_select(0, ids), indptr[-1:]])


def group_by_type(csc: CSC, edge_type: Tensor, num_relations: int, reduce: str) -> RelationGroups:
    """Of one structure whose edges have types, int64 by position."""
    key = edge_type * csc.num_dst + csc.dst()
    ids, indptr, indices = _grouped(csc.indices, key, csc.num_src, num_relations * csc.num_dst)
    ends, dst = _split(ids, [r * csc.num_dst for r in range(num_relations + 1)])
    return RelationGroups(ends, dst, indptr, indices, [csc.num_src] * num_relations, reduce == "mean")


def group_structures(cscs: Sequence[CSC], reduce: str) -> RelationGroups:
    """Of a structure per relation. On a device one wait, and another for the edges by source."""
    narrow = all(csc.indices.dtype == torch.int32 for csc in cscs)
    indices = [csc.indices if narrow else csc.indices.long() for csc in cscs]
    num_src = [csc.num_src for csc in cscs]
    if _by_kernels(indices[0]):
        made = native.group_structures.default([csc.indptr for csc in cscs], [t.numel() for t in indices])
        told = made[0].tolist()
        dst, indptr = made[1][: told[-1]], made[2][: told[-1] + 1]
        return RelationGroups(told, dst, indptr, torch.cat(indices), num_src, reduce == "mean")
    degrees = torch.cat([csc.in_degrees() for csc in cscs])
    ids = degrees.nonzero().view(-1)
    indptr = torch.cat([degrees.new_zeros(1), degrees.index_select(0, ids).cumsum(0)])
    ends, dst = _split(ids, list(accumulate([csc.num_dst for csc in cscs], initial=0)))
    return RelationGroups(ends, dst, indptr, torch.cat(indices), num_src, reduce == "mean")


def pairs_of(groups: RelationGroups) -> RelationGroups:
    """A row for every (relation, source) that has an edge: relation_conv makes of it x[source] @ W_relation."""
    by = groups.by_source()
    made = RelationGroups(by.ends, None, None, by.src, groups.num_src, False)
    made._by_source = SourceGroups(by.ends, by.src, None, None, None)
    return made


def owners_of(groups: RelationGroups, num_src: Sequence[int]) -> RelationGroups:
    """A row for every (relation, destination) that has an edge: relation_conv makes of it x[destination] @ W."""
    assert groups.dst is not None
    made = RelationGroups(groups.ends, None, None, groups.dst, list(num_src), False)
    made._by_source = SourceGroups(groups.ends, groups.dst, None, None, None)
    return made
