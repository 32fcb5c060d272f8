"""Guided draws (DGS, section 3.2.3): neighbours of the own part first, those of other parts by how much they count.

What counts is said by `NodeScores`, by version. Which version a batch is drawn by depends on its epoch and number
alone, by a list that the sampler keeps and a loader's state carries: so a resumed run draws what an unbroken one would.
Until the first version draws are uniform.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.sampling.dist_graph import DistGraph
from gnnsys.sampling.draw_rule import GuidedRule, check_guided
from gnnsys.sampling.fanouts import Fanouts
from gnnsys.sampling.neighbor import NeighborSampler
from gnnsys.sampling.node_scores import MOST_VERSIONS, NodeScores
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
        self._lock = threading.Lock()
        super().__init__(graph, num_neighbors, disjoint=disjoint, expand=expand, rule=self._rule.text)

    def options(self) -> dict[str, Any]:
        own = {"requester": self.requester, "deviation": self._rule.deviation, "split": self._rule.split}
        return {**super().options(), **own, "unbiased": self._rule.weighs}

    # -- versions ----------------------------------------------------------------------------------------------------

    def use(self, scores: NodeScores, at: Position | None = None) -> Position:
        """Draws by `scores` from (epoch, batch) `at` on, by default the first that nobody has begun; returns it.

        Every owner knows the version when this returns. ValueError where `at` was begun already, or another version was
        to begin later: a batch must come out the same whenever it is sampled.
        """
        if scores.requester != self.requester:
            raise ValueError(f"these scores are of part {scores.requester}, this sampler is for part {self.requester}")
        assert isinstance(self.graph, DistGraph)
        self.graph.add_scores(scores)
        with self._lock:
            last = self._versions[-1][0] if self._versions else _BEFORE_ALL
            soonest = max(self._begun, last)
            position = (soonest[0], soonest[1] + 1) if at is None else (int(at[0]), int(at[1]))
            if position <= soonest:
                raise ValueError(
                    f"epoch {position[0]}, batch {position[1]} was begun already, or has a version: the first that is "
                    f"free is {soonest[1] + 1} of epoch {soonest[0]}"
                )
            self._versions.append((position, scores.version))
            self._scores.pop(scores.version, None)
            self._scores[scores.version] = scores  # the last one is the newest
            for old in list(self._scores)[:-MOST_VERSIONS]:
                del self._scores[old]
            return position

    def version_at(self, position: Position) -> int:
        """The version by which the batch at (epoch, batch) is drawn; 0: uniformly."""
        with self._lock:
            found = bisect_right(self._versions, position, key=lambda entry: entry[0])
            return self._versions[found - 1][1] if found else 0

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
        with self._lock:
            self._begun = max(self._begun, (key.epoch, key.batch))
        return super().sample(seeds, key=key, seed_time=seed_time, tree=tree, exclude=exclude)

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "versions": [[*position, version] for position, version in self._versions],
                "scores": [scores.to_arrays() for scores in self._scores.values()],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"versions", "scores"}:
            raise ValueError(f"this state is of another sampler: expected versions and scores, got {[*state]}")
        versions = [((int(epoch), int(batch)), int(version)) for epoch, batch, version in state["versions"]]
        scores = [NodeScores.from_arrays(arrays) for arrays in state["scores"]]
        assert isinstance(self.graph, DistGraph)
        for known in scores:
            self.graph.add_scores(known)
        with self._lock:
            self._versions, self._begun = versions, _BEFORE_ALL
            self._scores = {known.version: known for known in scores}


def main_part(graph: DistGraph, ids: Tensor) -> int:
    """The part that owns most of `ids` (global ids of nodes): whom a trainer with this share samples for."""
    (node_type,) = graph.node_types
    counts = torch.stack([(ids >= r.start) & (ids < r.stop) for r in _ranges(graph, node_type)]).sum(1)
    return int(counts.argmax())


def _ranges(graph: DistGraph, node_type: NodeType) -> list[range]:
    return [graph.book.part_range(part, node_type) for part in range(graph.parts.num_parts)]
