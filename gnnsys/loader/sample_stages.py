"""The sample stage of loaders of nodes: from the inputs that a batch has to the structure around them.

One class per way of sampling: seeds of one node type, seeds of several, and a function of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.loader.batch_message import WantedBatch
from gnnsys.loader.node_inputs import NodeInputs
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.sampling_options import check_sampler
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import shape_subgraph
from gnnsys.sampling import DistGraph, NeighborSampler, Sample, SampleKey, Sampler, to_device
from gnnsys.seeds import SeedsByType
from gnnsys.store import read_rows

SampleFunction: TypeAlias = Callable[[Graph | DistGraph, dict[NodeType, Tensor], SampleKey], Sample]
"""A user's own sampler: `sampler(graph, seeds, key)`, from several threads at once; random by `key` alone. Seeds are on
the device where that is to sample (a graph on it or pinned, `device="cuda"`), and there the current stream is ours."""

SampleStage: TypeAlias = Callable[[Ticket, Tensor], Sampled]


def check_node_sampler(sampler: object, graph: Graph | DistGraph, inputs: NodeInputs) -> None:
    """ValueError where a sampler does not go with a loader's graph and inputs."""
    if isinstance(sampler, Sampler):
        drawn = check_sampler(sampler, graph)
        if not isinstance(inputs.ids, SeedsByType):
            inputs.check_time(drawn.get("time_attr"))
    elif not callable(sampler):
        raise ValueError(
            "sampler must be a gnnsys.sampling.Sampler, or a function sampler(graph, seeds, key) -> Sample, "
            f"got {sampler!r}"
        )
    elif inputs.time is not None:
        raise ValueError("a function of your own is given no input_time: leave it away")


def make_sample_stage(
    graph: Graph | DistGraph,
    sampler: Sampler | SampleFunction,
    inputs: NodeInputs,
    subgraph_type: str,
    seed: int,
    device: torch.device | None,
) -> SampleStage:
    """The stage for a sampler and its inputs."""
    if not isinstance(sampler, Sampler):
        return SampleWithFunction(graph, sampler, inputs.node_type, inputs.ids, seed, device)
    time_attr = sampler.options().get("time_attr")
    if isinstance(inputs.ids, SeedsByType):
        assert isinstance(sampler, NeighborSampler)
        return SampleTyped(graph, sampler, subgraph_type, inputs.ids, inputs.time_by_type, time_attr, seed, device)
    return SampleNodes(
        graph, sampler, subgraph_type, inputs.node_type, inputs.ids, inputs.time, time_attr, seed, device
    )


class SampleByBoth:
    """The sample stage where the host draws some of the batches for a device, by `pattern` over positions.

    They are the same batches: a draw is a function of seed, epoch and batch, wherever it is made.
    """

    def __init__(
        self, on_device: SampleStage, on_host: SampleStage, schedule: Schedule, pattern: Sequence[bool]
    ) -> None:
        self._on_device, self._on_host, self._schedule, self._pattern = on_device, on_host, schedule, tuple(pattern)

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        position = self._schedule.position(ticket)
        is_hosts = ticket.epoch >= 0 and self._pattern[position % len(self._pattern)]
        return (self._on_host if is_hosts else self._on_device)(ticket, chosen)


class SampleNodes:
    """The sample stage: from chosen inputs to the structure around them."""

    def __init__(
        self,
        graph: Graph | DistGraph,
        sampler: Sampler,
        subgraph_type: str,
        node_type: NodeType,
        nodes: Any,
        input_time: Tensor | None,
        time_attr: str | None,
        seed: int,
        device: torch.device | None,
    ) -> None:
        self._graph = graph
        self._sampler = sampler
        self._subgraph_type = subgraph_type
        self._node_type = node_type
        self._nodes = nodes
        self._input_time = input_time
        own_time = None if time_attr is None else graph.node_data[node_type].get(time_attr)
        self._own_time = own_time.cpu() if isinstance(own_time, Tensor) else own_time  # seeds are made on the host
        self._is_timed = time_attr is not None
        self._seed, self._device = seed, device

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        nodes = self._nodes[chosen]
        times = self._times(chosen, nodes)
        sample = self._sampler.sample(
            {self._node_type: nodes},
            key=SampleKey(self._seed, ticket.epoch, ticket.batch),
            seed_time=None if times is None else {self._node_type: times},
        )
        sample = shape_subgraph(sample, self._graph, self._subgraph_type)
        return on_device(self.around(sample, chosen), self._device)

    def wanted(self, ticket: Ticket, chosen: Tensor) -> WantedBatch:
        """What another process needs to make the same sample. It reads the seeds' own times by itself."""
        nodes, given = self._nodes[chosen], self._input_time
        times = None if given is None else {self._node_type: given[chosen]}
        return WantedBatch(ticket.epoch, ticket.batch, {self._node_type: nodes}, times)

    def around(self, sample: Sample, chosen: Tensor) -> Sampled:
        """The sample of these inputs, and what is known about its seeds."""
        values = _about_seeds(chosen)
        if self._input_time is not None:
            values["seed_time"] = self._input_time[chosen]
        return Sampled(sample, self._node_type, {self._node_type: values})

    def _times(self, chosen: Tensor, nodes: Tensor) -> Tensor | None:
        """The seeds' times: as given, or their own."""
        if not self._is_timed:
            return None
        if self._input_time is not None:
            return self._input_time[chosen]
        return read_rows([(self._own_time, nodes)])[0]


