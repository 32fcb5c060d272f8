"""Guided draws (DGS, section 3.2.3): neighbours of the own part first, those of other parts by how much they count.

What counts is said by `NodeScores`, by version. Which version a batch is drawn by depends on its epoch and number
alone, by a list that the sampler keeps and a loader's state carries: so a resumed run draws what an unbroken one would.
Until the first version draws are uniform.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gnnsys.comm import RemoteValueError
from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.sampling.dist_graph import DistGraph
from gnnsys.sampling.fanouts import Fanouts
from gnnsys.sampling.guided_rule import GuidedRule, check_guided
from gnnsys.sampling.neighbor import NeighborSampler
from gnnsys.sampling.node_scores import NodeScores, ScoresNotHere
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey

Position = tuple[int, int]  # epoch, and batch within it
_BEFORE_ALL: Position = (-(1 << 62), 0)


class GuidedSampler(NeighborSampler):
    """Neighbour sampling on parts that prefers the own part, and elsewhere what counts most.

    `requester` is the part that samples are for (`main_part`; by default the first part of this machine). Of `fanout`
    draws at a node, as many as possible go to neighbours of that part, wherever the node is; `deviation` of them are
    moved to others (epsilon of the thesis), so that no node sees its own part alone. `split="proportional"` keeps the
    uniform split and shifts it by `deviation` towards the own part. `unbiased` takes edges by known probabilities, and
    batches have an `edge_weight`: a weighted sum over sampled edges then has the mean over all neighbours as its
    expectation.

    `use(scores)` has the batches that nobody has begun yet drawn by new scores. Ids are global ids.
    """

    unbiased_for: ClassVar[str] = "with unbiased=True, in each layer the mean over in-neighbours, weighted as given"

    def __init__(
        self,
        graph: DistGraph,
        num_neighbors: Fanouts,
        *,
        requester: int | None = None,
        deviation: float = 0.1,
        split: Literal["local", "proportional"] = "local",
        unbiased: bool = False,
        disjoint: bool = False,
        expand: Literal["new", "frontier"] = "new",
    ) -> None:
        if isinstance(graph, Graph):
            raise ValueError("guided draws tell parts apart: open parts with gnnsys.open, a graph in memory has none")
        if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
            raise ValueError("guided draws are for graphs with one node and one edge type: use a NeighborSampler")
        check_guided(deviation, split, unbiased)
        first = graph.parts_here[0] if graph.parts_here else 0
        self.requester = first if requester is None else requester
        if not 0 <= self.requester < graph.parts.num_parts:
            raise ValueError(f"requester must be a part in [0, {graph.parts.num_parts}), got {requester}")
        self._rule = GuidedRule(deviation, split, unbiased)
        self.gives = ("edge_weight",) if unbiased else ()
        self._versions: list[tuple[Position, int]] = []  # from which position on, ascending
        self._scores: dict[int, NodeScores] = {}
        self._begun = _BEFORE_ALL
        self._is_pruned = False  # whether versions were forgotten
        self._parts = graph
        self._lock = threading.Lock()
        super().__init__(graph, num_neighbors, disjoint=disjoint, expand=expand, rule=self._rule.text)

    def options(self) -> dict[str, Any]:
        """What all ranks share; the requester is each one's own, and in the state."""
        own = {"deviation": self._rule.deviation, "split": self._rule.split, "unbiased": self._rule.weighs}
        return {**super().options(), **own}

    # -- versions ----------------------------------------------------------------------------------------------------

    def use(self, scores: NodeScores, at: Position | None = None) -> Position:
        """Draws by `scores` from (epoch, batch) `at` on, by default the first that nobody has begun; returns it.

        Every owner knows the version when this returns. ValueError where `at` was begun already, or another version was
        to begin later: a batch must come out the same whenever it is sampled.
        """
        if scores.requester != self.requester:
            raise ValueError(f"these scores are of part {scores.requester}, this sampler is for part {self.requester}")
        self._parts.add_scores(scores)
        with self._lock:
            last = self._versions[-1][0] if self._versions else _BEFORE_ALL
            soonest = max(self._begun, last)
            free = max((soonest[0], soonest[1] + 1), (0, 0))
            position = free if at is None else (int(at[0]), int(at[1]))
            if position < free:
                raise ValueError(
                    f"epoch {position[0]}, batch {position[1]} was begun already, or has a version: the first that is "
                    f"free is batch {free[1]} of epoch {free[0]}"
                )
            self._versions.append((position, scores.version))
            self._scores[scores.version] = scores
            return position

    def version_at(self, position: Position) -> int:
        """The version by which the batch at (epoch, batch) is drawn; 0: uniformly."""
        with self._lock:
            return self._version_of(position)

    def _version_of(self, position: Position) -> int:
        found = bisect_right(self._versions, position, key=lambda entry: entry[0])
        if not found and self._is_pruned and position >= (0, 0):
            raise ValueError(
                f"epoch {position[0]}, batch {position[1]} was consumed, and its scores are forgotten: load a state of "
                "that time to draw it again"
            )
        return self._versions[found - 1][1] if found else 0

    def consumed(self, position: Position) -> None:
        """Forgets versions that ended before (epoch, batch); batches up to it count as begun."""
        with self._lock:
            self._begun = max(self._begun, position)
            in_force = bisect_right(self._versions, position, key=lambda entry: entry[0]) - 1
            if in_force > 0:
                del self._versions[:in_force]
                used = {version for _, version in self._versions}
                self._scores = {version: scores for version, scores in self._scores.items() if version in used}
                self._is_pruned = True

    def steering(self, key: SampleKey) -> tuple[int | None, int]:
        return self.requester, self.version_at((key.epoch, key.batch))

    def sample(
        self,
        seeds: Mapping[NodeType, Tensor],
        *,
        key: SampleKey,
        seed_time: Mapping[NodeType, Tensor] | None = None,
        tree: Mapping[NodeType, Tensor] | None = None,
        exclude: Mapping[EdgeType, Tensor] | None = None,
    ) -> Sample:
        self.refuse(seed_time=seed_time)
        position = (key.epoch, key.batch)
        with self._lock:
            self._begun = max(self._begun, position)
        try:
            return super().sample(seeds, key=key, tree=tree, exclude=exclude)
        except (ScoresNotHere, RemoteValueError) as error:  # displaced by scores of other samplers of this part
            if getattr(error, "remote_type", ScoresNotHere.__name__) != ScoresNotHere.__name__:
                raise
            with self._lock:
                scores = self._scores.get(self._version_of(position))
            if scores is None:
                raise
            self._parts.add_scores(scores)
            return super().sample(seeds, key=key, tree=tree, exclude=exclude)

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "requester": self.requester,
                "is_pruned": self._is_pruned,
                "versions": [[*position, version] for position, version in self._versions],
                "scores": [scores.to_arrays() for scores in self._scores.values()],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"requester", "is_pruned", "versions", "scores"}:
            raise ValueError(f"this state is of another sampler: expected versions and scores, got {[*state]}")
        versions = [((int(epoch), int(batch)), int(version)) for epoch, batch, version in state["versions"]]
        scores = {known.version: known for known in map(NodeScores.from_arrays, state["scores"])}
        requesters = {int(state["requester"]), *(known.requester for known in scores.values())}
        if requesters != {self.requester}:
            raise ValueError(f"this state is of part {sorted(requesters)}, this sampler is for part {self.requester}")
        positions = [position for position, _ in versions]
        if positions != sorted(set(positions)) or any(version not in scores for _, version in versions):
            raise ValueError("this state has versions without scores, or out of order: it was altered")
        for known in scores.values():
            self._parts.add_scores(known)
        with self._lock:
            self._versions, self._scores, self._begun = versions, scores, _BEFORE_ALL
            self._is_pruned = bool(state["is_pruned"])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes up the state of a rank that sampled for the same part; without one draws begin uniformly again."""
        own = [state for state in states if state and state.get("requester") == self.requester]
        if own or len(states) == 1:
            return self.load_state_dict((own or states)[0])
        with self._lock:
            self._versions, self._scores, self._begun, self._is_pruned = [], {}, _BEFORE_ALL, False


def main_part(graph: DistGraph, ids: Tensor) -> int:
    """The part that owns most of `ids` (global ids of nodes): whom a trainer with this share samples for."""
    (node_type,) = graph.node_types
    counts = torch.stack([(ids >= r.start) & (ids < r.stop) for r in _ranges(graph, node_type)]).sum(1)
    return int(counts.argmax())


def _ranges(graph: DistGraph, node_type: NodeType) -> list[range]:
    return [graph.book.part_range(part, node_type) for part in range(graph.parts.num_parts)]
