"""DataLoader: DGL's mini-batches of seeds with their blocks, made ahead by our pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import dgl
import torch
from torch import Tensor

from gnnsys.dgl.parts import PartsStructure
from gnnsys.dgl.sampler import NeighborSampler
from gnnsys.dgl.structure import DglStructure
from gnnsys.dgl.subgraphs import InducedSampler
from gnnsys.graph import chosen_ids
from gnnsys.loader import (
    Batch,
    LoadingWork,
    NeighborLoader,
    SubgraphLoader,
    check_seed,
    default_num_threads,
    knows_words,
    resolve,
    words_of,
)
from gnnsys.pipeline import OfThisProcess
from gnnsys.sampling import DistGraph
from gnnsys.seeds import Share

_INSTEAD = {
    **dict.fromkeys(
        words_of(torch.utils.data.DataLoader.__init__),
        "it is torch's, for worker processes and samplers that are not used here: leave it away",
    ),
    "prefetch_factor": "write prefetch, the number of finished batches that may wait",
    "num_threads": "write num_workers, which is the number of threads",
    "gpu_cache": "features stay in host memory: leave it away",
}


class DataLoader:
    """`dgl.dataloading.DataLoader` for node classification: batches of `indices` with their blocks, made ahead.

    `num_workers`: threads (0 means one), which live on between epochs. Their number changes neither the order nor the
    content of batches. With `use_ddp` each rank takes its share of `indices`, with the same number of batches on every
    rank. `state_dict` and `load_state_dict` resume in mid-epoch.

    With a sampler of subgraphs (`ClusterGCNSampler`, `SAINTSampler`, `ShaDowKHopSampler`) batches are what it samples.

    Batches go to `device`; without one to the sampler's `output_device`; without either they stay on the host.

    `graph`: DGL's, or what `gnnsys.open` returns. With the latter, ids are global ids, blocks have only the prefetched
    features, and `indices` may be this rank's share (`gnnsys.split`) or the name of a mask.
    """

    @knows_words(instead=_INSTEAD)
    def __init__(
        self,
        graph: Any,
        indices: Any,
        graph_sampler: NeighborSampler | InducedSampler,
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
        if not isinstance(graph_sampler, (NeighborSampler, InducedSampler)):
            raise ValueError(
                f"graph_sampler must be a sampler of gnnsys.dgl, got {type(graph_sampler).__name__}: "
                "use dgl.dataloading.DataLoader for other samplers"
            )
        if not isinstance(graph, (dgl.DGLGraph, DistGraph)):
            raise ValueError(f"graph must be a DGLGraph, or what gnnsys.open returns, got {type(graph).__name__}")
        if shuffle not in (True, False):
            raise ValueError(f"shuffle must be True or False, got {shuffle!r}: gnnsys.NeighborLoader has others")
        if use_uva:
            raise ValueError("use_uva is not supported: graph and features stay in host memory, leave it False")
        if use_ddp:
            ddp_seed = check_seed(ddp_seed, "ddp_seed")
        self._of_this_process = OfThisProcess(type(self).__name__)
        self.graph = graph
        self.graph_sampler = graph_sampler
        # What DGL's loader has under these names, for scripts that read them.
        self.indices, self.batch_size, self.drop_last, self.shuffle = indices, batch_size, drop_last, shuffle
        self.num_workers, self.use_ddp, self.ddp_seed = num_workers, use_ddp, ddp_seed
        device = graph_sampler.output_device if device is None else device
        resolve(device)  # ValueError if there is no such device
        self.device = torch.device(device) if device is not None else None
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "seed": torch.initial_seed() if seed is None else seed,
            "prefetch": prefetch,
            "device": "cpu",  # DGL's graphs are made of it there
        }
        if isinstance(graph_sampler, InducedSampler):
            share = partial(_share, shuffle=shuffle, seed=ddp_seed) if use_ddp else None
            options["num_threads"] = num_workers or default_num_threads(LoadingWork.HOST, self.device)
            self._loader: NeighborLoader | SubgraphLoader = graph_sampler.make_loader(graph, indices, options, share)
            return
        structure = graph_sampler.structure(graph)
        seeds = _seeds(structure, indices, (shuffle, ddp_seed) if use_ddp else None)
        to_load, fetch = structure.to_load(graph_sampler.prefetched)
        work = LoadingWork.MACHINES if getattr(to_load, "is_remote", False) else LoadingWork.HOST
        self._loader = NeighborLoader(
            to_load,
            input_nodes=seeds,
            transform=_Blocks(structure, graph_sampler),  # type: ignore[arg-type]  # the last stage changes the type
            fetch=fetch,
            num_threads=num_workers or default_num_threads(work, self.device),
            **options,
            **graph_sampler.drawn_by(structure, to_load),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batch: Any  # the loader's batch after its last stage
        for batch in self._loader:
            yield batch if self.device is None else _to_device(batch, self.device)

    @contextmanager
    def enable_cpu_affinity(
        self, loader_cores: list[int] | None = None, compute_cores: list[int] | None = None, verbose: bool = True
    ) -> Iterator[None]:
        """For scripts of DGL's, which gives cores to worker processes by it: here are none, and nothing is changed."""
        yield

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._loader.epoch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        self._loader.load_state_dicts(states)

    def close(self) -> None:
        self._loader.close()


