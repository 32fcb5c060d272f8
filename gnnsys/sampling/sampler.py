"""What every sampler is: from seeds and a key to the structure of a batch.

A loader takes any `Sampler`, ours or a user's own (docs/samplers.md). A sample is a function of the seeds, the key and
what `options` and `state_dict` say, and of nothing else: that is why a run can be repeated and resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.sampling.neighborhoods import AnyGraph, neighborhoods
from gnnsys.sampling.sample import Sample
from gnnsys.store import ColumnChoice


class SampleKey(NamedTuple):
    """Which batch of which epoch of which run: all that randomness may depend on besides the node itself."""

    seed: int = 0
    epoch: int = 0
    batch: int = 0


class Sampler(ABC):
    """Samples the structure around seeds. `sample` is called from several threads at once."""

    unbiased_for: ClassVar[str] = ""  # what is exact in expectation over keys, in one sentence; empty: nothing
    gives: tuple[str, ...] = ()  # "edge_weight", "node_weight": what its batches have besides structure
    takes_links: ClassVar[bool] = True  # whether seeds may be the ends of links, with edges to exclude

    graph: AnyGraph
    device: torch.device = torch.device("cpu")  # where samples are made

    @abstractmethod
    def sample(
        self,
        seeds: Mapping[NodeType, Tensor],
        *,
        key: SampleKey,
        seed_time: Mapping[NodeType, Tensor] | None = None,
        tree: Mapping[NodeType, Tensor] | None = None,
        exclude: Mapping[EdgeType, Tensor] | None = None,
    ) -> Sample:
        """The structure around `seeds`, given per node type, as the graph numbers them: global ids on parts.

        `seed_time` is the time of each seed; `tree` says which tree each seed starts; `exclude` are edges, as
        `find_edges` names them, never to be taken. ValueError for what a sampler cannot do.
        """

    def options(self) -> dict[str, Any]:
        """What decides a sample besides the graph, the seeds and the key, by the names that users give it."""
        return {}

    def check_current(self) -> None:  # noqa: B027 - most draw by structure alone
        """ValueError where it draws by arrays that the graph no longer has."""

    def find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Tensor:
        """All edges src[i] -> dst[i] (parallel ones included), ascending, each once: what `exclude` takes."""
        return neighborhoods(self.graph).find_edges(edge_type, src, dst)

    def begin_find_edges(self, edge_type: EdgeType, src: Tensor, dst: Tensor) -> Callable[[], Tensor]:
        """`find_edges` in two halves, so that several look-ups can be under way: the result is there when called."""
        return partial(self.find_edges, edge_type, src, dst)

    def state_dict(self) -> dict[str, Any]:
        """What a sampler has learned since it was made; a loader's state carries it. Most have learned nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave; ValueError where that is of another sampler."""
        if state:
            raise ValueError(f"this state is of another sampler: {type(self).__name__} learns nothing, got {[*state]}")

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes up what the samplers of all ranks had learned, however many they were."""
        self.load_state_dict(states[0])

    def consumed(self, position: tuple[int, int]) -> None:  # noqa: B027 - most do not care
        """A loader has handed out the batch at (epoch, batch): what only batches before it need may be forgotten."""

    def columns_at(self, position: tuple[int, int]) -> ColumnChoice | None:
        """By which columns rows of other parts are read for the batch at (epoch, batch); None: whole ones."""
        return None

    def refuse(self, **given: object) -> None:
        """ValueError for arguments of `sample` that this sampler has no use for, unless they are None."""
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise ValueError(f"{type(self).__name__} takes no {' and no '.join(named)}: use a NeighborSampler for that")
