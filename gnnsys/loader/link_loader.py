"""LinkNeighborLoader: mini-batches of links with the sampled neighbourhoods of their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EDGE, EdgeType, Graph, IdsLike, as_links, some
from gnnsys.loader.batch import Batch
from gnnsys.loader.device_copy import resolve, sampled_on
from gnnsys.loader.fetch import Names
from gnnsys.loader.identity import Identity
from gnnsys.loader.link_seeds import (
    EdgeInputs,
    LinkReader,
    Links,
    LinkSeeder,
    check_labels,
    make_seeder,
    supervision_edges,
)
from gnnsys.loader.loader import Loader
from gnnsys.loader.negatives import NegativeSampling, negative_stream
from gnnsys.loader.neighbor_loader import (
    LoaderGuide,
    NumNeighbors,
    check_guide,
    check_sampler,
    check_times,
    make_sampler,
    on_device,
)
from gnnsys.loader.options import PipelineOptions
from gnnsys.loader.reserved import link_names
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import reverse_of, shape_subgraph
from gnnsys.pipeline import Stage
from gnnsys.sampling import AnyGraph, SampleKey, Sampler
from gnnsys.seeds import InputIds, Ranks, Share, check_alone

_MOST_ENDS = 1 << 16  # that are looked up to see whom samples are for
InputLinks: TypeAlias = "Tensor | IdsLike | EdgeType | tuple[EdgeType, Any] | Share | None"


class LinkNeighborLoader(Loader):
    """Batches of `batch_size` links, with `num_neighbors[h]` neighbours of every node at hop h around their ends.

    `edge_label_index`: [2, num_links], an edge type, or (edge type, [2, num_links]); None: all edges; or a rank's share
    of the edges of a type (`gnnsys.split`). Of a graph in parts ids are global ids, and where links are edges of it
    their ends are looked up batch by batch. With `neg_sampling` negatives are drawn beside them. A batch's own links
    are kept out of its message passing (`exclude_supervision`), as are their reverses: in a homogeneous graph the same
    edges the other way round, in a heterogeneous one those of `reverse_edge_type` (by default the type named `rev_...`,
    or its counterpart). `sampler`: any `gnnsys.sampling.Sampler` that can exclude edges, instead of `num_neighbors` and
    the options that say how to draw. `guide`: a `gnnsys.explain.Guide`, which explains the model that makes rows of
    nodes (docs/explanation.md).

    >>> loader = LinkNeighborLoader(graph, [10, 5], edge_label_index=train_links, neg_sampling="binary", batch_size=512)
    >>> for batch in loader:
    ...     src, dst = model(batch.x, batch.edge_index)[batch.edge_label_index]
    """

    def __init__(
        self,
        graph: AnyGraph,
        num_neighbors: NumNeighbors | None = None,
        *,
        edge_label_index: InputLinks = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        neg_sampling: NegativeSampling | str | dict[str, Any] | None = None,
        exclude_supervision: bool = True,
        reverse_edge_type: EdgeType | None = None,
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
        sampler: Sampler | None = None,
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
    ) -> None:
        of_draws = (time_attr, weight_attr, replace or None, disjoint or None)
        is_plain = all(option is None for option in of_draws) and (subgraph_type, expand) == ("directional", "new")
        if guide is not None:
            check_guide(guide, sampler, num_neighbors, is_plain=is_plain and edge_label_time is None)
        if sampler is not None:
            if num_neighbors is not None or not is_plain:
                raise ValueError("your sampler decides what is sampled: leave num_neighbors and options of ours away")
            drawn = check_takes_links(sampler, graph)
            disjoint, time_attr = bool(drawn.get("disjoint")), drawn.get("time_attr")
        elif num_neighbors is None:
            raise ValueError("num_neighbors must be given, a fanout per hop, unless you bring your own sampler")
        if (edge_label_time is None) != (time_attr is None):
            raise ValueError("edge_label_time and time_attr go together: give both, or neither")
        target = resolve(device, graph)
        edge_label, edge_label_time = (None if of is None else of.cpu() for of in (edge_label, edge_label_time))
        negatives = NegativeSampling.cast(neg_sampling)
        check_times("edge_label_time", edge_label_time)
        edge_type, inputs, num_links, shares = resolve_inputs(
            graph, edge_label_index, check_labels(negatives, edge_label), edge_label_time
        )
        for name, values in (("edge_label", edge_label), ("edge_label_time", edge_label_time)):
            if values is not None and values.shape[0] != num_links:
                raise ValueError(f"{name} must have one entry per link, {num_links}, got {values.shape[0]}")
        own = [
            name for name, of in (("edge_label", edge_label), ("edge_label_time", edge_label_time)) if of is not None
        ]
        ids = inputs.ids if isinstance(inputs, EdgeInputs) else None
        disjoint = disjoint or time_attr is not None
        schedule = Schedule(num_links, batch_size, shuffle, drop_last, seed, **shares)
        if guide is not None:
            sampler = guide.make_sampler(graph, num_neighbors, _some_ends(inputs, num_links), schedule)
        where, chosen = sampled_on(graph, target), sampler
        if chosen is None:
            assert num_neighbors is not None
            chosen = make_sampler(
                graph,
                num_neighbors,
                subgraph_type,
                replace=replace,
                disjoint=disjoint,
                weight=weight_attr,
                time=time_attr,
                temporal_strategy=temporal_strategy,
                expand=expand,
                device=where or torch.device("cpu"),
            )
        seeder = make_seeder(graph, edge_type, negatives, disjoint, time_attr)
        if graph.is_homogeneous:
            reverse_edge_type = EDGE
        elif reverse_edge_type is None:
            reverse_edge_type = reverse_of(edge_type, graph)
        else:
            graph.num_edges(reverse_edge_type)  # ValueError where there is no such type
        exclude = (edge_type, reverse_edge_type) if exclude_supervision else None
        sample = _SampleLinks(graph, chosen, seeder, subgraph_type, edge_type, inputs, exclude, seed, where)
        ranks = Ranks(graph, edge_label_index, ids, own)
        ends = [inputs.src, inputs.dst] if isinstance(inputs, Links) else ranks.told_inputs
        options = {
            "edge_label_index of type": edge_type,
            **({} if sampler is None else {"sampler": type(sampler).__name__}),
            **chosen.options(),
            "subgraph_type": subgraph_type,
            "exclude_supervision": exclude_supervision,
            "reverse_edge_type": reverse_edge_type,
            "neg_sampling": seeder.told_negatives,
        }
        super().__init__(
            graph,
            schedule,
            sample,
            ranks=ranks,
            identity=Identity(graph, [*ends, edge_label, edge_label_time], options),
            own_names=(
                *link_names(
                    disjoint, negatives, is_labelled=edge_label is not None, is_timed=edge_label_time is not None
                ),
                *chosen.gives,
            ),
            transform=transform,
            num_threads=num_threads,
            prefetch=prefetch,
            device=target or "cpu",
            across_epochs=across_epochs,
            fetch=fetch,
            wire_dtype=wire_dtype,
            stages=stages,
            pipeline=pipeline,
            sampler=sampler,
        )
        if guide is not None:
            guide.watch(self._fetch.counts, self._identity.state)


def _some_ends(inputs: LinkReader, num_links: int) -> Tensor:
    """Where links end, of 65,536 of them at most: edges are in the part of that end."""
    step = max(1, -(-num_links // _MOST_ENDS))
    return inputs.take(torch.arange(0, num_links, step, device="cpu")).dst


def check_takes_links(sampler: Sampler, graph: AnyGraph) -> dict[str, Any]:
    """The options of a user's sampler; ValueError where links are nothing for it."""
    if not isinstance(sampler, Sampler):
        raise ValueError(f"sampler must be a gnnsys.sampling.Sampler, got {type(sampler).__name__}")
    if not sampler.takes_links:
        raise ValueError(
            f"{type(sampler).__name__} cannot keep a batch's links out of its edges: use a NeighborSampler or a "
            "LaborSampler for links"
        )
    return check_sampler(sampler, graph)


