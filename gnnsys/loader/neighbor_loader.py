"""NeighborLoader: mini-batches of seed nodes with their sampled neighbourhoods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.loader.batch import Batch
from gnnsys.loader.device_copy import resolve, sampled_on
from gnnsys.loader.fetch import Names
from gnnsys.loader.identity import Identity
from gnnsys.loader.loader import Loader
from gnnsys.loader.options import PipelineOptions
from gnnsys.loader.padding import Padding, PadSizes, as_pad_sizes
from gnnsys.loader.reserved import node_names
from gnnsys.loader.row_cache import fill_caches
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import SUBGRAPH_TYPES, shape_subgraph
from gnnsys.pipeline import Stage
from gnnsys.sampling import DistGraph, NeighborSampler, Sample, SampleKey, Sampler, batch_visits, to_device
from gnnsys.seeds import InputIds, InputNodes, Ranks, Share, resolve_nodes
from gnnsys.store import read_rows

NumNeighbors: TypeAlias = Sequence[int] | Mapping[EdgeType, Sequence[int]]
SampleFunction: TypeAlias = Callable[[Graph | DistGraph, dict[NodeType, Tensor], SampleKey], Sample]
"""A user's own sampler: `sampler(graph, seeds, key)`, from several threads at once; random by `key` alone. Seeds are on
the device where that is to sample (a graph on it or pinned, `device="cuda"`), and there the current stream is ours."""


class BatchNumbers(Protocol):
    """Numbers of batches, counted across epochs, and their (epoch, batch)."""

    def number(self, at: tuple[int, int]) -> int: ...

    def ticket(self, position: int) -> tuple[int, int]: ...

    def state(self) -> dict[str, Any]:
        """What must be the same for a number to mean the same batch."""


class LoaderGuide(Protocol):
    """What steers a loader's draws and columns while it runs: `gnnsys.explain.Guide`."""

    def make_sampler(self, graph: Any, num_neighbors: Any, seeds: Tensor, batches: BatchNumbers) -> NeighborSampler:
        """The sampler of a loader of these seeds (global ids)."""

    def watch(self, counts: Callable[[], Mapping[str, int]], made_of: Callable[[], Mapping[str, Any]]) -> None:
        """Is told what the loader's fetch stage counts, and what the loader is made of (`Identity.state`)."""


