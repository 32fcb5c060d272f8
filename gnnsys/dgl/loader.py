"""DataLoader: DGL's mini-batches of seeds with their blocks, made ahead by our pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import dgl
import torch
from torch import Tensor

from gnnsys.dgl.called_sampler import CalledSampler, overridden_method
from gnnsys.dgl.parts import PLAIN_NODE, PartsStructure
from gnnsys.dgl.sampler import NeighborSampler
from gnnsys.dgl.structure import DglStructure, LoadedArrays
from gnnsys.dgl.subgraphs import InducedSampler
from gnnsys.graph import NODE, chosen_ids
from gnnsys.loader import (
    Batch,
    LoadingWork,
    NeighborLoader,
    SubgraphLoader,
    Ticket,
    check_seed,
    default_num_threads,
    knows_words,
    resolve,
    words_of,
)
from gnnsys.pipeline import OfThisProcess
from gnnsys.sampling import DistGraph
from gnnsys.seeds import SeedsByType, Share

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

    `graph`: DGL's, or what `gnnsys.open` returns. With the latter, blocks have global ids and only the prefetched
    features, and `indices` are `graph.from_original(ids)`, this rank's share (`gnnsys.split`), or the name of a mask.
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
        self._by_type: SeedsByType | None = None  # where `indices` is a dict, for `dataset`
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
        own = overridden_method(graph_sampler)
        if isinstance(graph_sampler, InducedSampler):
            if own is not None:
                raise ValueError(
                    f"{type(graph_sampler).__name__} has a {own} of its own, which this DataLoader does not call: use "
                    "dgl.dataloading.DataLoader, or override NeighborSampler"
                )
            share = partial(_share, shuffle=shuffle, seed=ddp_seed) if use_ddp else None
            options["num_threads"] = num_workers or default_num_threads(LoadingWork.HOST, self.device)
            view = graph_sampler.structure(graph, is_for_loader=True)
            made = graph_sampler.make_loader(view, indices, options, share)
            self._structure: DglStructure | PartsStructure | None = view  # None: the user's sampler looks at the graph
            self._loader: NeighborLoader | SubgraphLoader = made[0]
            self._arrays: LoadedArrays | None = made[1]
            return
        self._structure = structure = graph_sampler.structure(graph, is_for_loader=True)
        seeds = _seeds(structure, indices, (shuffle, ddp_seed) if use_ddp else None)
        to_load, fetch, self._arrays = structure.to_load(graph_sampler.prefetched)
        if isinstance(indices, Mapping):
            self._by_type = SeedsByType(to_load, seeds if isinstance(seeds, Mapping) else _named(seeds))
        work = LoadingWork.MACHINES if getattr(to_load, "is_remote", False) else LoadingWork.HOST
        if own is not None:
            is_by_type = isinstance(indices, Mapping) or len(structure.graph.node_types) > 1
            call: Any = CalledSampler(graph, graph_sampler, is_by_type)
            options |= {"transform": call.batch_of, "fetch": [], "num_threads": num_workers}
            self._loader, self._structure = NeighborLoader(to_load, input_nodes=seeds, sampler=call, **options), None
            return
        self._loader = NeighborLoader(
            to_load,
            input_nodes=seeds,
            transform=_Blocks(structure, graph_sampler, self._arrays),  # type: ignore[arg-type]  # the last stage changes the type
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
            if self._structure is not None:
                self._structure.check_current(self.graph)
                if self._arrays is not None:
                    self._arrays.check_current(self.graph)
                for made in _graphs_of(batch):
                    self._structure.attach(made)
            yield batch if self.device is None else _to_device(batch, self.device)

    @contextmanager
    def enable_cpu_affinity(
        self, loader_cores: list[int] | None = None, compute_cores: list[int] | None = None, verbose: bool = True
    ) -> Iterator[None]:
        """For scripts of DGL's, which gives cores to worker processes by it: here are none, and nothing is changed."""
        yield

    @property
    def dataset(self) -> SeedBatches:
        """What an epoch goes through, batch by batch, as DGL's loader has it: its length is the number of batches."""
        return SeedBatches(self._loader, self._by_type)

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


