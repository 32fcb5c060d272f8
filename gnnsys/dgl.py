"""DGL's names on our kernels: `NeighborSampler` and `DataLoader` that yield (input_nodes, output_nodes, blocks).

A DGL user changes the import and keeps graph, model and loop:

    from gnnsys.dgl import DataLoader, NeighborSampler

The sampler is a `dgl.dataloading.BlockSampler`, so DGL's own DataLoader and `as_edge_prediction_sampler` take it too;
with our DataLoader, sampling and prefetching run ahead in threads. docs/loaders.md lists what differs from DGL.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import dgl
    from dgl.utils import extract_edge_subframes, extract_node_subframes_for_block, set_new_frames
except ImportError as error:
    raise ImportError("gnnsys.dgl is the face for DGL users and needs it: pip install dgl") from error

from gnnsys.graph import EDGE, NODE, EdgeType, Graph, NodeType, from_dgl
from gnnsys.loader import Batch, NeighborLoader
from gnnsys.sampling import Block, SampleKey
from gnnsys.sampling import NeighborSampler as _NeighborSampler

__all__ = ["DataLoader", "MultiLayerFullNeighborSampler", "MultiLayerNeighborSampler", "NeighborSampler"]

Names = list[str] | Mapping[Any, list[str]] | None
_MASK = "__mask_weight__"


class NeighborSampler(dgl.dataloading.BlockSampler):
    """`dgl.dataloading.NeighborSampler`, argument by argument; `fanouts[i]` belongs to the i-th layer.

    What is drawn for a node depends on (seed, epoch, batch, hop, edge type, node). Called on its own, a sampler takes
    its seed from torch's generator, so `torch.manual_seed` repeats a run.
    """

    def __init__(
        self,
        fanouts: Sequence[int | Mapping[Any, int]],
        edge_dir: str = "in",
        prob: str | None = None,
        mask: str | None = None,
        replace: bool = False,
        prefetch_node_feats: Names = None,
        prefetch_labels: Names = None,
        prefetch_edge_feats: Names = None,
        output_device: Any = None,
        fused: bool = True,
    ) -> None:
        super().__init__(prefetch_node_feats, prefetch_labels, prefetch_edge_feats, output_device)
        if edge_dir != "in":
            raise ValueError(f"edge_dir must be 'in', got {edge_dir!r}: sample from dgl.reverse(g) instead")
        if prob is not None and mask is not None:
            raise ValueError("prob and mask exclude each other: multiply the probabilities by the mask")
        self.fanouts = list(fanouts)
        self.replace = replace
        self.fused = fused  # accepted for DGL's sake: ours always is
        self._prob = prob
        self._mask = mask
        self._structures: weakref.WeakKeyDictionary[Any, _Structure] = weakref.WeakKeyDictionary()

    def structure(self, g: Any) -> _Structure:
        """Our view of a DGL graph, made once and again when its edges or their probabilities were replaced."""
        known = self._structures.get(g)
        if known is None or not known.is_current(g):
            self._structures[g] = _Structure(g, self.fanouts, self.replace, self._prob, self._mask)
        return self._structures[g]

    def sample_blocks(self, g: Any, seed_nodes: Any, exclude_eids: Any = None) -> tuple[Any, Any, list[Any]]:
        structure = self.structure(g)
        key = SampleKey(int(torch.empty((), dtype=torch.int64).random_()))
        sample = structure.sampler.sample(
            structure.by_type(seed_nodes), key=key, exclude=structure.positions(exclude_eids)
        )
        blocks = structure.to_dgl(sample.blocks, sample.node)
        return blocks[0].srcdata[dgl.NID], seed_nodes, blocks


MultiLayerNeighborSampler = NeighborSampler


class MultiLayerFullNeighborSampler(NeighborSampler):
    """All neighbours, `num_layers` times."""

    def __init__(self, num_layers: int, **kwargs: Any) -> None:
        super().__init__([-1] * num_layers, **kwargs)


class DataLoader:
    """`dgl.dataloading.DataLoader` for node classification: batches of `indices` with their blocks, made ahead.

    `num_workers` are threads (0 means one) that outlive an epoch; batches arrive in the same order and with the same
    content whatever their number. With `use_ddp` each rank takes its share of `indices`, the same number of batches on
    every rank.
    `state_dict` and `load_state_dict` resume in mid-epoch.
    """

    def __init__(
        self,
        graph: Any,
        indices: Any,
        graph_sampler: NeighborSampler,
        device: Any = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        use_prefetch_thread: bool | None = None,
        use_alternate_streams: bool | None = None,
        pin_prefetcher: bool | None = None,
        use_uva: bool = False,
        *,
        num_workers: int = 0,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        prefetch: int = 2,
        seed: int | None = None,
    ) -> None:
        if not isinstance(graph_sampler, NeighborSampler):
            raise ValueError(
                f"graph_sampler must be a gnnsys.dgl.NeighborSampler, got {type(graph_sampler).__name__}: "
                "use dgl.dataloading.DataLoader for other samplers"
            )
        if use_uva:
            raise ValueError("use_uva is not supported: graph and features stay in host memory, leave it False")
        structure = graph_sampler.structure(graph)
        node_type, nodes = structure.one_type(indices)
        if use_ddp:
            nodes = _share(nodes, shuffle, ddp_seed)
        self.graph = graph
        self.graph_sampler = graph_sampler
        self.device = torch.device(device) if device is not None else None
        self._loader = NeighborLoader(
            structure.with_rows(graph_sampler.prefetch_node_feats),
            structure.num_neighbors,
            input_nodes=(node_type, nodes),
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=torch.initial_seed() if seed is None else seed,
            replace=graph_sampler.replace,
            weight_attr=structure.weight,
            expand="frontier",
            transform=_Blocks(structure, graph_sampler),  # type: ignore[arg-type]  # the last stage changes the type
            num_threads=max(1, num_workers),
            prefetch=prefetch,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Any, Any, list[Any]]]:
        triple: Any  # what _Blocks made of the loader's batch
        for triple in self._loader:
            yield triple if self.device is None else _to_device(triple, self.device)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def close(self) -> None:
        self._loader.close()


class _Structure:
    """A DGL graph as our sampler sees it, and the way back to DGL's blocks."""

    def __init__(self, g: Any, fanouts: list[Any], replace: bool, prob: str | None, mask: str | None) -> None:
        whole = from_dgl(g)
        self._g = weakref.ref(g)
        self._is_plain = whole.is_homogeneous
        self._whole = whole
        self._drawn_by = prob or mask
        self._made_from = self._origin(g)
        self.weight = prob
        weights: dict[EdgeType, dict[str, Tensor]] = {}
        if mask is not None:
            self.weight = _MASK
            weights = {t: {_MASK: rows[mask].float()} for t, rows in whole.edge_data.items() if mask in rows}
        elif prob is not None:
            weights = {t: {prob: rows[prob]} for t, rows in whole.edge_data.items() if prob in rows}
        self.graph = Graph(self._num_nodes, {t: whole.csc(t) for t in whole.edge_types}, None, weights)
        self.num_neighbors = self._hops(fanouts)
        self.sampler = _NeighborSampler(
            self.graph, self.num_neighbors, replace=replace, weight=self.weight, expand="frontier"
        )
        self._position_of: dict[EdgeType, Tensor] = {}

    def _origin(self, g: Any) -> list[Any]:
        """What this view was made from: DGL replaces its graph index when edges are added or removed."""
        weights = [g.edges[t].data.get(self._drawn_by) for t in g.canonical_etypes] if self._drawn_by else []
        return [g._graph, *weights]

    def is_current(self, g: Any) -> bool:
        now = self._origin(g)
        return len(now) == len(self._made_from) and all(a is b for a, b in zip(now, self._made_from))

    @property
    def _num_nodes(self) -> dict[NodeType, int]:
        return {t: self._whole.num_nodes(t) for t in self._whole.node_types}

    def _hops(self, fanouts: list[Any]) -> dict[EdgeType, list[int]]:
        """DGL lists fanouts by layer, the outermost hop first; hops run the other way."""
        g = self._g()
        assert g is not None
        hops: dict[EdgeType, list[int]] = {t: [] for t in self._whole.edge_types}
        for fanout in reversed(fanouts):
            if isinstance(fanout, Mapping):
                named = {EDGE if self._is_plain else g.to_canonical_etype(t): int(k) for t, k in fanout.items()}
                for t in hops:
                    hops[t].append(named.get(t, 0))
            else:
                for t in hops:
                    hops[t].append(int(fanout))
        return hops

    def by_type(self, nodes: Any) -> dict[NodeType, Tensor]:
        if isinstance(nodes, Mapping):
            return {NODE if self._is_plain else t: torch.as_tensor(ids) for t, ids in nodes.items()}
        if len(self._whole.node_types) != 1:
            raise ValueError(f"seed nodes must be a dict by node type, the graph has {self._whole.node_types}")
        return {self._whole.node_types[0]: torch.as_tensor(nodes)}

    def one_type(self, indices: Any) -> tuple[NodeType, Tensor]:
        chosen = self.by_type(indices)
        if len(chosen) != 1:
            raise ValueError(f"indices must be of one node type, got {list(chosen)}: use one DataLoader for each")
        return next(iter(chosen.items()))

    def with_rows(self, names: Names) -> Graph:
        """The graph that the loader joins: only the features that are to be prefetched."""
        rows = {
            t: {n: self._whole.node_data[t][n] for n in _names(names, "_N" if self._is_plain else t)}
            for t in self._whole.node_types
        }
        csc = {t: self.graph.csc(t) for t in self.graph.edge_types}
        return Graph(self._num_nodes, csc, rows, self.graph.edge_data)

    def positions(self, exclude_eids: Any) -> dict[EdgeType, Tensor] | None:
        """CSC positions of edges given by DGL's edge ids."""
        if exclude_eids is None:
            return None
        g = self._g()
        assert g is not None
        if not isinstance(exclude_eids, Mapping):
            exclude_eids = {g.canonical_etypes[0]: exclude_eids}
        out = {}
        for t, ids in exclude_eids.items():
            ours = EDGE if self._is_plain else g.to_canonical_etype(t)
            if ours not in self._position_of:
                edge_ids = self.graph.csc(ours).edge_ids
                size = self.graph.num_edges(ours)
                order = torch.arange(size) if edge_ids is None else edge_ids.long()
                self._position_of[ours] = torch.empty(size, dtype=torch.int64).scatter_(0, order, torch.arange(size))
            ids = torch.as_tensor(ids)
            size = self._position_of[ours].numel()
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                raise ValueError(f"exclude_eids must be in [0, {size}), got {int(ids.min())} to {int(ids.max())}")
            out[ours] = self._position_of[ours][ids.long()].unique()
        return out

    def to_dgl(self, blocks: list[Block], nodes: dict[NodeType, Tensor]) -> list[Any]:
        """DGL's blocks, with ids and with the graph's features to be sliced when they are asked for."""
        g = self._g()
        if g is None:
            raise ValueError("the DGL graph that this loader samples from no longer exists: keep a reference to it")
        return [self._to_dgl(g, block, nodes) for block in blocks]

    def _to_dgl(self, g: Any, block: Block, nodes: dict[NodeType, Tensor]) -> Any:
        edges = {}
        for t in g.canonical_etypes:
            csc = block.csc[EDGE if self._is_plain else t]
            edges[t] = ("csc", (csc.indptr.to(g.idtype), csc.indices.to(g.idtype), torch.empty(0, dtype=g.idtype)))
        names = {t: NODE if self._is_plain else t for t in g.ntypes}
        made = dgl.create_block(
            edges,
            num_src_nodes={t: block.num_src[n] for t, n in names.items()},
            num_dst_nodes={t: block.num_dst[n] for t, n in names.items()},
        )
        src = [nodes[names[t]][: block.num_src[names[t]]].to(g.idtype) for t in g.ntypes]
        dst = [nodes[names[t]][: block.num_dst[names[t]]].to(g.idtype) for t in g.ntypes]
        edge_ids = []
        for t in g.canonical_etypes:
            ids = block.csc[EDGE if self._is_plain else t].edge_ids
            assert ids is not None
            edge_ids.append(ids.to(g.idtype))
        set_new_frames(
            made,
            node_frames=extract_node_subframes_for_block(g, src, dst),
            edge_frames=extract_edge_subframes(g, edge_ids),
        )
        return made