class NeighborLoader(Loader):
    """Batches of `batch_size` seed nodes, each with `num_neighbors[h]` neighbours of every node at hop h.

    `graph` is in memory, or what `gnnsys.open` returns. `input_nodes`: ids, a bool mask or the name of one, a list or a
    range; in a heterogeneous graph a node type or (node type, any of these); None: all nodes. Or this rank's share, as
    `gnnsys.split` returns it: then every rank has the same number of batches, of sizes that differ by at most one.
    `num_neighbors`: one number per hop (-1: all), or a list per edge type. `input_time` is the seeds' time under
    temporal sampling (default: their own `time_attr`). `sampler`: any `gnnsys.sampling.Sampler`, or a function of
    the user's own (`SampleFunction`), instead of `num_neighbors` and the options that say how to draw. `guide`: a
    `gnnsys.explain.Guide`, by which less is read of other parts (docs/explanation.md).
    Everything random is a function of (seed, epoch, batch). Further options: see `Loader`.

    `device`: where batches arrive. A graph on a GPU (`graph.to("cuda")`) is sampled and gathered from there, by default
    for batches there; so is one in pinned memory (`graph.pin_memory()`) for `device="cuda"`. Of any other graph batches
    are made on the host and copied ahead. The batches are the same.

    `pad`: batches are padded to a few sizes, so that a step can be captured once per size (`gnnsys.cuda.capture`).
    Results for the seeds stay the same. `batch.seed_mask` tells seeds from padding; see `PadSizes` and docs/gpu.md.

    >>> loader = NeighborLoader(graph, [15, 10], input_nodes=train_ids, batch_size=1024, shuffle=True)
    >>> for batch in loader:
    ...     out = model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    def __init__(
        self,
        graph: Graph | DistGraph,
        num_neighbors: NumNeighbors | None = None,
        *,
        input_nodes: InputNodes = None,
        input_time: Tensor | None = None,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        replace: bool = False,
        subgraph_type: str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        expand: str = "new",
        sampler: Sampler | SampleFunction | None = None,
        guide: LoaderGuide | None = None,
        fetch: Names | None = None,
        wire_dtype: torch.dtype | None = None,
        transform: Callable[[Batch], Batch] | None = None,
        stages: Sequence[Stage] = (),
        num_threads: int | None = None,
        prefetch: int = 2,
        pipeline: PipelineOptions | None = None,
        device: torch.device | str | None = None,
        across_epochs: bool = True,
        pad: bool | PadSizes = False,
    ) -> None:
        sizes = as_pad_sizes(pad)
        if sizes is not None:
            check_can_pad(sampler or guide, subgraph_type, expand)
        node_type, ids = resolve_nodes(graph, input_nodes)
        nodes = InputIds(ids)
        largest = input_nodes.largest if isinstance(input_nodes, Share) else None
        schedule = Schedule(len(nodes), batch_size, shuffle, drop_last, seed, largest)
        target = resolve(device, graph)
        input_time = None if input_time is None else input_time.cpu()
        sample: Callable[[Ticket, Tensor], Sampled]
        options: dict[str, Any] = {"input_nodes of type": node_type, "sampler": "a user's own"}
        where = sampled_on(graph, target)
        of_draws = (time_attr, weight_attr, replace or None, disjoint or None)
        is_plain = all(option is None for option in of_draws) and (subgraph_type, expand) == ("directional", "new")
        if guide is not None:
            check_guide(guide, sampler, num_neighbors, is_plain=is_plain and input_time is None)
            assert num_neighbors is not None
            everything = nodes[torch.arange(len(nodes), device="cpu")]
            sampler = guided = guide.make_sampler(graph, num_neighbors, everything, schedule)
            if isinstance(graph, DistGraph) and target is not None and len(nodes):
                fill_caches(graph, target, _Visits(guided, num_neighbors, node_type, nodes, batch_size, None), fetch)
        elif sampler is not None and (num_neighbors is not None or not is_plain):
            raise ValueError("your sampler decides what is sampled: leave num_neighbors and options of ours away")
        if isinstance(sampler, Sampler):
            drawn = check_sampler(sampler, graph)
            disjoint, time_attr = bool(drawn.get("disjoint")), drawn.get("time_attr")
            check_input_time(graph, node_type, len(nodes), input_time, time_attr)
            sample = _SampleNodes(graph, sampler, subgraph_type, node_type, nodes, input_time, time_attr, seed, where)
            options |= {"sampler": type(sampler).__name__, **drawn}
        elif sampler is None:
            if num_neighbors is None:
                raise ValueError("num_neighbors must be given, a fanout per hop, unless you bring your own sampler")
            ours = make_sampler(
                graph,
                num_neighbors,
                subgraph_type,
                replace=replace,
                disjoint=disjoint or time_attr is not None,
                weight=weight_attr,
                time=time_attr,
                temporal_strategy=temporal_strategy,
                expand=expand,
                device=where or torch.device("cpu"),
            )
            check_input_time(graph, node_type, len(nodes), input_time, time_attr)
            if isinstance(graph, DistGraph) and target is not None and len(nodes):
                visits = _Visits(ours, num_neighbors, node_type, nodes, batch_size, input_time)
                fill_caches(graph, target, visits, fetch)
            sample = _SampleNodes(graph, ours, subgraph_type, node_type, nodes, input_time, time_attr, seed, where)
            options |= {"sampler": None, **ours.options(), "subgraph_type": subgraph_type}
        else:
            if not callable(sampler):
                raise ValueError(
                    "sampler must be a gnnsys.sampling.Sampler, or a function sampler(graph, seeds, key) -> Sample, "
                    f"got {sampler!r}"
                )
            if input_time is not None:
                raise ValueError("a function of your own is given no input_time: leave it away")
            sample = _SampleWith(graph, sampler, node_type, nodes, seed, where)
        ranks = Ranks(graph, input_nodes, nodes, [] if input_time is None else ["input_time"])
        own_names = node_names(disjoint or time_attr is not None, input_time is not None)
        own_names = (*own_names, *getattr(sampler, "gives", ()))
        if sizes is not None:
            sample, own_names = Padding(sample, schedule, sizes), (*own_names, "seed_mask")
        super().__init__(
            graph,
            schedule,
            sample,
            ranks=ranks,
            identity=Identity(graph, [*ranks.told_inputs, input_time], options),
            own_names=own_names,
            transform=transform,
            num_threads=num_threads,
            prefetch=prefetch,
            device=target or "cpu",
            across_epochs=across_epochs,
            fetch=fetch,
            wire_dtype=wire_dtype,
            stages=stages,
            pipeline=pipeline,
            sampler=sampler if isinstance(sampler, Sampler) else None,
        )
        if guide is not None:
            guide.watch(self._fetch.counts, self._identity.state)


class _Visits:
    """How likely a batch is to hold each node, by what a loader was given; computed when it is asked for."""

    def __init__(
        self,
        sampler: NeighborSampler,
        num_neighbors: NumNeighbors,
        node_type: NodeType,
        nodes: InputIds,
        batch_size: int,
        input_time: Tensor | None,
    ) -> None:
        self._sampler, self._num_neighbors = sampler, num_neighbors
        self._node_type, self._nodes, self._batch_size, self._input_time = node_type, nodes, batch_size, input_time

    def __call__(self) -> dict[NodeType, Tensor]:
        drawn = self._sampler.options()
        options = {name: drawn[name] for name in ("replace", "disjoint", "expand", "temporal_strategy")}
        return batch_visits(
            self._sampler.graph,
            self._num_neighbors,
            self._nodes[torch.arange(len(self._nodes), device="cpu")],
            batch_size=self._batch_size,
            node_type=self._node_type,
            seed_time=self._input_time,
            weight=drawn["weight_attr"],
            time=drawn["time_attr"],
            **options,
        )


class _SampleNodes:
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
        values = _about_seeds(chosen)
        if self._input_time is not None:
            values["seed_time"] = times
        sample = shape_subgraph(sample, self._graph, self._subgraph_type)
        return on_device(Sampled(sample, self._node_type, {self._node_type: values}), self._device)

    def _times(self, chosen: Tensor, nodes: Tensor) -> Tensor | None:
        """The seeds' times: as given, or their own."""
        if not self._is_timed:
            return None
        if self._input_time is not None:
            return self._input_time[chosen]
        return read_rows([(self._own_time, nodes)])[0]