class _SampleLinks:
    """The sample stage: from chosen links to the structure around their ends."""

    def __init__(
        self,
        graph: AnyGraph,
        sampler: Sampler,
        seeder: LinkSeeder,
        subgraph_type: str,
        edge_type: EdgeType,
        inputs: LinkReader,
        exclude: tuple[EdgeType, EdgeType | None] | None,
        seed: int,
        device: torch.device | None,
    ) -> None:
        self._graph = graph
        self._sampler = sampler
        self._seeder = seeder
        self._subgraph_type = subgraph_type
        self._edge_type = edge_type
        self._inputs = inputs
        self._exclude = exclude
        self._seed, self._device = seed, device

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        links = self._inputs.take(chosen)
        key = SampleKey(self._seed, ticket.epoch, ticket.batch)
        seeds = self._seeder(links, negative_stream(key))
        exclude = None
        if self._exclude is not None:
            exclude = supervision_edges(self._sampler, self._exclude[0], links.src, links.dst, self._exclude[1])
        sample = self._sampler.sample(
            seeds.seeds,
            key=key,
            seed_time=seeds.seed_time,
            tree=seeds.tree,
            exclude=exclude,
        )
        if sample.tree is not None:
            sample.tree = seeds.owners(sample.tree)
        sample = shape_subgraph(sample, self._graph, self._subgraph_type, exclude)
        sampled = Sampled(sample, self._edge_type, seeds.by_type(self._edge_type, links.input_id))
        return on_device(sampled, self._device)


