"""LinkNeighborLoader: mini-batches of links with the sampled neighbourhoods of their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EDGE, EdgeType, Graph
from gnnsys.loader.batch import Batch
from gnnsys.loader.join import Sampled
from gnnsys.loader.links import Links, LinkSeeder, check_labels, supervision_edges
from gnnsys.loader.loader import Loader
from gnnsys.loader.negatives import NegativeSampling, negative_stream
from gnnsys.loader.neighbor import NumNeighbors, check_times, make_sampler
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import reverse_of, shape_subgraph
from gnnsys.sampling import NeighborSampler, SampleKey

InputLinks: TypeAlias = Tensor | EdgeType | tuple[EdgeType, Tensor | None] | None


class LinkNeighborLoader(Loader):
    """Batches of `batch_size` links, with `num_neighbors[h]` neighbours of every node at hop h around their ends.

    `edge_label_index`: [2, num_links], an edge type, or (edge type, [2, num_links]); None: all edges. With
    `neg_sampling` negatives are drawn beside them. A batch's own links are kept out of its message passing
    (`exclude_supervision`), as are their reverses: in a homogeneous graph the same edges the other way round, in a
    heterogeneous one those of `reverse_edge_type` (by default the type named `rev_...`, or its counterpart).

    >>> loader = LinkNeighborLoader(graph, [10, 5], edge_label_index=train_links, neg_sampling="binary", batch_size=512)
    >>> for batch in loader:
    ...     src, dst = model(batch.x, batch.edge_index)[batch.edge_label_index]
    """

    def __init__(
        self,
        graph: Graph,
        num_neighbors: NumNeighbors,
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
        transform: Callable[[Batch], Batch] | None = None,
        num_threads: int = 1,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        across_epochs: bool = True,
    ) -> None:
        if (edge_label_time is None) != (time_attr is None):
            raise ValueError("edge_label_time and time_attr go together: give both, or neither")
        negatives = NegativeSampling.cast(neg_sampling)
        edge_type, (src, dst) = resolve_links(graph, edge_label_index)
        links = Links(torch.arange(src.numel()), src, dst, check_labels(negatives, edge_label), edge_label_time)
        check_times("edge_label_time", edge_label_time)
        for name, values in (("edge_label", edge_label), ("edge_label_time", edge_label_time)):
            if values is not None and values.shape[0] != src.numel():
                raise ValueError(f"{name} must have one entry per link, {src.numel()}, got {values.shape[0]}")
        disjoint = disjoint or time_attr is not None
        sampler = make_sampler(
            graph,
            num_neighbors,
            subgraph_type,
            replace=replace,
            disjoint=disjoint,
            weight=weight_attr,
            time=time_attr,
            temporal_strategy=temporal_strategy,
            expand=expand,
        )
        seeder = make_seeder(graph, edge_type, negatives, disjoint, time_attr)
        if graph.is_homogeneous:
            reverse_edge_type = EDGE
        elif reverse_edge_type is None:
            reverse_edge_type = reverse_of(edge_type, graph)
        else:
            graph.csc(reverse_edge_type)  # ValueError where there is no such type
        exclude = (edge_type, reverse_edge_type) if exclude_supervision else None
        sample = _SampleLinks(graph, sampler, seeder, subgraph_type, edge_type, links, exclude, seed)
        super().__init__(
            graph,
            Schedule(src.numel(), batch_size, shuffle, drop_last, seed),
            sample,
            transform=transform,
            num_threads=num_threads,
            prefetch=prefetch,
            device=device,
            across_epochs=across_epochs,
        )


class _SampleLinks:
    """The sample stage: from chosen links to the structure around their ends."""

    def __init__(
        self,
        graph: Graph,
        sampler: NeighborSampler,
        seeder: LinkSeeder,
        subgraph_type: str,
        edge_type: EdgeType,
        links: Links,
        exclude: tuple[EdgeType, EdgeType | None] | None,
        seed: int,
    ) -> None:
        self._graph = graph
        self._sampler = sampler
        self._seeder = seeder
        self._subgraph_type = subgraph_type
        self._edge_type = edge_type
        self._links = links
        self._exclude = exclude
        self._seed = seed

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        links = self._links.take(chosen)
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
        return Sampled(sample, self._edge_type, seeds.by_type(self._edge_type, links.input_id))


def resolve_links(graph: Graph, edge_label_index: InputLinks) -> tuple[EdgeType, tuple[Tensor, Tensor]]:
    """The edge type and the ends (int64) of the links that a user's `edge_label_index` stands for."""
    edge_type: EdgeType
    index: Tensor | None
    if edge_label_index is None or isinstance(edge_label_index, Tensor):
        if len(graph.edge_types) != 1:
            raise ValueError(f"edge_label_index must name an edge type, one of {graph.edge_types}")
        edge_type, index = graph.edge_types[0], edge_label_index
    elif len(edge_label_index) == 3:
        edge_type, index = edge_label_index, None
    else:
        edge_type, index = edge_label_index
    csc = graph.csc(edge_type)
    if index is None:
        index = edge_index_of(graph, edge_type)
    if index.dim() != 2 or index.shape[0] != 2 or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"edge_label_index must be integers of shape [2, num_links], got {tuple(index.shape)}")
    if index.shape[1] == 0:
        raise ValueError("edge_label_index is empty: no links to start from")
    for end, bound in zip(index, (csc.num_src, csc.num_dst)):
        if not 0 <= int(end.min()) <= int(end.max()) < bound:
            raise ValueError(f"edge_label_index must be in [0, {bound}), got {int(end.min())} to {int(end.max())}")
    src, dst = index.long()
    return edge_type, (src, dst)


def edge_index_of(graph: Graph, edge_type: EdgeType) -> Tensor:
    """All edges of a type, in the order the user gave them, int64 [2, num_edges]."""
    csc = graph.csc(edge_type)
    by_position = torch.stack([csc.indices.long(), csc.dst()])
    if csc.edge_ids is None:
        return by_position
    out = torch.empty_like(by_position)
    out[:, csc.edge_ids.long()] = by_position
    return out


def make_seeder(
    graph: Graph, edge_type: EdgeType, negatives: NegativeSampling | None, disjoint: bool, time_attr: str | None
) -> LinkSeeder:
    src, _, dst = edge_type
    src_time, dst_time = (graph.node_data[t].get(time_attr) if time_attr else None for t in (src, dst))
    sizes = graph.num_nodes(src), graph.num_nodes(dst)
    return LinkSeeder(sizes, edge_type, negatives, disjoint, (src_time, dst_time))
