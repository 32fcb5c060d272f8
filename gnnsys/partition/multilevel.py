"""The partitioner: coarsen natively, let METIS partition the coarsest graph, refine natively on the way back.

Differences to METIS itself, after DistDGLv2 §5.3.1 and what power-law graphs ask for: clusters instead of pairs, only
the heaviest edges kept at each level, any number of constraints, the finest level not copied, coarser ones on disk. A
cycle coarsens once more inside the parts that were found and refines them again at every level.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gnnsys.ops import Level, RefinedCut, cluster_nodes, contract_clusters, refine_cut
from gnnsys.partition.array_pieces import Progress
from gnnsys.partition.levels import LevelStack
from gnnsys.partition.metis import metis

_LEAST_SHRINK = 0.95  # a level that shrinks by less is the coarsest
_CLUSTERS_PER_PART = 30  # no cluster is heavier than this share of a part: the coarsest graph can still be balanced


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard to try. Small graphs get more of everything, since they cost little; large ones are about bandwidth.

    `shrink`: how many nodes of a level make one of the next, at most; `coarsest`: nodes that METIS gets; `tries`: how
    many partitions of these are refined, the best of which goes on; `work`: edges that searches look at, in multiples
    of a level's; `cycles`: how often coarsening and refining is repeated; `is_loose`: coarse levels may exceed a limit
    by a cluster, and what only single nodes can even out is left to the finest.
    """

    coarsest: int
    shrink: int
    tries: int
    work: float
    cycles: int
    rounds: int = 3
    passes: int = 8
    is_loose: bool = False

    @classmethod
    def for_size(cls, num_entries: int, num_parts: int) -> Effort:
        if num_entries < 4_000_000:
            shrink = 3 if num_entries < 1_000_000 else 4
            tries, cycles = (8, 3) if num_parts <= 64 else (2, 1)  # every look at a node costs num_parts
            return cls(
                coarsest=max(1000, 50 * num_parts), shrink=shrink, tries=tries, work=5, cycles=cycles, is_loose=True
            )
        coarsest = max(4000, 50 * num_parts)
        if num_entries < 30_000_000:
            return cls(coarsest=coarsest, shrink=12, tries=2, work=3, cycles=0, rounds=2)
        return cls(coarsest=coarsest, shrink=16, tries=2, work=3, cycles=0, rounds=2)


def multilevel_assignment(
    finest: Level,
    num_parts: int,
    limits: Tensor,
    *,
    effort: Effort | None = None,
    seed: int = 0,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, RefinedCut]:
    """The part of every node, int32, within `limits` int64 [num_constraints] wherever that can be found."""
    effort = effort or Effort.for_size(finest.num_entries, num_parts)
    run = _Run(finest, num_parts, limits, effort, _Steps(progress, finest.num_nodes, 1 + effort.cycles))
    if num_parts == 1 or finest.num_nodes == 0:
        part = torch.zeros(finest.num_nodes, dtype=torch.int32, device="cpu")
        return part, refine_cut(finest, part, num_parts, limits, passes=0)
    with LevelStack(finest, folder) as stack:
        run.coarsen(stack, None, seed)
        part, result = run.uncoarsen(stack, run.initial(stack.coarsest, seed), seed)
    for cycle in range(effort.cycles):
        with LevelStack(finest, folder) as stack:
            coarse = run.coarsen(stack, part, seed + cycle + 1)
            assert coarse is not None
            again, refined = run.uncoarsen(stack, coarse, seed + cycle + 1)
        if (refined.excess, refined.cut) < (result.excess, result.cut):
            part, result = again, refined
    return part, result


class _Steps:
    """Tells how far along the work is, in percent: coarsening and refining are half of a cycle each, by nodes."""

    def __init__(self, progress: Progress | None, num_nodes: int, num_cycles: int) -> None:
        self._progress, self._num_nodes, self._num_cycles = progress, num_nodes, num_cycles
        self._cycle = 0

    def coarsening(self, num_nodes: int) -> None:
        self._tell(0.5 - 0.5 * num_nodes / self._num_nodes, f"coarsening {num_nodes:,} nodes")

    def partitioning(self, num_nodes: int) -> None:
        self._tell(0.5, f"partitioning {num_nodes:,} nodes")

    def refining(self, num_nodes: int) -> None:
        self._tell(0.5, f"refining {num_nodes:,} nodes")

    def end_cycle(self) -> None:
        self._cycle += 1
        self._tell(0, "refined")

    def _tell(self, share: float, what: str) -> None:
        if self._progress is not None:
            self._progress(int(100 * (self._cycle + share) / self._num_cycles), 100, what)


class _Run:
    """One call's settings, and the steps made with them."""

    def __init__(self, finest: Level, num_parts: int, limits: Tensor, effort: Effort, steps: _Steps) -> None:
        self._num_parts, self._limits, self._effort, self._steps = num_parts, limits, effort, steps
        self._finest = finest

    def coarsen(self, stack: LevelStack, part: Tensor | None, seed: int) -> Tensor | None:
        """Adds levels to the stack. Clusters do not cross `part`, where given; returns what it is on the coarsest."""
        while stack.coarsest.num_nodes > self._effort.coarsest:
            level = stack.coarsest
            self._steps.coarsening(level.num_nodes)
            key = 1000 * seed + len(stack)
            clusters, count = cluster_nodes(
                level, self._cluster_limits(level), part=part, rounds=self._effort.rounds, key=key
            )
            if count > _LEAST_SHRINK * level.num_nodes:
                break
            stack.push(contract_clusters(level, clusters, count), clusters)
            if part is not None:
                part = torch.empty(count, dtype=torch.int32, device="cpu").index_copy_(0, clusters.long(), part)
        return part

    def initial(self, level: Level, seed: int) -> Tensor:
        """The best of several partitions that METIS makes of the coarsest level, each refined."""
        best: tuple[float, int, Tensor] | None = None
        for i in range(self._effort.tries):
            self._steps.partitioning(level.num_nodes)
            part = metis(level, self._num_parts, recursive=i % 2 == 1, seed=seed + i + 1)
            refined = self._refine(level, part, seed + i)
            if best is None or (refined.excess, refined.cut) < best[:2]:
                best = (refined.excess, refined.cut, part)
        assert best is not None
        return best[2]

    def uncoarsen(self, stack: LevelStack, part: Tensor, seed: int) -> tuple[Tensor, RefinedCut]:
        """Refines at every level down to the finest."""
        refined = self._refine(stack.coarsest, part, seed)
        while len(stack) > 1:
            part = part[stack.pop().long()].contiguous()
            self._steps.refining(stack.coarsest.num_nodes)
            refined = self._refine(stack.coarsest, part, seed)
        self._steps.end_cycle()
        return part, refined

    def _refine(self, level: Level, part: Tensor, seed: int) -> RefinedCut:
        work = int(self._effort.work * level.num_entries)
        heaviest = level.node_weights.max(0).values
        limits = torch.maximum(self._limits, heaviest)
        if level is not self._finest and self._effort.is_loose:
            limits = self._limits + heaviest
        return refine_cut(level, part, self._num_parts, limits, passes=self._effort.passes, work=work, key=seed)

    def _cluster_limits(self, level: Level) -> Tensor:
        total = level.node_weights.sum(0).double()
        share = torch.minimum(
            total / (_CLUSTERS_PER_PART * self._num_parts), total / level.num_nodes * self._effort.shrink
        )
        return share.long().clamp_(min=1)