def resolve_inputs(
    graph: AnyGraph, given: InputLinks, label: Tensor | None, time: Tensor | None
) -> tuple[EdgeType, LinkReader, int, dict[str, int]]:
    """The edge type, the links, how many there are, and what a schedule must know of other ranks' shares."""
    if isinstance(given, Share):
        if given.type not in graph.edge_types:
            raise ValueError(f"the share is of {given.type!r}, links must be of one of {some(graph.edge_types)}")
        inputs = EdgeInputs(InputIds(given.ids), ends_of(graph, given.type), label, time)
        return given.type, inputs, len(given.ids), {"largest": given.largest}
    edge_type, index = named_links(graph, given)
    if index is not None or isinstance(graph, Graph):
        src, dst = check_links(graph, edge_type, index)
        return edge_type, Links(torch.arange(src.numel(), device="cpu"), src, dst, label, time), src.numel(), {}
    check_alone(graph, edge_type, None)
    num_edges = graph.num_edges(edge_type)
    if num_edges == 0:
        raise ValueError("edge_label_index is empty: no links to start from")
    return edge_type, EdgeInputs(InputIds(_AllEdges(num_edges)), ends_of(graph, edge_type), label, time), num_edges, {}


class _AllEdges:
    """All edges of a type: the i-th has id i."""

    def __init__(self, num_edges: int) -> None:
        self._num_edges = num_edges

    def __len__(self) -> int:
        return self._num_edges

    def __getitem__(self, chosen: Tensor) -> Tensor:
        return chosen


def _is_edge_type(given: Sequence[Any]) -> bool:
    return len(given) == 3 and all(isinstance(name, str) for name in given)


def ends_of(graph: AnyGraph, edge_type: EdgeType) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From edge ids to the edges' ends."""
    if not isinstance(graph, Graph):
        parted = graph
        return lambda ids: parted.edge_ends(ids, edge_type)
    src, dst = edge_index_of(graph, edge_type)
    return lambda ids: (src[ids], dst[ids])


def named_links(graph: AnyGraph, given: Any) -> tuple[EdgeType, Tensor | None]:
    """The edge type and the links, if any, that a user's `edge_label_index` names."""
    edge_type, index = None, given
    if isinstance(given, (tuple, list)):
        if _is_edge_type(given):
            edge_type, index = tuple(given), None
        elif len(given) == 2 and isinstance(given[0], (tuple, list)) and _is_edge_type(given[0]):
            edge_type, index = tuple(given[0]), given[1]
    if edge_type is None:
        if len(graph.edge_types) != 1:
            raise ValueError(
                "edge_label_index must name an edge type, as a type or (type, links), for heterogeneous data, one of "
                f"{some(graph.edge_types)}"
            )
        edge_type = graph.edge_types[0]
    graph.num_edges(edge_type)  # ValueError where there is no such type
    return edge_type, None if index is None else as_links(index, "edge_label_index")


def check_links(graph: AnyGraph, edge_type: EdgeType, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ends (int64) of links, all edges by default; ValueError where there are none, or some are no nodes."""
    if index is None:
        assert isinstance(graph, Graph)
        index = edge_index_of(graph, edge_type)
    if index.shape[1] == 0:
        raise ValueError("edge_label_index is empty: no links to start from")
    for end, node_type in zip(index, (edge_type[0], edge_type[2]), strict=True):
        bound = graph.num_nodes(node_type)
        if not 0 <= int(end.min()) <= int(end.max()) < bound:
            raise ValueError(f"edge_label_index must be in [0, {bound}), got {int(end.min())} to {int(end.max())}")
    src, dst = index.long().cpu()
    return src, dst


def edge_index_of(graph: Graph, edge_type: EdgeType) -> Tensor:
    """All edges of a type, in the order the user gave them, int64 [2, num_edges], on the host."""
    return graph.edge_index(edge_type).cpu()