class SampleTyped:
    """The sample stage of seeds of several node types."""

    def __init__(
        self,
        graph: Graph | DistGraph,
        sampler: NeighborSampler,
        subgraph_type: str,
        nodes: SeedsByType,
        times: Mapping[NodeType, Tensor],
        time_attr: str | None,
        seed: int,
        device: torch.device | None,
    ) -> None:
        self._graph, self._sampler, self._subgraph_type = graph, sampler, subgraph_type
        self._nodes, self._times, self._is_disjoint = nodes, times, sampler.disjoint
        self._own_times = {} if time_attr is None or times else {t: graph.node_data[t][time_attr] for t in nodes.ids}
        self._seed, self._device = seed, device

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        by_type = self._nodes.by_type(chosen)
        seeds = {t: self._nodes.ids[t][at] for t, at in by_type.items()}
        times = {t: rows[by_type[t]] for t, rows in self._times.items()}
        if self._own_times:
            own = read_rows([(self._own_times[t], ids) for t, ids in seeds.items()])
            times = {t: rows.cpu() for t, rows in zip(seeds, own, strict=True)}
        key = SampleKey(self._seed, ticket.epoch, ticket.batch)
        sample = self._sampler.sample(seeds, key=key, seed_time=times or None, tree=self._trees(seeds))
        sample = shape_subgraph(sample, self._graph, self._subgraph_type)
        return on_device(self.around(sample, chosen), self._device)

    def wanted(self, ticket: Ticket, chosen: Tensor) -> WantedBatch:
        """What another process needs to make the same sample. It reads the seeds' own times by itself."""
        by_type = self._nodes.by_type(chosen)
        seeds = {t: self._nodes.ids[t][at] for t, at in by_type.items()}
        times = {t: rows[by_type[t]] for t, rows in self._times.items()}
        return WantedBatch(ticket.epoch, ticket.batch, seeds, times or None, self._trees(seeds))

    def around(self, sample: Sample, chosen: Tensor) -> Sampled:
        """The sample of these inputs, and what is known about its seeds."""
        by_type = self._nodes.by_type(chosen)
        values: dict[NodeType | EdgeType, dict[str, Any]] = {t: _about_seeds(at) for t, at in by_type.items()}
        for t, rows in self._times.items():
            values[t]["seed_time"] = rows[by_type[t]]
        return Sampled(sample, "", values)

    def _trees(self, seeds: Mapping[NodeType, Tensor]) -> dict[NodeType, Tensor] | None:
        """Where trees are disjoint: numbered one type after the other."""
        if not self._is_disjoint:
            return None
        sizes = [ids.numel() for ids in seeds.values()]
        return dict(zip(seeds, torch.arange(sum(sizes), device="cpu").split(sizes), strict=True))


class SampleWithFunction:
    """The sample stage around a user's own sampler."""

    def __init__(
        self,
        graph: Graph | DistGraph,
        sampler: SampleFunction,
        node_type: NodeType,
        nodes: Any,
        seed: int,
        device: torch.device | None,
    ) -> None:
        self._graph = graph
        self._device = torch.device("cpu") if device is None else device
        self._sampler = sampler
        self._node_type = node_type
        self._nodes = nodes
        self._seed = seed

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        key, nodes = SampleKey(self._seed, ticket.epoch, ticket.batch), self._nodes
        by_type = nodes.by_type(chosen) if isinstance(nodes, SeedsByType) else {self._node_type: chosen}
        ids = nodes.ids if isinstance(nodes, SeedsByType) else {self._node_type: nodes}
        seeds = {t: to_device(ids[t][at], self._device) for t, at in by_type.items()}
        sample = self._sampler(self._graph, seeds, key)
        if not isinstance(sample, Sample):
            raise ValueError(f"a sampler must return a gnnsys.sampling.Sample, got {type(sample).__name__}")
        return Sampled(sample, self._node_type, {t: _about_seeds(at) for t, at in by_type.items()})


def _about_seeds(chosen: Tensor) -> dict[str, Any]:
    return {"input_id": chosen, "batch_size": chosen.numel()}


def on_device(sampled: Sampled, device: torch.device | None) -> Sampled:
    """A sample where the loader goes on with it: samplers that draw on the host are used with graphs of a device."""
    if device is None or sampled.sample.device == device:
        return sampled
    return replace(sampled, sample=sampled.apply(lambda rows: to_device(rows, device)).sample)