class SeedBatches(torch.utils.data.IterableDataset[Any]):
    """The seeds of each batch of the epoch that is under way or next: a tensor, or a dict where `indices` is one."""

    def __init__(self, loader: NeighborLoader | SubgraphLoader, seeds: SeedsByType | None) -> None:
        self._loader, self._seeds = loader, seeds

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in range(len(self)):
            chosen = self._loader.schedule.inputs(Ticket(self._loader.epoch, batch))
            if self._seeds is None:
                yield self._loader.input_ids(chosen)
                continue
            names = {NODE: PLAIN_NODE} if self._loader.graph.is_homogeneous else {}
            found = self._seeds.by_type(chosen)
            yield {names.get(t, t): self._seeds.ids[t][at] for t, at in found.items() if at.numel()}


class _Blocks:
    """The last stage: turns our batch into DGL's triple, with the prefetched features."""

    def __init__(
        self, structure: DglStructure | PartsStructure, sampler: NeighborSampler, arrays: LoadedArrays | None
    ) -> None:
        self._structure, self._sampler, self._arrays = structure, sampler, arrays
        self._prefetched = sampler.prefetched

    def __call__(self, batch: Batch) -> tuple[Any, Any, list[Any]]:
        stores: dict[Any, dict[str, Any]] = {t: batch.nodes[t] for t in self._structure.graph.node_types}
        blocks = self._sampler.to_dgl(self._structure, batch.blocks, {t: store["n_id"] for t, store in stores.items()})
        self._structure.fill(blocks, stores, self._prefetched, self._arrays)
        output_nodes = blocks[-1].dstdata[dgl.NID]
        if isinstance(output_nodes, Mapping):  # only the types that the batch has seeds of, as in DGL
            output_nodes = {
                t: ids for t, ids in output_nodes.items() if t == batch.input_type or batch.nodes[t].get("batch_size")
            }
        return blocks[0].srcdata[dgl.NID], output_nodes, blocks


def _seeds(structure: DglStructure | PartsStructure, indices: Any, ddp: tuple[bool, int] | None) -> Any:
    """The seeds for our loader: a share, ids of one type, (node type, name of a mask), or a dict of several types."""
    shares = list(indices.values()) if isinstance(indices, Mapping) else [indices]
    if ddp is not None and any(isinstance(share, Share) for share in shares):
        raise ValueError("use_ddp shares indices out, and these are a rank's share already: leave use_ddp away")
    if isinstance(indices, Share):
        return indices
    chosen = structure.seeds(indices) if isinstance(structure, PartsStructure) else structure.by_type(indices)
    for node_type, nodes in chosen.items():
        if isinstance(nodes, Share):
            continue
        if isinstance(nodes, str):
            if ddp is not None:
                raise ValueError(f"use_ddp needs ids: write indices=gnnsys.split(graph, {nodes!r}) without it")
            continue
        _check_nodes(nodes, node_type, structure.graph.num_nodes(node_type))
        mine = nodes if ddp is None else _share(nodes, *ddp)
        chosen[node_type] = structure.graph.from_global(mine, node_type)
    if len(chosen) > 1:
        return chosen
    node_type, nodes = next(iter(chosen.items()))
    return (node_type, nodes) if isinstance(nodes, str) else nodes


def _named(seeds: Any) -> dict[Any, Any]:
    """Seeds of one type, as `_seeds` returns them, by type."""
    return dict([seeds]) if isinstance(seeds, tuple) else {seeds.type: seeds}


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


def _graphs_of(batch: Any) -> list[Any]:
    """The blocks or the subgraph of a batch."""
    made = batch[-1] if isinstance(batch, tuple) else batch
    return made if isinstance(made, list) else [made]


def _to_device(value: Any, device: torch.device) -> Any:
    """Whatever a sampler returns: graphs, blocks, ids, ids by type, and lists and tuples of them."""
    if isinstance(value, Mapping):
        return {k: _to_device(v, device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(v, device) for v in value)
    return value.to(device) if hasattr(value, "to") else value
