"""What a loader of nodes was given to begin with: seeds of one node type or of several, and their times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType, check_rows_of_inputs
from gnnsys.loader.options import as_values
from gnnsys.loader.sampling_options import check_input_time, typed_times
from gnnsys.sampling import DistGraph
from gnnsys.seeds import InputIds, InputNodes, Ranks, SeedsByType, Share, resolve_nodes


class NodeInputs:
    """Seeds and their times, checked. `node_type` is "" where seeds were given by type, and `ids` has all of them."""

    def __init__(
        self,
        graph: Graph | DistGraph,
        given: InputNodes,
        time: Tensor | Mapping[NodeType, Tensor] | None,
        time_attr: str | None,
    ) -> None:
        self._graph, self._given = graph, given
        time = time if isinstance(time, Mapping) else as_values(time, "input_time")
        self.ids: InputIds | SeedsByType
        self.largest: int | None = None  # seeds of the rank that has most
        by_type: SeedsByType | None = None
        if isinstance(given, Mapping):
            for node_type, chosen in given.items():
                of_type = time.get(node_type) if isinstance(time, Mapping) else None
                check_rows_of_inputs(graph, chosen, input_time=of_type)
            self.node_type, self.ids = "", (by_type := SeedsByType(graph, given))
            self.largest = by_type.largest
        else:
            check_rows_of_inputs(graph, given, input_time=time)
            self.node_type, ids = resolve_nodes(graph, given)
            self.ids = InputIds(ids)
            if isinstance(given, Share):
                self.largest = given.largest
        self.time_by_type = typed_times(graph, by_type, time, time_attr)
        self.time = None if time is None or isinstance(time, Mapping) else time.cpu()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def types(self) -> NodeType | list[NodeType]:
        return list(self.ids.ids) if isinstance(self.ids, SeedsByType) else self.node_type

    @property
    def has_times(self) -> bool:
        """Whether times were given, rather than read from the graph."""
        return self.time is not None or bool(self.time_by_type)

    def all_ids(self) -> Tensor:
        """Those of one type."""
        assert isinstance(self.ids, InputIds)
        return self.ids[torch.arange(len(self.ids), device="cpu")]

    def most_in_batch(self, batch_size: int) -> dict[NodeType, int]:
        """How many seeds of each type a batch may have."""
        by_type = self.ids.ids if isinstance(self.ids, SeedsByType) else {self.node_type: self.ids}
        return {t: min(batch_size, len(ids)) for t, ids in by_type.items()}

    def check_time(self, time_attr: str | None) -> None:
        """ValueError unless seeds of one type have the times that sampling by `time_attr` needs."""
        check_input_time(self._graph, self.node_type, len(self.ids), self.time, time_attr)

    def ranks(self) -> Ranks:
        if isinstance(self.ids, SeedsByType):
            return Ranks(self._graph, None, None)
        return Ranks(self._graph, self._given, self.ids, [] if self.time is None else ["input_time"])

    def told(self, ranks: Ranks) -> list[Any]:
        """What tells these inputs from others, for a loader's state."""
        if isinstance(self.ids, SeedsByType):
            return [*self.ids.ids.values(), *self.time_by_type.values()]
        return [*ranks.told_inputs, self.time]