class _Blocks:
    """The last stage: from our batch to DGL's triple, prefetched features in place."""

    def __init__(self, structure: _Structure, sampler: NeighborSampler) -> None:
        self._structure = structure
        self._labels = sampler.prefetch_labels
        self._edge_feats = sampler.prefetch_edge_feats
        self._node_feats = sampler.prefetch_node_feats

    def __call__(self, batch: Batch) -> tuple[Any, Any, list[Any]]:
        plain = self._structure._is_plain
        stores = {t: batch.nodes[t] for t in self._structure.graph.node_types}
        nodes = {t: store["n_id"] for t, store in stores.items()}
        blocks = self._structure.to_dgl(batch.blocks, nodes)
        for t in blocks[0].srctypes:
            for name in _names(self._node_feats, t):
                blocks[0].srcnodes[t].data[name] = stores[NODE if plain else t][name]
        for t in blocks[-1].dsttypes:
            for name in _names(self._labels, t):
                blocks[-1].dstnodes[t].data[name] = blocks[-1].dstnodes[t].data[name]  # sliced here, in the thread
        for block in blocks:
            for edge_type in block.canonical_etypes:
                for name in _names(self._edge_feats, edge_type):
                    block.edges[edge_type].data[name] = block.edges[edge_type].data[name]
        output_nodes = blocks[-1].dstdata[dgl.NID]
        if isinstance(output_nodes, Mapping):  # of the seeds' type alone, as DGL has it
            output_nodes = {t: ids for t, ids in output_nodes.items() if t == batch.input_type}
        return blocks[0].srcdata[dgl.NID], output_nodes, blocks


