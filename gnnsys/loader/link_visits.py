"""How likely a batch of links is to hold each node: what a cache of rows is filled by.

The seeds of a batch are the ends of its links and the negatives drawn for them, by whatever rule. So they are drawn for
some batches, and counted: either around them by `batch_visits`, or, where that has no formula, by sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType
from gnnsys.loader.batch_memory import NumNeighbors
from gnnsys.loader.link_seeds import LinkSeeder
from gnnsys.loader.links import LinkReader
from gnnsys.loader.negatives import negative_stream
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.schedule import Schedule, Ticket, generator
from gnnsys.sampling import AnyGraph, NeighborSampler, SampleKey, batch_visits

_SEEDED = 64  # batches whose seeds are drawn
_SAMPLED = 16  # batches that are sampled


def _tickets(schedule: Schedule, most: int) -> list[Ticket]:
    """Some batches of the first epoch: at random, as types of links may take turns. The same ones every time."""
    order = torch.randperm(len(schedule), generator=generator(schedule.seed), device="cpu")
    return [Ticket(0, int(batch)) for batch in order[:most]]


class SampledVisits:
    """Samples some batches by a loader's own sample stage, when it is asked, and counts their nodes."""

    def __init__(self, graph: AnyGraph, sample: Callable[[Ticket, Tensor], Sampled], schedule: Schedule) -> None:
        self._graph, self._sample, self._schedule = graph, sample, schedule
        self._found: dict[NodeType, Tensor] | None = None

    def __call__(self) -> dict[NodeType, Tensor]:
        if self._found is None:
            self._found = self._find()
        return self._found

    def _find(self) -> dict[NodeType, Tensor]:
        graph, tickets = self._graph, _tickets(self._schedule, _SAMPLED)
        found = {t: torch.zeros(graph.num_nodes(t), dtype=torch.float64, device="cpu") for t in graph.node_types}
        for ticket in tickets:
            for node_type, ids in self._sample(ticket, self._schedule.inputs(ticket)).sample.node.items():
                found[node_type][ids.cpu().long().unique()] += 1  # trees of their own may hold a node twice
        return {node_type: counts / len(tickets) for node_type, counts in found.items()}


class LinkVisits(SampledVisits):
    """Of links of one edge type. Seeds are drawn, and `batch_visits` knows what is around them, where it has a formula
    for the sampler; else batches are sampled."""

    def __init__(
        self, graph: AnyGraph, sample: Callable[[Ticket, Tensor], Sampled], schedule: Schedule, *,
        sampler: NeighborSampler, num_neighbors: NumNeighbors, inputs: LinkReader, seeder: LinkSeeder,
    ) -> None:  # fmt: skip
        super().__init__(graph, sample, schedule)
        self._sampler, self._num_neighbors = sampler, num_neighbors
        self._inputs, self._seeder = inputs, seeder

    def _find(self) -> dict[NodeType, Tensor]:
        drawn: dict[str, Any] = self._sampler.options()
        is_plain = isinstance(self._graph, Graph) and len(self._graph.node_types) == len(self._graph.edge_types) == 1
        named = (drawn["weight_attr"], drawn.get("edge_mask"))
        if not is_plain or drawn["disjoint"] or drawn["expand"] != "new" or any(name is not None for name in named):
            return super()._find()
        tickets = _tickets(self._schedule, _SEEDED)
        seeds = torch.cat([self._seeds(ticket) for ticket in tickets])
        size = max(1, round(seeds.numel() / len(tickets)))
        return batch_visits(self._graph, self._num_neighbors, seeds, batch_size=size, replace=drawn["replace"])

    def _seeds(self, ticket: Ticket) -> Tensor:
        """Of a batch, each once: ends and negatives."""
        asked = self._inputs.begin(self._schedule.inputs(ticket))
        key = SampleKey(self._schedule.seed, ticket.epoch, ticket.batch)
        (seeds,) = self._seeder(asked, negative_stream(key)).seeds.values()
        return seeds.cpu().long()
