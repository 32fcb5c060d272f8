"""Links of several edge types in one loader: in every batch some of each, or one type per batch in turn.

Links are numbered one type after the other, as they were given. All types of a batch share one sample, and what is
looked up for them is asked together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.loader.link_seeds import LinkSeeder, unique_seeds
from gnnsys.loader.links import Exclusion, LinkReader
from gnnsys.loader.negatives import NegativeSampling, negative_stream
from gnnsys.loader.reserved import link_names
from gnnsys.loader.sample_stages import on_device
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import shape_subgraph
from gnnsys.sampling import AnyGraph, SampleKey, Sampler


@dataclass(frozen=True)
class TypedLinks:
    """What is known of the links of one type."""

    inputs: LinkReader
    num_links: int
    largest: int | None
    seeder: LinkSeeder
    told: list[Any]  # what tells them from others, for a loader's state
    negatives: NegativeSampling | None
    exclusion: Exclusion | None
    is_labelled: bool
    is_weighted: bool


@dataclass
class TurnSchedule(Schedule):
    """Batches of one type each, the types taking turns until each has given all of its batches.

    `parts` are the schedules of the types.
    """

    parts: list[Schedule] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.parts:
            part.shuffle_start = self.shuffle_start

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def inputs(self, ticket: Ticket) -> Tensor:
        """Which of the inputs make up this batch."""
        left = [len(part) for part in self.parts]
        batch, turn = ticket.batch, 0  # each turn takes one batch of every type that has some left
        lengths = sorted({0, *left})
        for shorter, longer in pairwise(lengths):
            alive = sum(length > shorter for length in left)
            if batch < alive * (longer - shorter):
                turn = shorter + batch // alive
                batch %= alive
                break
            batch -= alive * (longer - shorter)
        number = [i for i, length in enumerate(left) if length > turn][batch]
        first = sum(part.num_inputs for part in self.parts[:number])
        return self.parts[number].inputs(Ticket(ticket.epoch, turn)) + first


def typed_schedule(
    links: Mapping[EdgeType, TypedLinks], batch_size: int, shuffle: bool | str, drop_last: bool, seed: int, *,
    in_turn: bool,
) -> Schedule:  # fmt: skip
    """Batches of links of all types together, or of one type each."""
    largest = [of.largest for of in links.values()]
    shares = [size for size in largest if size is not None]
    if shares and len(shares) != len(links):
        raise ValueError("edge_label_index: some types are a share and others are not: gnnsys.split all of them")
    total, most = sum(of.num_links for of in links.values()), sum(shares) if shares else None
    if not in_turn:
        return Schedule(total, batch_size, shuffle, drop_last, seed, most)
    parts = [
        Schedule(of.num_links, batch_size, shuffle, drop_last, seed + number, of.largest)
        for number, of in enumerate(links.values())
    ]
    return TurnSchedule(total, batch_size, shuffle, drop_last, seed, most, parts)


def typed_link_names(links: Mapping[EdgeType, TypedLinks]) -> tuple[str, ...]:
    """What a batch of these links sets."""
    names = [
        link_names(False, of.negatives, is_labelled=of.is_labelled, is_timed=False, is_weighted=of.is_weighted)
        for of in links.values()
    ]
    return tuple(dict.fromkeys(name for own in names for name in own))


class SampleTypedLinks:
    """The sample stage: from chosen links of several types to the structure around their ends."""

    def __init__(
        self,
        graph: AnyGraph,
        sampler: Sampler,
        subgraph_type: str,
        links: Mapping[EdgeType, TypedLinks],
        seed: int,
        device: torch.device | None,
    ) -> None:
        self._graph, self._sampler, self._subgraph_type = graph, sampler, subgraph_type
        self._links, self._seed, self._device = links, seed, device

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        key = SampleKey(self._seed, ticket.epoch, ticket.batch)
        stream = negative_stream(key)
        first, asked = 0, []
        for of_type in self._links.values():
            own = chosen[(chosen >= first) & (chosen < first + of_type.num_links)] - first
            first += of_type.num_links
            asked.append(of_type.seeder.begin(of_type.inputs.begin(own), stream, of_type.exclusion))
        nodes = [collect() for collect in [ask_more() for ask_more in asked]]
        ends = [
            (edge_type[at], of_end)
            for edge_type, of in zip(self._links, nodes, strict=True)
            for at, of_end in ((0, of.src), (2, of.dst))
        ]
        seeds, places = unique_seeds(ends)
        values: dict[NodeType | EdgeType, dict[str, Any]] = {}
        exclude: dict[EdgeType, list[Tensor]] = {}
        for number, ((edge_type, of_type), of) in enumerate(zip(self._links.items(), nodes, strict=True)):
            about = of_type.seeder.values(of, places[2 * number], places[2 * number + 1])
            values[edge_type] = {"input_id": of.links.input_id, **about}
            for excluded, positions in (of.exclude or {}).items():
                exclude.setdefault(excluded, []).append(positions)
        merged = {t: torch.cat(found).unique() if len(found) > 1 else found[0] for t, found in exclude.items()}
        sample = self._sampler.sample(seeds, key=key, exclude=merged or None)
        sample = shape_subgraph(sample, self._graph, self._subgraph_type, merged or None)
        return on_device(Sampled(sample, "", values), self._device)