def _names(names: Names, key: Any) -> list[str]:
    """Names for one type: DGL takes a list for the only type, or a dict by type (or by the edge type's middle name)."""
    if names is None:
        return []
    if isinstance(names, Mapping):
        found = names.get(key)
        if found is None and isinstance(key, tuple):
            found = names.get(key[1])
        return list(found or [])
    return list(names)


def _share(nodes: Tensor, shuffle: bool, seed: int) -> Tensor:
    """This rank's share: every rank the same number, by repeating the first few as DistributedSampler does."""
    if not torch.distributed.is_initialized():
        raise ValueError("use_ddp needs a process group: call torch.distributed.init_process_group first")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if shuffle:
        nodes = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(seed))]
    missing = -nodes.numel() % world
    return torch.cat([nodes, nodes.repeat(-(-missing // max(1, nodes.numel())))[:missing]])[rank::world]


def _to_device(triple: tuple[Any, Any, list[Any]], device: torch.device) -> tuple[Any, Any, list[Any]]:
    def move(value: Any) -> Any:
        return {k: v.to(device) for k, v in value.items()} if isinstance(value, Mapping) else value.to(device)

    input_nodes, output_nodes, blocks = triple
    return move(input_nodes), move(output_nodes), [block.to(device) for block in blocks]