class _SampleWith:
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
        key = SampleKey(self._seed, ticket.epoch, ticket.batch)
        seeds = to_device(self._nodes[chosen], self._device)
        sample = self._sampler(self._graph, {self._node_type: seeds}, key)
        if not isinstance(sample, Sample):
            raise ValueError(f"a sampler must return a gnnsys.sampling.Sample, got {type(sample).__name__}")
        return Sampled(sample, self._node_type, {self._node_type: _about_seeds(chosen)})


def _about_seeds(chosen: Tensor) -> dict[str, Any]:
    return {"input_id": chosen, "batch_size": chosen.numel()}


def make_sampler(
    graph: Graph | DistGraph, num_neighbors: NumNeighbors, subgraph_type: str, *, disjoint: bool, **options: Any
) -> NeighborSampler:
    if subgraph_type not in SUBGRAPH_TYPES:
        raise ValueError(f"subgraph_type must be one of {SUBGRAPH_TYPES}, got {subgraph_type!r}")
    if subgraph_type != "directional" and options.get("expand") == "frontier":
        raise ValueError(
            f"expand='frontier' makes blocks of what was sampled: subgraph_type={subgraph_type!r} has none"
        )
    if subgraph_type == "induced" and options.get("time") is not None:
        raise ValueError(
            "subgraph_type='induced' does not go with temporal sampling: it would have edges later than the seeds"
        )
    return NeighborSampler(graph, num_neighbors, disjoint=disjoint, **options)


def check_guide(guide: LoaderGuide, sampler: object, num_neighbors: NumNeighbors | None, *, is_plain: bool) -> None:
    """ValueError for what a guide does not go with. `is_plain`: draws are as a loader has them by default."""
    if not hasattr(guide, "make_sampler"):
        raise ValueError(f"guide must be a gnnsys.explain.Guide, got {type(guide).__name__}")
    if sampler is not None or num_neighbors is None or not is_plain:
        raise ValueError(
            "a guide decides how neighbours are drawn: give num_neighbors, and leave sampler, times, weights, replace, "
            "disjoint, subgraph_type and expand away"
        )


def check_sampler(sampler: Sampler, graph: Graph | DistGraph) -> dict[str, Any]:
    """The options of a user's sampler; ValueError where it samples another graph."""
    if sampler.graph is not graph:
        raise ValueError("the sampler was made for another graph: make it for the one that the loader is given")
    return sampler.options()


def on_device(sampled: Sampled, device: torch.device | None) -> Sampled:
    """A sample where the loader goes on with it: samplers that draw on the host are used with graphs of a device."""
    if device is None or sampled.sample.device == device:
        return sampled
    return replace(sampled, sample=sampled.apply(lambda rows: to_device(rows, device)).sample)


def check_can_pad(sampler: object | None, subgraph_type: str, expand: str) -> None:
    """ValueError for batches that do not come hop by hop: padding goes between hops."""
    if sampler is not None:
        raise ValueError("pad=True needs to know a batch's hops: it goes with our samplers, not with one of your own")
    if subgraph_type != "directional":
        raise ValueError(
            f"pad=True pads hop by hop, and subgraph_type={subgraph_type!r} has no hops: leave one of them away"
        )
    if expand != "new":
        raise ValueError(f"pad=True pads one edge_index, and expand={expand!r} makes blocks: leave one of them away")


def check_input_time(
    graph: Graph | DistGraph, node_type: NodeType, num_seeds: int, input_time: Tensor | None, time_attr: str | None
) -> None:
    """ValueError unless the seeds' times are given, one each, or are their own where the attribute is a node's."""
    check_times("input_time", input_time)
    if input_time is not None:
        if time_attr is None:
            raise ValueError("input_time was given without time_attr: name the attribute that holds times")
        if input_time.shape != (num_seeds,):
            raise ValueError(f"input_time must have one entry per seed, {num_seeds}, got {tuple(input_time.shape)}")
    elif time_attr is not None and time_attr not in graph.node_data[node_type]:
        raise ValueError(f"input_time must be given: nodes of type {node_type!r} have no {time_attr!r} of their own")


def check_times(name: str, times: Tensor | None) -> None:
    """Times are compared exactly: whole numbers only."""
    if times is not None and (times.is_floating_point() or times.is_complex()):
        raise ValueError(f"{name} must hold integers, such as seconds, got {times.dtype}")
