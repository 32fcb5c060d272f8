"""The explanation graph of a part (thesis §3.2.2): its core pooled into a few nodes, remote nodes around them.

Nodes are the pools, then the remote nodes: those of the halo that have edges into the core. An edge leads from a remote
node to every pool that it has edges into, and each pool has a self loop. A pool's row and prediction are the means over
its core nodes. One pool is the thesis; the mean over a balanced part is nearly the label prior and says little, so that
`num_pools` clusters of the part may be pooled instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnsys.graph import Graph
from gnnsys.partition import Part, PartitionOptions, assign_parts

_LEAST_POOL = 8  # core nodes per pool: the partitioner leaves some of more clusters empty


@dataclass(frozen=True)
class PooledPart:
    """The structure of a part's explanation graph, and of the part as its predictions are inferred. Made once.

    In `edge_index` pools are 0 to num_pools - 1, remote node i is num_pools + i, and the self loops come last.
    """

    requester: int  # the part
    pool_of: Tensor  # int64 [num_core]
    num_pools: int
    ids: Tensor  # int64 [num_remote], global ids of the remote nodes, ascending
    degree: Tensor  # int64 [num_remote], edges of each into the core
    edge_index: Tensor  # int64 [2, num_edges] of the explanation graph
    core_edges: Tensor  # int64 [2, num_core_edges], in-edges of the core; remote node i is num_core + i

    @property
    def num_core(self) -> int:
        return self.pool_of.numel()

    @property
    def num_remote(self) -> int:
        return self.ids.numel()


@dataclass(frozen=True)
class ExplanationGraph:
    """What is explained in one round: `model(x, edge_index)[:num_pools]` against `target`, by the rows after it.

    `mean_row` stands for what a mask takes away. Where no target was asked for it has no classes.
    """

    requester: int
    x: Tensor  # float32 [num_pools + num_remote, num_features]
    edge_index: Tensor  # int64 [2, num_edges]
    target: Tensor  # float32 [num_pools, num_classes], mean probabilities of the core's predictions
    ids: Tensor  # int64 [num_remote], global ids
    degree: Tensor  # int64 [num_remote], edges of each into the core
    mean_row: Tensor  # float32 [num_features], over core and remote rows

    @property
    def num_pools(self) -> int:
        return self.target.shape[0]

    @property
    def num_remote(self) -> int:
        return self.ids.numel()

    @property
    def num_features(self) -> int:
        return self.x.shape[1]


def pool_part(part: Part, num_pools: int = 1, *, seed: int = 0) -> PooledPart:
    """Pools the core of a part of a graph with one node type and one edge type."""
    num_core = part.num_core()
    csc = part.csc()
    bounds = csc.indptr[: num_core + 1]
    src = csc.indices[: int(bounds[-1])].long()
    dst = torch.repeat_interleave(torch.arange(num_core, device="cpu"), bounds.diff())
    is_remote = src >= num_core
    num_pools = max(1, min(num_pools, num_core // _LEAST_POOL))
    pool_of = _clusters(src[~is_remote], dst[~is_remote], num_core, num_pools, seed)
    local, place, degree = torch.unique(src[is_remote], return_inverse=True, return_counts=True)
    ids = part.global_ids(local)
    order = torch.argsort(ids)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device="cpu")
    place = rank[place]
    pairs = torch.unique(torch.stack([num_pools + place, pool_of[dst[is_remote]]]), dim=1)
    loops = torch.arange(num_pools, device="cpu").expand(2, -1)
    src[is_remote] = num_core + place
    return PooledPart(
        part.index, pool_of, num_pools, ids[order], degree[order], torch.cat([pairs, loops], dim=1),
        torch.stack([src, dst]),
    )  # fmt: skip


def _clusters(src: Tensor, dst: Tensor, num_core: int, num_pools: int, seed: int) -> Tensor:
    """The pool of every core node: clusters with few edges between them."""
    if num_pools == 1 or num_core == 0:
        return torch.zeros(num_core, dtype=torch.int64, device="cpu")
    core = Graph.from_edge_index(torch.stack([src, dst]), num_core)
    assigned = assign_parts(core, num_pools, options=PartitionOptions(seed=seed))
    return next(iter(assigned.assignment.subpart.values())).long()


@torch.no_grad()
def explain_part(
    pooled: PooledPart,
    model: nn.Module,
    core_rows: Tensor,
    remote_rows: Tensor,
    present: Tensor | None = None,
    *,
    turn: slice | None = None,
    with_target: bool = True,
) -> ExplanationGraph:
    """One round's explanation graph, with the predictions of the core, inferred and pooled, where they are asked for.

    `present` lists the remote nodes, by their place in `pooled.ids`, whose rows `remote_rows` has: all of them by
    default. Those of them that have their `turn` are explained. The others are left out of the explanation graph; nodes
    without rows have the mean row where predictions are inferred.
    """
    core_rows, num_pools = core_rows.float(), pooled.num_pools
    explained = present
    if turn is not None:
        explained = (torch.arange(pooled.num_remote, device="cpu") if present is None else present)[turn]
    rows = remote_rows if turn is None else remote_rows[turn]
    x = torch.empty(num_pools + rows.shape[0], core_rows.shape[1], device="cpu")
    x[:num_pools] = _pool_means(core_rows, pooled)
    x[num_pools:] = rows  # which may be of a smaller type: the one copy that is made of them
    mean_row = (core_rows.sum(0) + x[num_pools:].sum(0)) / max(1, pooled.num_core + rows.shape[0])
    target = torch.empty(num_pools, 0, device="cpu")
    if with_target:
        target = _pool_means(_infer_core(pooled, model, core_rows, remote_rows, present, mean_row), pooled)
    edge_index, ids, degree = pooled.edge_index, pooled.ids, pooled.degree
    if explained is not None:
        number = torch.full((num_pools + pooled.num_remote,), -1, dtype=torch.int64, device="cpu")
        number[:num_pools] = torch.arange(num_pools, device="cpu")
        number[num_pools + explained] = num_pools + torch.arange(explained.numel(), device="cpu")
        edge_index = number[edge_index]
        edge_index = edge_index[:, edge_index[0] >= 0]
        ids, degree = ids[explained], degree[explained]
    return ExplanationGraph(pooled.requester, x, edge_index, target, ids, degree, mean_row)


def _infer_core(
    pooled: PooledPart, model: nn.Module, core_rows: Tensor, remote_rows: Tensor, present: Tensor | None, mean: Tensor
) -> Tensor:
    """Class probabilities of the core nodes."""
    x = torch.empty(pooled.num_core + pooled.num_remote, core_rows.shape[1], device="cpu")
    x[: pooled.num_core] = core_rows
    halo_rows = x[pooled.num_core :]
    if present is None:
        halo_rows[:] = remote_rows
    else:
        halo_rows[:] = mean
        halo_rows[present] = remote_rows.float()
    return probabilities(model(x, pooled.core_edges)[: pooled.num_core])


def probabilities(scores: Tensor) -> Tensor:
    """Class probabilities of a model's scores; one column is the score of the second of two classes."""
    return log_probabilities(scores).exp()


def log_probabilities(scores: Tensor) -> Tensor:
    if scores.shape[1] == 1:
        scores = torch.cat([torch.zeros_like(scores), scores], dim=1)
    return scores.log_softmax(1)


def _pool_means(values: Tensor, pooled: PooledPart) -> Tensor:
    sums = torch.zeros(pooled.num_pools, values.shape[1], device="cpu").index_add_(0, pooled.pool_of, values)
    counts = torch.bincount(pooled.pool_of, minlength=pooled.num_pools).clamp_(min=1)
    return sums / counts[:, None]