class _Blocks:
    """The last stage: turns our batch into DGL's triple, with the prefetched features."""

    def __init__(self, structure: DglStructure | PartsStructure, sampler: NeighborSampler) -> None:
        self._structure = structure
        self._sampler = sampler

    def __call__(self, batch: Batch) -> tuple[Any, Any, list[Any]]:
        stores: dict[Any, dict[str, Any]] = {t: batch.nodes[t] for t in self._structure.graph.node_types}
        blocks = self._sampler.to_dgl(self._structure, batch.blocks, {t: store["n_id"] for t, store in stores.items()})
        self._structure.fill(blocks, stores, self._sampler.prefetched)
        output_nodes = blocks[-1].dstdata[dgl.NID]
        if isinstance(output_nodes, Mapping):  # only the type of the seeds, as in DGL
            output_nodes = {t: ids for t, ids in output_nodes.items() if t == batch.input_type}
        return blocks[0].srcdata[dgl.NID], output_nodes, blocks


def _seeds(structure: DglStructure | PartsStructure, indices: Any, ddp: tuple[bool, int] | None) -> Any:
    """The seeds for our loader: a rank's share as it is, or (node type, ids)."""
    if isinstance(indices, Share):
        if ddp is not None:
            raise ValueError("use_ddp shares indices out, and these are a rank's share already: leave use_ddp away")
        return indices
    chosen = structure.by_type(indices)
    if len(chosen) != 1:
        raise ValueError(f"indices must be of one node type, got {list(chosen)}: use one DataLoader for each")
    node_type, nodes = next(iter(chosen.items()))
    if not isinstance(nodes, str):
        _check_nodes(nodes, node_type, structure.graph.num_nodes(node_type))
    if ddp is None:
        return node_type, nodes
    if isinstance(nodes, str):
        raise ValueError(f"use_ddp needs ids: write indices=gnnsys.split(graph, {nodes!r}) without it")
    return node_type, _share(nodes, *ddp)


def _check_nodes(nodes: Tensor, node_type: Any, num_nodes: int) -> None:
    """ValueError, by the name that DGL has for them, for no nodes at all and for some that are not there."""
    if nodes.numel() == 0:
        raise ValueError(f"indices is empty: there are no nodes of type {node_type!r} to sample from")
    chosen_ids(nodes, num_nodes, "indices")


def _share(nodes: Tensor, shuffle: bool, seed: int) -> Tensor:
    """This rank's share. All have the same size, because the first nodes are repeated, as DistributedSampler does."""
    if not torch.distributed.is_initialized():
        raise ValueError("use_ddp needs a process group: call torch.distributed.init_process_group first")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if shuffle:
        nodes = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(seed), device="cpu")]
    missing = -nodes.numel() % world
    return torch.cat([nodes, nodes.repeat(-(-missing // max(1, nodes.numel())))[:missing]])[rank::world]


def _to_device(value: Any, device: torch.device) -> Any:
    """Whatever a sampler returns: graphs, blocks, ids, ids by type, and lists and tuples of them."""
    if isinstance(value, Mapping):
        return {k: _to_device(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(v, device) for v in value)
    return value.to(device)
