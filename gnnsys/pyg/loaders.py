"""PyG's NeighborLoader and LinkNeighborLoader, sampled by our kernels and run by our pipeline.

They are subclasses of PyG's loaders, so `isinstance` and code that reads a loader's attributes keep working. Three
things differ: `NeighborSampler` samples, `DataJoin` gathers, and workers are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput
from torch_geometric.sampler.base import SubgraphType

from gnnsys.comm import use_context
from gnnsys.graph import EdgeType, check_rows_of_inputs
from gnnsys.loader import Names, as_values, knows_words
from gnnsys.pyg.arguments import (
    INSTEAD,
    PYG_WORDS,
    check_exclusion,
    check_kwargs,
    check_links,
    check_nodes,
    checked_weights,
    complete_links,
    complete_nodes,
    suggest_exclusion,
    warn_of_unfit_features,
)
from gnnsys.pyg.join import describe
from gnnsys.pyg.parts import LinkInputs, resolve_input_nodes, resolve_links
from gnnsys.pyg.sampler import NeighborSampler
from gnnsys.pyg.stores import graph_of, stores
from gnnsys.pyg.threaded_loader import Output, ThreadedLoader
from gnnsys.sampling import SampleKey


class NeighborLoader(ThreadedLoader, PygNeighborLoader):
    """`torch_geometric.loader.NeighborLoader` without pyg-lib or torch-sparse; its documentation holds.

    `data` may also be what `gnnsys.open` returns; `input_nodes` are then `graph.from_original(ids)`, a mask's name, or
    this rank's share (`gnnsys.split`), which has the same number of batches on every rank. `seed` fixes what each
    epoch samples, independently of torch's generators; the order of the seeds is still that of `sampler` or `shuffle`.
    On parts, `fetch` names the arrays that batches have, and floats travel between machines as `wire_dtype`.
    """

    @knows_words(PYG_WORDS, instead=INSTEAD)
    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: BaseSampler | None = None,
        directed: bool = True,
        *,
        seed: int | None = None,
        fetch: Names | None = None,
        wire_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        check_kwargs(kwargs)
        graph, input_time = graph_of(data), as_values(input_time, "input_time")
        data = data if graph is None else stores(graph)
        warn_of_unfit_features(data)
        if input_time is not None and time_attr is None:
            raise ValueError(
                "Received conflicting 'input_time' and 'time_attr' arguments: 'input_time' is set while 'time_attr' "
                "is not set."
            )
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data,
                num_neighbors,
                subgraph_type=subgraph_type,
                replace=replace,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                directed=directed,
            )
        elif isinstance(neighbor_sampler, NeighborSampler):
            neighbor_sampler.check_current()
        own_values = {"input_time": input_time}
        self._prepare(data, neighbor_sampler, seed, kwargs, input_nodes, own_values, fetch, wire_dtype)
        if graph is not None:
            check_rows_of_inputs(graph, input_nodes, **own_values)
            input_nodes = resolve_input_nodes(graph, input_nodes)
        input_nodes = complete_nodes(data, input_nodes, neighbor_sampler)
        with torch.device("cpu"):  # PyG leaves what it makes to torch's default device
            PygNeighborLoader.__init__(
                self,
                data,
                num_neighbors,
                input_nodes=input_nodes,
                input_time=input_time,
                transform=transform,
                transform_sampler_output=transform_sampler_output,
                filter_per_worker=filter_per_worker,
                neighbor_sampler=neighbor_sampler,
                time_attr=time_attr,
                **kwargs,
            )
        self._untie()
        check_nodes(self.input_data, data, neighbor_sampler, may_be_empty=self._largest is not None)

    def _take(self, index: Tensor) -> NodeSamplerInput:
        if not self._is_taken_over(index):
            return self.input_data[index]
        return NodeSamplerInput(index, self.input_ids(index), None, self.input_data.input_type)

    def __call__(self, index: Any) -> Any:
        """The batch of the given inputs. It is of no epoch, so messages for it name the loader alone."""
        with use_context(self.context):
            return super().__call__(index)

    def sample(self, index: Any, key: SampleKey | None = None) -> Output:
        inputs = self._take(self._checked(index))
        return self._sample_by("sample_from_nodes", inputs, key=key)

    def _describe(self, batch: Any, out: Output) -> None:
        describe(batch, out)
        store = batch if isinstance(out, SamplerOutput) else batch[self.input_data.input_type]
        store.input_id, store.seed_time = out.metadata[:2]
        store.batch_size = out.metadata[0].numel()


class LinkNeighborLoader(ThreadedLoader, PygLinkNeighborLoader):
    """`torch_geometric.loader.LinkNeighborLoader` without pyg-lib or torch-sparse; its documentation holds.

    As in PyG, messages also pass over a batch's own links where these are edges of the graph. With
    `exclude_supervision=True` neither they nor their reverses are sampled. `seed` is as in `NeighborLoader`, and also
    fixes the negatives. `edge_label_weight`, which PyG has not, is what each link counts, finite floats >= 0
    [num_links]: batches have it beside `edge_label`, with ones for negatives; of triplets there is one for each of
    `dst_pos_index`.
    """

    @knows_words(PYG_WORDS, instead=INSTEAD)
    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: NegativeSampling | None = None,
        neg_sampling_ratio: int | float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: BaseSampler | None = None,
        directed: bool = True,
        *,
        seed: int | None = None,
        fetch: Names | None = None,
        wire_dtype: torch.dtype | None = None,
        exclude_supervision: bool | None = None,
        edge_label_weight: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        check_kwargs(kwargs)
        graph, given, links = graph_of(data), edge_label_index, None
        edge_label = as_values(edge_label, "edge_label")
        edge_label_time = as_values(edge_label_time, "edge_label_time")
        data = data if graph is None else stores(graph)
        warn_of_unfit_features(data)
        if (edge_label_time is None) != (time_attr is None):
            there, missing = "time_attr", "edge_label_time"
            if edge_label_time is not None:
                there, missing = missing, there
            raise ValueError(
                f"Received conflicting 'edge_label_time' and 'time_attr' arguments: {missing!r} is not set while "
                f"{there!r} is set: both must be provided for temporal sampling."
            )
        check_exclusion(exclude_supervision, neighbor_sampler)
        if neighbor_sampler is None:
            if exclude_supervision is None:
                suggest_exclusion()
            neighbor_sampler = NeighborSampler(
                data,
                num_neighbors,
                subgraph_type=subgraph_type,
                replace=replace,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                directed=directed,
                exclude_supervision=bool(exclude_supervision),
            )
        elif isinstance(neighbor_sampler, NeighborSampler):
            neighbor_sampler.check_current()
        if edge_label_weight is not None and kwargs.get("input_id") is not None:
            raise ValueError("edge_label_weight is by position among the links: leave input_id away")
        own_values = {
            "edge_label": edge_label,
            "edge_label_time": edge_label_time,
            "edge_label_weight": edge_label_weight,
        }
        self._prepare(data, neighbor_sampler, seed, kwargs, given, own_values, fetch, wire_dtype)
        if graph is not None:
            check_rows_of_inputs(graph, given, **own_values)
            edge_label_index, links = resolve_links(graph, given)
            if links is not None and self.ranks.inputs is not None:
                self.ranks.inputs = links.ids
        else:
            edge_label_index = complete_links(data, given, neighbor_sampler)
        with torch.device("cpu"):  # PyG leaves what it makes to torch's default device
            PygLinkNeighborLoader.__init__(
                self,
                data,
                num_neighbors,
                edge_label_index=edge_label_index,
                edge_label=edge_label,
                edge_label_time=edge_label_time,
                neg_sampling=neg_sampling,
                neg_sampling_ratio=neg_sampling_ratio,
                time_attr=time_attr,
                transform=transform,
                transform_sampler_output=transform_sampler_output,
                filter_per_worker=filter_per_worker,
                neighbor_sampler=neighbor_sampler,
                **kwargs,
            )
        self._untie()
        if links is None:
            check_links(self.input_data, data, neighbor_sampler, may_be_empty=self._largest is not None)
        else:
            links.label, links.time = self.input_data.label, self.input_data.time
            links.check()
            self.input_data, self.edge_label_index = links, given
        self.input_data.weight = checked_weights(edge_label_weight, len(self.dataset))  # type: ignore[arg-type]
        if isinstance(neighbor_sampler, NeighborSampler):
            neighbor_sampler.prepare_links(self.input_data.input_type, self.neg_sampling)

    def _take(self, index: Tensor) -> EdgeSamplerInput:
        if not self._is_taken_over(index) or isinstance(self.input_data, LinkInputs):
            return self.input_data[index]
        edge_type, data = self.input_data.input_type, self.data
        edge_index = data.edge_index if edge_type is None else data[edge_type].edge_index
        row, col = edge_index[:, self.input_ids(index)]
        return EdgeSamplerInput(index, row, col, None, None, edge_type)

    def __call__(self, index: Any) -> Any:
        """The batch of the given inputs. It is of no epoch, so messages for it name the loader alone."""
        with use_context(self.context):
            return super().__call__(index)

    def sample(self, index: Any, key: SampleKey | None = None) -> Output:
        inputs = self._take(self._checked(index))
        return self._sample_by("sample_from_edges", inputs, key=key, neg_sampling=self.neg_sampling)

    def _describe(self, batch: Any, out: Output) -> None:
        describe(batch, out)
        edge_type = self.input_data.input_type
        links, src, dst = (batch, batch, batch) if edge_type is None else _stores(batch, edge_type)
        weight = self.input_data.weight
        if weight is not None:
            weight = weight[out.metadata[0].long()]
            is_triplet = self.neg_sampling is not None and self.neg_sampling.is_triplet()
            num_negatives = 0 if is_triplet else out.metadata[1].shape[1] - weight.numel()
            links.edge_label_weight = torch.cat([weight, weight.new_ones(num_negatives)])
        if self.neg_sampling is None or self.neg_sampling.is_binary():
            links.input_id, links.edge_label_index, links.edge_label, links.edge_label_time = out.metadata
            return
        links.input_id, src.src_index, dst.dst_pos_index, dst.dst_neg_index, src.seed_time = out.metadata
        dst.seed_time = src.seed_time if "seed_time" in src else None
        for name in ("edge_label_index", "edge_label_time"):  # copied from the user's data: wrong for this batch
            if name in links:
                del links[name]


def _stores(batch: HeteroData, edge_type: EdgeType) -> tuple[Any, Any, Any]:
    return batch[edge_type], batch[edge_type[0]], batch[edge_type[-1]]
