"""NeighborSampler: a PyG `BaseSampler` on our kernels, for our loaders and for PyG's own (`neighbor_sampler=`)."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors, SubgraphType

from gnnsys.graph import EDGE, NODE, EdgeType, Graph, NodeType
from gnnsys.loader import (
    Exclusion,
    Links,
    LinkSeeder,
    LinkSeeds,
    induced,
    knows_words,
    make_seeder,
    negative_stream,
    reverse_of,
    words_of,
)
from gnnsys.loader import NegativeSampling as Negatives
from gnnsys.pyg.snapshot import Snapshot
from gnnsys.pyg.structure import PygStructure, read_structure
from gnnsys.sampling import AnyGraph, Sample, SampleKey, idle_hop, seeds_alone
from gnnsys.sampling import NeighborSampler as Sampler

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput
Values: TypeAlias = Tensor | dict[Any, Tensor] | None
_log = logging.getLogger(__name__)

_OLD_LOADER = (
    "this class is torch_geometric.sampler.NeighborSampler. For torch_geometric.loader.NeighborSampler, a loader that "
    "PyG has deprecated, write gnnsys.pyg.NeighborLoader(Data(edge_index=edge_index, num_nodes=num_nodes), "
    "num_neighbors=sizes, input_nodes=node_idx)"
)
_OF_LOADERS = {
    **dict.fromkeys(words_of(torch.utils.data.DataLoader.__init__), "give it to the loader, which takes this sampler"),
    **dict.fromkeys(("edge_index", "sizes", "node_idx", "num_nodes", "return_e_id"), _OLD_LOADER),
}


@functools.cache
def _warn_once(message: str) -> None:
    """PyG takes hops without neighbours, so we take them too."""
    _log.warning("%s", message)


class _Here(threading.local):
    """Values of one thread. A copy of a sampler starts without them."""

    def __reduce__(self) -> Any:
        return _Here, ()


class NeighborSampler(BaseSampler):
    """`torch_geometric.sampler.NeighborSampler`, which loaders take as `neighbor_sampler=`. The deprecated loader
    `torch_geometric.loader.NeighborSampler` is another class: `gnnsys.pyg.NeighborLoader` takes its place.

    Takes PyG's arguments and returns PyG's outputs, whose edge ids are positions in the user's `edge_index`.

    Everything random in a call follows from `key`. Without one, the key is drawn from torch's global generator, so
    `torch.manual_seed` repeats it. With `exclude_supervision=True`, `sample_from_edges` does not sample the given
    links, nor their reverses, as neighbours; by default it does, as PyG's sampler. Calls are thread-safe. A subclass
    may override `sample_from_nodes` and `sample_from_edges` with PyG's signature: our loaders call them as user code,
    one call at a time.

    Edges, times and weights are copied when the sampler is made. Our loaders refuse a sampler if its data has
    changed since; PyG's own loaders do not check.
    """

    @knows_words(instead=_OF_LOADERS)
    def __init__(
        self,
        data: Any,
        num_neighbors: NumNeighbors | list[int] | dict[EdgeType, list[int]],
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: str = "forward",
        *,
        exclude_supervision: bool = False,
    ) -> None:
        if isinstance(data, Tensor) or hasattr(data, "sparse_sizes"):
            raise ValueError(f"data must be a Data, a HeteroData or a pair of stores, got edges: {_OLD_LOADER}")
        if not directed:
            subgraph_type = SubgraphType.induced
            warnings.warn("'directed' is deprecated, use subgraph_type='induced' instead", stacklevel=2)
        if sample_direction not in ("forward", "backward"):
            raise ValueError(f"sample_direction must be 'forward' or 'backward', got {sample_direction!r}")
        if sample_direction == "backward":
            raise NotImplementedError(
                "sample_direction='backward' is not supported: pass the data with its edges flipped, edge_index.flip(0)"
            )
        if temporal_strategy not in ("uniform", "last"):
            raise ValueError(f"temporal_strategy must be 'uniform' or 'last', got {temporal_strategy!r}")
        if time_attr is not None and weight_attr is not None:
            raise ValueError("weight_attr does not go with time_attr: biased temporal sampling is not defined")
        self._structure: PygStructure = read_structure(data, time_attr, weight_attr, is_sorted)
        copied = [name for name in ("edge_index", time_attr, weight_attr) if name is not None]
        self._copied = Snapshot(data, copied) if isinstance(data, (Data, HeteroData)) else None
        self.subgraph_type = SubgraphType(subgraph_type)
        self.replace = replace
        self.temporal_strategy: Any = temporal_strategy
        self.weight_attr = weight_attr
        self.exclude_supervision = exclude_supervision
        self.keep_orig_edges = False
        self._disjoint = disjoint
        self._here = _Here()
        self._seeders: dict[EdgeType, tuple[NegativeSampling | None, LinkSeeder]] = {}
        self.num_neighbors = num_neighbors

    def check_current(self) -> None:
        """ValueError if the data's edges, times or weights have changed since the sampler was made of them."""
        changed = None if self._copied is None else self._copied.changed()
        if changed is not None:
            raise ValueError(
                f"{changed} has changed since this NeighborSampler was made, which samples by a copy of it: make a new "
                "NeighborSampler"
            )

    # -- attributes that PyG's sampler has -----------------------------------------------------------------------------

    @property
    def num_neighbors(self) -> NumNeighbors:
        return self._num_neighbors

    @num_neighbors.setter
    def num_neighbors(self, value: NumNeighbors | list[int] | dict[EdgeType, list[int]]) -> None:
        self._num_neighbors = value if isinstance(value, NumNeighbors) else NumNeighbors(value)
        self._sampler = self._make_sampler()
        fanouts = self._sampler.fanouts
        told = idle_hop(fanouts) or seeds_alone(fanouts)
        if told is not None:
            _warn_once(told)

    @property
    def disjoint(self) -> bool:
        return self._disjoint or self.is_temporal

    @disjoint.setter
    def disjoint(self, value: bool) -> None:
        self._disjoint = value
        self._seeders = {}
        self._sampler = self._make_sampler()

    @property
    def graph(self) -> AnyGraph:
        """The graph that is sampled from."""
        return self._structure.graph

    @property
    def is_hetero(self) -> bool:
        return self._structure.is_hetero

    @property
    def is_temporal(self) -> bool:
        return self._structure.time_attr is not None

    @property
    def node_time(self) -> Values:
        time = self._structure.node_time
        return time if self.is_hetero or time is None else time[NODE]

    @property
    def edge_time(self) -> Values:
        time = self._structure.edge_time
        return time if self.is_hetero or time is None else time[EDGE]

    @property
    def num_nodes(self) -> int | dict[NodeType, int]:
        graph = self.graph
        return {t: graph.num_nodes(t) for t in graph.node_types} if self.is_hetero else graph.num_nodes()

    @property
    def node_types(self) -> list[NodeType | None]:
        return list(self.graph.node_types) if self.is_hetero else [None]

    @property
    def edge_types(self) -> list[EdgeType | None]:
        return list(self.graph.edge_types) if self.is_hetero else [None]

    @property
    def edge_permutation(self) -> None:
        """None: `edge` in our outputs is in the user's order already."""
        return None

    def _make_sampler(self) -> Sampler:
        if self.subgraph_type == SubgraphType.induced and self.disjoint:
            raise ValueError("'disjoint' sampling not supported for neighbor sampling with `subgraph_type='induced'`")
        if self.is_hetero:
            num_neighbors = self._num_neighbors.get_values(self.graph.edge_types)
        else:
            num_neighbors = self._num_neighbors.get_values()
            if isinstance(num_neighbors, dict):
                raise ValueError("num_neighbors must be a list of numbers, one per hop, for a homogeneous graph")
        return Sampler(
            self.graph,
            num_neighbors,
            device=None if isinstance(self.graph, Graph) else "cpu",  # joined with rows on the host
            replace=self.replace,
            disjoint=self.disjoint,
            weight=self.weight_attr,
            time=self._structure.time_attr,
            temporal_strategy=self.temporal_strategy,
        )

    def options(self) -> dict[str, Any]:
        """The options that decide a sample, besides graph, seeds and key, by the names of the arguments."""
        return {
            **self._sampler.options(),
            "subgraph_type": self.subgraph_type.value,
            "exclude_supervision": self.exclude_supervision,
        }

    # -- sampling ------------------------------------------------------------------------------------------------------

    @contextmanager
    def under(self, key: SampleKey) -> Iterator[None]:
        """Inside the `with` block, calls of this thread without a key use this one.

        So a loader's key reaches a subclass whose methods have PyG's signature.
        """
        before = getattr(self._here, "key", None)
        self._here.key = key
        try:
            yield
        finally:
            self._here.key = before

    def _key(self, key: SampleKey | None) -> SampleKey:
        return key or getattr(self._here, "key", None) or draw_key()

    def sample_from_nodes(self, index: NodeSamplerInput, key: SampleKey | None = None, **kwargs: Any) -> Output:
        inputs = NodeSamplerInput.cast(index)
        node_type = inputs.input_type or NODE
        times = inputs.time
        if times is None and self.is_temporal:
            node_time = (self._structure.node_time or {}).get(node_type)
            if node_time is None:
                raise ValueError("input_time must be given: the seeds have no time of their own")
            times = node_time[inputs.node.long()]
        sample = self._sampler.sample(
            {node_type: self._ids(inputs.node)},
            key=self._key(key),
            seed_time=None if times is None else {node_type: times},
        )
        return self._finish(sample, None, (inputs.input_id, inputs.time))

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None, key: SampleKey | None = None
    ) -> Output:
        inputs = EdgeSamplerInput.cast(index)
        edge_type = inputs.input_type or EDGE
        key = self._key(key)
        links = Links(inputs.input_id, inputs.row.long(), inputs.col.long(), inputs.label, inputs.time)
        exclusion = None
        if self.exclude_supervision and edge_type in self.graph.edge_types:
            exclusion = Exclusion(self._sampler, edge_type, reverse_of(edge_type, self.graph))
        seeds = self._seeder(edge_type, neg_sampling)(links, negative_stream(key), exclusion)
        sample = self._sampler.sample(
            {t: self._ids(ids) for t, ids in seeds.seeds.items()},
            key=key,
            seed_time=seeds.seed_time,
            tree=seeds.tree,
            exclude=seeds.exclude,
        )
        if sample.tree is not None:
            sample.tree = seeds.owners(sample.tree)
        return self._finish(sample, seeds.exclude, _link_metadata(inputs, seeds))

    def prepare_links(self, edge_type: EdgeType | None, neg_sampling: NegativeSampling | None) -> None:
        """ValueError if negatives cannot be drawn: raised when the loader is made, not at the first batch."""
        self._seeder(edge_type or EDGE, neg_sampling)

    def told_negatives(
        self, edge_type: EdgeType | None, neg_sampling: NegativeSampling | None
    ) -> dict[str, Any] | None:
        """How negatives are drawn, for a loader's state."""
        return None if neg_sampling is None else self._seeder(edge_type or EDGE, neg_sampling).told_negatives

    def _seeder(self, edge_type: EdgeType, neg_sampling: NegativeSampling | None) -> LinkSeeder:
        known = self._seeders.get(edge_type)
        if known is None or known[0] is not neg_sampling:
            negatives = Negatives.cast(neg_sampling)
            seeder = make_seeder(self.graph, edge_type, negatives, self.disjoint, self._structure.time_attr)
            known = self._seeders[edge_type] = (neg_sampling, seeder)
        return known[1]

    def _ids(self, ids: Tensor) -> Tensor:
        return ids.long().contiguous()

    def _finish(self, sample: Sample, exclude: dict[EdgeType, Tensor] | None, metadata: tuple[Any, ...]) -> Output:
        """Our Sample as PyG's output, with the index dtype of the user's graph."""
        if self.subgraph_type == SubgraphType.induced:
            sample = induced(sample, self.graph, exclude)
        dtype = self._structure.index_dtype
        parts: dict[str, Any] = {
            "node": {t: v.to(dtype) for t, v in sample.node.items()},
            "row": {t: v.to(dtype) for t, v in sample.row.items()},
            "col": {t: v.to(dtype) for t, v in sample.col.items()},
            "edge": sample.edge,
            "batch": sample.tree,
            "num_sampled_nodes": sample.num_sampled_nodes or None,
            "num_sampled_edges": sample.num_sampled_edges or None,
        }
        output: Output
        if self.is_hetero:
            output = HeteroSamplerOutput(**parts, metadata=metadata)
        else:
            only = {name: None if v is None else next(iter(v.values())) for name, v in parts.items()}
            output = SamplerOutput(**only, metadata=metadata)
        if self.subgraph_type == SubgraphType.bidirectional:
            output = output.to_bidirectional(keep_orig_edges=self.keep_orig_edges)
        return output


def draw_key(random: torch.Generator | None = None) -> SampleKey:
    """A key drawn from torch's global generator, or from `random`."""
    return SampleKey(draw_seed(random), 0, 0)


def draw_seed(random: torch.Generator | None = None) -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=random))


def _link_metadata(inputs: EdgeSamplerInput, seeds: LinkSeeds) -> tuple[Any, ...]:
    """The metadata that PyG's LinkLoader expects, by position."""
    names = ("edge_label_index", "edge_label", "edge_label_time")
    if "src_index" in seeds.values:
        names = ("src_index", "dst_pos_index", "dst_neg_index", "seed_time")  # type: ignore[assignment]
    return (inputs.input_id, *(seeds.values.get(name) for name in names))
