"""Guided draws (DGS, section 3.2.3): neighbours of the own part first, those of other parts by how much they count.

What counts is said by `NodeScores`, by version, and with it the columns that rows of other parts are read by. Which
version a batch is drawn and read by depends on its epoch and number alone, by a list that the sampler keeps and a
loader's state carries: so a resumed run has the batches that an unbroken one would. Until the first version draws are
uniform and rows whole.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gnnsys.comm import RemoteValueError
from gnnsys.graph import EdgeType, Graph, NodeType, some
from gnnsys.sampling.dist_graph import DistGraph
from gnnsys.sampling.fanouts import Fanouts
from gnnsys.sampling.guided_rule import GuidedRule, check_guided
from gnnsys.sampling.neighbor import NeighborSampler
from gnnsys.sampling.node_scores import MOST_VERSIONS, NodeScores, ScoresNotHere
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey
from gnnsys.store import ColumnChoice, as_source, read_rows

Position = tuple[int, int]  # epoch, and batch within it
_BEFORE_ALL: Position = (-(1 << 62), 0)
FILLS = ("mean", "zero")
_MOST_MEAN_ROWS = 1 << 16  # that a mean is taken over


class GuideVersion(NamedTuple):
    """What batches from `position` on are drawn and read by: scores (0: uniformly) and columns (None: all)."""

    position: Position
    scores: int
    columns: ColumnChoice | None


class GuidedSampler(NeighborSampler):
    """Neighbour sampling on parts that prefers the own part, and elsewhere what counts most.

    `requester` is the part that samples are for (`main_part`; by default the first part of this machine). Of `fanout`
    draws at a node, as many as possible go to neighbours of that part, wherever the node is; `deviation` of them are
    moved to others (epsilon of the thesis), so that no node sees its own part alone. `split="proportional"` keeps the
    uniform split and shifts it by `deviation` towards the own part. `unbiased` takes edges by known probabilities, and
    batches have an `edge_weight`: a weighted sum over sampled edges then has the mean over all neighbours as its
    expectation.

    `use(scores, columns)` has the batches that nobody has begun yet drawn by new scores, and rows of other parts read
    by these columns of `features`. What is left out becomes the mean of the column over the own part, or zero, as
    `fill` says. Ids are global ids.
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
        features: str = "x",
        fill: Literal["mean", "zero"] = "mean",
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
        if fill not in FILLS:
            raise ValueError(f"fill must be one of {', '.join(FILLS)}, got {fill!r}")
        self.features, self._fill_with = features, fill
        self._fill: Tensor | None = None  # by column, once columns are chosen
        self._rule = GuidedRule(deviation, split, unbiased)
        self.gives = ("edge_weight",) if unbiased else ()
        self._versions: list[GuideVersion] = []  # by position, ascending
        self._scores: dict[int, NodeScores] = {}
        self._begun = _BEFORE_ALL
        self._is_pruned = False  # whether versions were forgotten
        self._keeps_all = False  # whether none is to be
        self._parts = graph
        self._lock = threading.Lock()
        super().__init__(graph, num_neighbors, disjoint=disjoint, expand=expand, rule=self._rule.text)

    def options(self) -> dict[str, Any]:
        """What all ranks share; the requester is each one's own, and in the state."""
        own = {"deviation": self._rule.deviation, "split": self._rule.split, "unbiased": self._rule.weighs}
        return {**super().options(), **own, "features": self.features, "fill": self._fill_with}

    # -- versions ----------------------------------------------------------------------------------------------------

    def use(
        self, scores: NodeScores | None = None, at: Position | None = None, *, columns: Tensor | None = None
    ) -> Position:
        """Draws by `scores` and reads rows of other parts by `columns`, from (epoch, batch) `at` on; returns it.

        By default `at` is the first batch that nobody has begun. Without scores draws are uniform, without columns rows
        are whole. Every owner knows the version when this returns. ValueError where `at` was begun already, or another
        version was to begin later: a batch must come out the same whenever it is sampled.
        """
        choice = None if columns is None else self.choice(columns)
        if scores is not None:
            self._check_requester(scores)
            self._parts.add_scores(scores)
        return self.begin_version(scores, choice, at)

    def begin_version(
        self, scores: NodeScores | None, choice: ColumnChoice | None, at: Position | None = None
    ) -> Position:
        """The same where every owner has the scores already."""
        with self._lock:
            last = self._versions[-1].position if self._versions else _BEFORE_ALL
            soonest = max(self._begun, last)
            free = max((soonest[0], soonest[1] + 1), (0, 0))
            position = free if at is None else (int(at[0]), int(at[1]))
            if position < free:
                raise ValueError(
                    f"epoch {position[0]}, batch {position[1]} was begun already, or has a version: the first that is "
                    f"free is batch {free[1]} of epoch {free[0]}"
                )
            self._versions.append(GuideVersion(position, 0 if scores is None else scores.version, choice))
            if scores is not None:
                self._scores[scores.version] = scores
            return position

    def _check_requester(self, scores: NodeScores) -> None:
        if scores.requester != self.requester:
            raise ValueError(f"these scores are of part {scores.requester}, this sampler is for part {self.requester}")

    def choice(self, columns: Tensor) -> ColumnChoice | None:
        """These columns of `features` as rows are read by them; None where they are all there are."""
        (node_type,) = self._parts.node_types
        data = self._parts.node_data[node_type]
        if self.features not in data:
            raise ValueError(f"features={self.features!r} is not among the rows of nodes, {some(data)}")
        source = as_source(data[self.features], self.features)
        if len(source.shape) != 2:
            raise ValueError(f"features={self.features!r} has rows of {list(source.shape[1:])}, which have no columns")
        if source.mutable is True:
            raise ValueError(f"features={self.features!r} trains, and is never read by some columns: leave columns out")
        own = self._parts.book.part_range(self.requester, node_type)
        if self._fill is None:
            self._fill = torch.zeros(source.shape[1], dtype=torch.float32, device="cpu")
            if self._fill_with == "mean" and len(own):
                step = -(-len(own) // _MOST_MEAN_ROWS)
                (rows,) = read_rows([(source, torch.arange(own.start, own.stop, step, device="cpu"))])
                self._fill = rows.double().mean(0).float()
        found = ColumnChoice(self.features, (own.start, own.stop), columns.long().cpu().unique(), self._fill)
        return found if found.dropped.numel() else None

    def version_at(self, position: Position) -> int:
        """The version by which the batch at (epoch, batch) is drawn; 0: uniformly."""
        with self._lock:
            return self._version_of(position).scores

    def columns_at(self, position: Position) -> ColumnChoice | None:
        with self._lock:
            return self._version_of(position).columns

    @property
    def newest(self) -> GuideVersion:
        """The version that begins last."""
        with self._lock:
            return self._versions[-1] if self._versions else _UNGUIDED

    def _version_of(self, position: Position) -> GuideVersion:
        found = bisect_right(self._versions, position, key=lambda entry: entry.position)
        if not found and self._is_pruned and position >= (0, 0):
            raise ValueError(
                f"epoch {position[0]}, batch {position[1]} was consumed, and its scores are forgotten: load a state of "
                "that time to draw it again"
            )
        return self._versions[found - 1] if found else _UNGUIDED

    def consumed(self, position: Position) -> None:
        """Forgets versions that ended before (epoch, batch); batches up to it count as begun."""
        with self._lock:
            self._begun = max(self._begun, position)
            in_force = bisect_right(self._versions, position, key=lambda entry: entry.position) - 1
            if in_force > 0 and not self._keeps_all:
                del self._versions[:in_force]
                used = {entry.scores for entry in self._versions}
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
                scores = self._scores.get(self._version_of(position).scores)
            if scores is None:
                raise
            self._parts.add_scores(scores)
            return super().sample(seeds, key=key, tree=tree, exclude=exclude)

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            choices = {entry.columns.key: entry.columns for entry in self._versions if entry.columns is not None}
            numbers = {key: number for number, key in enumerate(choices)}
            return {
                "requester": self.requester,
                "is_pruned": self._is_pruned,
                "versions": [
                    [*at, version, -1 if columns is None else numbers[columns.key]]
                    for at, version, columns in self._versions
                ],
                "scores": [scores.to_arrays() for scores in self._scores.values()],
                "columns": [choice.state() for choice in choices.values()],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        versions, scores = self.read_state(state)
        for known in list(scores.values())[-MOST_VERSIONS:]:  # owners keep no more, and are sent others when they ask
            self._parts.add_scores(known)
        self.set_versions(versions, scores, is_pruned=bool(state["is_pruned"]))

    def set_versions(
        self, versions: Sequence[GuideVersion], scores: Mapping[int, NodeScores], *, is_pruned: bool
    ) -> None:
        """What batches are drawn and read by, from the first on that is sampled now."""
        with self._lock:
            self._versions, self._scores, self._begun = list(versions), dict(scores), _BEFORE_ALL
            self._is_pruned = is_pruned

    def read_state(self, state: Mapping[str, Any]) -> tuple[list[GuideVersion], dict[int, NodeScores]]:
        """Versions, and scores by version, of what `state_dict` gave; ValueError where it was altered or is another's.

        Nothing changes.
        """
        if set(state) != {"requester", "is_pruned", "versions", "scores", "columns"}:
            raise ValueError(f"this state is of another sampler: expected versions and scores, got {[*state]}")
        try:
            return self._read_versions(state)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"this state of a sampler was altered: {error!r}") from error

    def _read_versions(self, state: Mapping[str, Any]) -> tuple[list[GuideVersion], dict[int, NodeScores]]:
        scores = {known.version: known for known in map(NodeScores.from_arrays, state["scores"])}
        requesters = {int(state["requester"]), *(known.requester for known in scores.values())}
        if requesters != {self.requester}:
            raise ValueError(f"this state is of part {sorted(requesters)}, this sampler is for part {self.requester}")
        choices = [ColumnChoice.of_state(choice) for choice in state["columns"]]
        for choice in choices:
            self._check_choice(choice)
        rows = state["versions"]
        if any(len(row) != 4 or not all(isinstance(number, int) for number in row) for row in rows):
            raise ValueError("versions of this state are not of four numbers: it was altered")
        if any(not -1 <= number < len(choices) for *_, number in rows):
            raise ValueError("this state has versions without columns: it was altered")
        versions = [
            GuideVersion((epoch, batch), version, choices[number] if number >= 0 else None)
            for epoch, batch, version, number in rows
        ]
        positions = [entry.position for entry in versions]
        if positions != sorted(set(positions)) or any(entry.scores not in {0, *scores} for entry in versions):
            raise ValueError("this state has versions without scores, or out of order: it was altered")
        return versions, scores

    def _check_choice(self, choice: ColumnChoice) -> None:
        (node_type,) = self._parts.node_types
        own = self._parts.book.part_range(self.requester, node_type)
        rows = self._parts.node_data[node_type].get(choice.rows)
        width = -1 if rows is None else as_source(rows, choice.rows).shape[-1]
        if choice.rows != self.features or choice.own != (own.start, own.stop) or choice.fill.numel() != width:
            raise ValueError(
                f"this state has columns of {choice.rows!r} with {choice.fill.numel()} columns for nodes {choice.own}, "
                f"here they are {self.features!r} with {width} for {(own.start, own.stop)}: it is of another graph"
            )

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes up the state of a rank that sampled for the same part; without one draws begin uniformly again."""
        own = [state for state in states if state and state.get("requester") == self.requester]
        if own or len(states) == 1:
            return self.load_state_dict((own or states)[0])
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets every version: what samplers of other parts had says nothing of this one."""
        with self._lock:
            self._versions, self._scores, self._begun, self._is_pruned = [], {}, _BEFORE_ALL, False


_UNGUIDED = GuideVersion(_BEFORE_ALL, 0, None)


def main_part(graph: DistGraph, ids: Tensor) -> int:
    """The part that owns most of `ids` (global ids of nodes): whom a trainer with this share samples for."""
    (node_type,) = graph.node_types
    counts = torch.stack([(ids >= r.start) & (ids < r.stop) for r in _ranges(graph, node_type)]).sum(1)
    return int(counts.argmax())


def _ranges(graph: DistGraph, node_type: NodeType) -> list[range]:
    return [graph.book.part_range(part, node_type) for part in range(graph.parts.num_parts)]
