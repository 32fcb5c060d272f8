"""Which subparts share a machine: groups of trainers_per_part of them, the most connected together.

The graph is partitioned once, into a subpart per trainer (DistDGLv2 §5.3: two levels in one run); here subparts are
grouped so that as little as possible crosses machines, and no machine is heavier than it may be.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType
from gnnsys.partition.array_pieces import column_pieces

_SWEEPS = 10


def coalesce(ties: Tensor, group_size: int) -> Tensor:
    """From `ties` (symmetric [k, k], edges between subparts) the new number of every subpart, int32 [k].

    Subparts p * group_size ... of the new numbering form part p. Greedy: a group starts with the heaviest free pair
    and takes the subpart most tied to it; then exchanges of two subparts between groups as long as one helps.
    """
    size = ties.shape[0]
    if size % group_size:
        raise ValueError(f"{size} subparts cannot be grouped by {group_size}")
    if group_size == 1:
        return torch.arange(size, dtype=torch.int32, device="cpu")
    ties = ties.double().clone().fill_diagonal_(0)
    group = _grown(ties, group_size)
    _exchange(ties, group)
    order = torch.argsort(group, stable=True)
    number = torch.empty(size, dtype=torch.int32, device="cpu")
    number[order] = torch.arange(size, dtype=torch.int32, device="cpu")
    return number


def _grown(ties: Tensor, group_size: int) -> Tensor:
    size = ties.shape[0]
    group = torch.full((size,), -1, dtype=torch.int64, device="cpu")
    for number in range(size // group_size):
        free = (group < 0).nonzero().view(-1)
        inside = ties[free][:, free]
        members = [int(free[int(inside.sum(1).argmax())])]
        while len(members) < group_size:
            pull = ties[members].sum(0)
            pull[group >= 0] = -1
            pull[members] = -1
            members.append(int(pull.argmax()))
        group[members] = number
    return group


def _exchange(ties: Tensor, group: Tensor) -> None:
    """Each subpart in turn changes places with the one that keeps most edges inside groups, until none does."""
    size, num_groups = len(group), int(group.max()) + 1
    pull = ties @ torch.nn.functional.one_hot(group, num_groups).double()  # [subpart, group]
    for _ in range(_SWEEPS):
        changed = False
        for a in range(size):
            own = pull.gather(1, group[:, None]).squeeze(1)
            gain = pull[a, group] + pull[:, group[a]] - own[a] - own - 2 * ties[a]
            gain[group == group[a]] = 0
            b = int(gain.argmax())
            if gain[b] > 1e-9:
                here, there = int(group[a]), int(group[b])
                pull[:, here] += ties[:, b] - ties[:, a]
                pull[:, there] += ties[:, a] - ties[:, b]
                group[a], group[b] = there, here
                changed = True
        if not changed:
            return


def edges_between(graph: Graph, part: Mapping[NodeType, Tensor], num_parts: int) -> Tensor:
    """How many edges lead from part p to part q, int64 [num_parts, num_parts]; read in pieces."""
    counts = torch.zeros(num_parts * num_parts, dtype=torch.int64, device="cpu")
    for edge_type in graph.edge_types:
        csc, of_src, of_dst = graph.csc(edge_type), part[edge_type[0]], part[edge_type[2]]
        for first, end in column_pieces(csc.indptr):
            starts = csc.indptr[first : end + 1]
            src = of_src[csc.indices[int(starts[0]) : int(starts[-1])].long()].long()
            dst = torch.repeat_interleave(of_dst[first:end].long(), starts.diff(), output_size=src.numel())
            counts += torch.bincount(src * num_parts + dst, minlength=num_parts * num_parts)
    return counts.view(num_parts, num_parts)
