"""The base of our loaders for PyG: the steps of a batch, which threads run them, and state. Workers are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.mixin import WorkerInitWrapper
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, SamplerOutput

from gnnsys.comm import RequestContext
from gnnsys.graph import ids_of
from gnnsys.loader import NAME as MADE_OF
from gnnsys.loader import (
    LoadingWork,
    Names,
    SameOptions,
    check_made_of,
    check_sampling,
    check_seed,
    default_num_threads,
    graph_identity,
    plain,
)
from gnnsys.ops import BufferPool
from gnnsys.pipeline import OfThisProcess
from gnnsys.pyg.arguments import check_index, check_share
from gnnsys.pyg.elastic import deal_states, take_over
from gnnsys.pyg.identity import check_options, fingerprint
from gnnsys.pyg.iterator import BatchRequest, Epoch, EpochIterator, Running
from gnnsys.pyg.join import DataJoin, describe, in_edge_order
from gnnsys.pyg.parts import EvenBatches, Joining, PartsJoin
from gnnsys.pyg.sampler import NeighborSampler, draw_key
from gnnsys.pyg.stores import graph_of
from gnnsys.sampling import AnyGraph, SampleKey, loader_context
from gnnsys.seeds import InputIds, Leftover, Ranks, Share
from gnnsys.store import MemoryBudget, RowBuffers

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class ThreadedLoader(torch.utils.data.DataLoader):
    """Runs the steps of a batch in threads of our pipeline, and saves and restores the position in an epoch."""

    seed: int | None
    transform: Callable[[Any], Any] | None
    transform_sampler_output: Callable[[Any], Any] | None
    filter_per_worker: bool
    custom_cls: Any
    data: Any
    input_data: Any
    own_threads: int  # of our own sampling and gathering, with num_workers=0

    def _prepare(
        self,
        data: Any,
        sampler: BaseSampler | None,
        seed: int | None,
        kwargs: dict[str, Any],
        inputs: Any = None,
        own_values: dict[str, Any] | None = None,
        fetch: Names | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """Must be called before the DataLoader's __init__. `inputs`: as the user gave them, perhaps a rank's share.

        `own_values`: arguments with one value per input, such as times.
        """
        self._of_this_process = OfThisProcess(type(self).__name__)
        self.seed = None if seed is None else check_seed(seed)
        self.progress: Epoch | None = None
        self._running: Running | None = None  # with persistent workers
        self._resume: dict[str, Any] | None = None
        self._epochs = 0
        self._graph_identity: str | None = None
        self._fingerprint: int | None = None  # of inputs that are no share, computed for the first state
        self._sampler = sampler
        self._user_code = threading.Lock()  # the user's sampler may not be thread-safe
        self._largest = inputs.largest if isinstance(inputs, Share) else None
        self.shuffles = bool(kwargs.get("shuffle"))
        self.leftover: Leftover | None = None  # of the current epoch, or before it begins
        if self._largest is not None:
            check_share(inputs, kwargs)
        ahead = kwargs.get("prefetch_factor") or 2
        graph = graph_of(data)
        self.context = RequestContext() if graph is None else loader_context(graph)
        client = getattr(graph, "client", None)
        self.clients = [] if client is None else [client]  # which ask other machines
        ids = InputIds(inputs.ids) if isinstance(inputs, Share) else None
        given = [name for name, values in (own_values or {}).items() if values is not None]
        self.ranks = Ranks(graph, inputs, ids, given)
        self._same_options = SameOptions(self.ranks, self._largest)
        if graph is not None:
            join = PartsJoin(graph, kwargs.get("custom_cls"), fetch, wire_dtype)
            self.own_threads = default_num_threads(LoadingWork.MACHINES if join.waits else LoadingWork.HOST)
            workers = max(1, kwargs.get("num_workers") or self.own_threads)
            join.prepare(workers * (1 + ahead) + 2)
            self._join: DataJoin | PartsJoin = join
            return
        if fetch is not None or wire_dtype is not None:
            raise ValueError("fetch and wire_dtype are for what gnnsys.open returns: data in memory is joined as it is")
        num_arrays = sum(len(store) for store in data.stores) if isinstance(data, (Data, HeteroData)) else 0
        self.own_threads = default_num_threads(LoadingWork.HOST)
        workers = max(1, kwargs.get("num_workers") or self.own_threads)
        pool = BufferPool(max_free=(workers * (1 + ahead) + 1) * num_arrays)  # waiting, being made, in use
        MemoryBudget.of("cpu").watch(pool, "loader buffers", BufferPool.held_bytes)
        self._join = DataJoin(data, partial(_graph_of, sampler), RowBuffers(pool), kwargs.get("custom_cls"))

    def _untie(self) -> None:
        """Must be called after the DataLoader's __init__, which stores a bound method: a reference cycle."""
        del self.__dict__["collate_fn"]

    @property
    def _index_sampler(self) -> Any:
        """torch's batches. A share has the same number of batches on every rank."""
        if self._largest is None:
            return super()._index_sampler
        return EvenBatches(self.sampler, len(self.dataset), self.batch_size or 1, self.drop_last, self._largest)  # type: ignore[arg-type]

    # -- the steps of a batch ------------------------------------------------------------------------------------------

    def sample_step(self, request: BatchRequest) -> Any:
        if self._overrides("collate_fn"):
            return self.collate_fn(request.index)
        return self.sample(request.index, request.key)

    def join_step(self, out: Output) -> Any:
        batch = self._join(out)
        self._describe(batch, out)
        return batch

    def begin_join(self, out: Output) -> Joining:
        """Requests rows from parts; `finish_join` waits for them."""
        assert isinstance(self._join, PartsJoin)
        return self._join.begin(out)

    def finish_join(self, joining: Joining) -> Any:
        assert isinstance(self._join, PartsJoin)
        batch = self._join.finish(joining)
        self._describe(batch, joining.out)
        return batch

    def forget(self) -> None:
        """An epoch begins: its batches share no rows with those before."""
        if isinstance(self._join, PartsJoin):
            self._join.forget()

    @property
    def waits(self) -> bool:
        """Whether batches wait for other machines."""
        return isinstance(self._join, PartsJoin) and self._join.waits

    def filter_step(self, out: Any) -> Any:
        return out if self._overrides("collate_fn") and self.filter_per_worker else self.filter_fn(out)

    def sample(self, index: Any, key: SampleKey | None = None) -> Output:
        """The sampler's output for the chosen inputs, with `key` or a fresh one."""
        raise NotImplementedError

    def _sample_by(self, method: str, inputs: Any, key: SampleKey | None, **options: Any) -> Output:
        """Calls our sampler with a key. Calls user code (another sampler, or a subclass of ours) one call at a time."""
        sampler = self._sampler
        call = getattr(sampler, method)
        if is_plain(sampler):
            return call(inputs, key=key or self._key(), **options)
        with self._user_code:
            if not isinstance(sampler, NeighborSampler):
                return call(inputs, **options)
            with sampler.under(key or self._key()):
                return call(inputs, **options)

    def _checked(self, index: Any) -> Tensor:
        index = ids_of(index, len(self.dataset), "index", "input").long().cpu()  # type: ignore[arg-type]
        if not self._is_taken_over(index):
            check_index(index, len(self.dataset))  # type: ignore[arg-type]
        return index

    def _is_taken_over(self, index: Tensor) -> bool:
        """Whether these inputs were left over by other ranks, and are not the loader's own."""
        return self.leftover is not None and index.numel() > 0 and int(index[0]) >= len(self.dataset)  # type: ignore[arg-type]

    def _key(self) -> SampleKey:
        """The key of a batch outside an epoch, as in `loader([0, 3])`."""
        return draw_key(self.generator) if self.seed is None else SampleKey(self.seed, -1, 0)

    def collate_fn(self, index: Any) -> Any:
        out = self.sample(index)
        return self.filter_fn(out) if self.filter_per_worker else out

    def filter_fn(self, out: Output) -> Any:
        """Joins a sampler's output with features, as PyG's own `filter_fn` does."""
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(out)
        if not isinstance(out, (SamplerOutput, HeteroSamplerOutput)):
            raise TypeError(f"'{type(self).__name__}' found invalid type: '{type(out)}'")
        permutation = None if self._sampler is None else self._sampler.edge_permutation
        batch = self.join_step(in_edge_order(out, permutation))
        return batch if self.transform is None else self.transform(batch)

    def _describe(self, batch: Any, out: Output) -> None:
        describe(batch, out)

    def _overrides(self, name: str) -> bool:
        """Whether a subclass overrides a method."""
        return getattr(type(self), name) is not getattr(ThreadedLoader, name)

    @property
    def samples_ahead(self) -> bool:
        """Whether sampling may run in a background thread with num_workers=0: only if none of it is user code."""
        return is_plain(self._sampler) and not self._overrides("collate_fn")

    @property
    def joins_ahead(self) -> bool:
        """The same for the join with features."""
        is_ours = isinstance(self.data, (Data, HeteroData)) or isinstance(self._join, PartsJoin)
        plain = self.transform_sampler_output is None and not self._overrides("filter_fn")
        return self.samples_ahead and is_ours and self.filter_per_worker and plain

    # -- epochs and state ----------------------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator:  # type: ignore[override]
        if not self._same_options.is_over:
            self._same_options.check({"batch_size": self.batch_size, "drop_last": self.drop_last})
        if not self.persistent_workers:
            return EpochIterator(self, Running(self))
        if self._running is None:
            self._running = Running(self)
        else:
            self._running.begin_again(self)
        return EpochIterator(self, self._running)

    def _get_iterator(self) -> EpochIterator:  # type: ignore[override]
        """torch's and PyG's loaders start worker processes here, for code that does not go through `iter`."""
        return self.__iter__()

    def check_worker_number_rationality(self) -> None:
        """Silences torch's warning of more workers than cores: ours are threads, and idle ones cost nothing."""

    def next_epoch(self) -> int:
        self._epochs += 1
        return self._epochs - 1

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next `iter` begins or continues."""
        if self._resume is not None:
            return int(self._resume["epoch"])
        return self._epochs if self.progress is None else self.progress.number

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, by the batches that the caller has received, and the generator's state."""
        if self._resume is not None:
            state = dict(self._resume)
        elif self.progress is not None:
            state = self.progress.state()
        else:
            generator = None if self.generator is None else self.generator.get_state()
            state = {"epoch": self._epochs, "batch": 0, "generator": generator, "leftover": None}
        return {**state, **self.ranks.state(), **self._options(), **self._made_of()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next `iter` yield the rest of the epoch in which `state` was saved.

        ValueError, before anything changes, if it was saved with other inputs or options.
        """
        self.ranks.check_own(state)
        check_options(state, self._options())
        check_made_of(state, lambda: self._made_of().get(MADE_OF))
        self._go_on(state)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Makes the next `iter` continue where all ranks were. `states`: of all old ranks, in their order.

        As in `gnnsys.NeighborLoader.load_state_dicts`: another number of ranks deals the rest of the epoch anew.
        """
        own = self.ranks.own_state(states)
        if own is not None:
            self.load_state_dict(own)
        else:
            dealt = deal_states(self, states)
            for state in states:
                check_sampling(state, self._made_of().get(MADE_OF, {}).get("sampling", {}))
            self._go_on(dealt)

    def _go_on(self, state: dict[str, Any]) -> None:
        self.leftover = take_over(self, state)
        if state["generator"] is None:
            self._epochs, self._resume = int(state["epoch"]), None
        else:
            names = ("epoch", "batch", "generator")
            self._epochs = int(state["epoch"]) + 1
            self._resume = {**{name: state[name] for name in names}, "leftover": state.get("leftover")}
        self.progress = None

    def order_options(self) -> dict[str, Any]:
        """What decides the order of a share's inputs, and what is sampled for them, besides the generator."""
        return {"shuffle": self.shuffles, "seed": self.seed, "own_generator": self.generator is not None}

    def _options(self) -> dict[str, Any]:
        """What must be equal in the loader that continues from a state of this one.

        Inputs that are a share are described for the other ranks; for any others there is a fingerprint.
        """
        num_inputs = len(self.dataset)  # type: ignore[arg-type]
        sizes: dict[str, Any] = {"num_inputs": num_inputs, "largest": self._largest}
        if self._largest is None:
            if self._fingerprint is None:
                self._fingerprint = fingerprint(self.input_data)
            sizes = {"inputs": [num_inputs, self._fingerprint]}
        return {**sizes, "batch_size": self.batch_size, "drop_last": self.drop_last, **self.order_options()}

    def _made_of(self) -> dict[str, Any]:
        """The same for graph and sampling. Empty for a user's sampler, of which nothing is known."""
        if not isinstance(self._sampler, NeighborSampler):
            return {}
        if self._graph_identity is None:
            self._graph_identity = graph_identity(self._sampler.graph)
        negatives = self._sampler.told_negatives(self.input_data.input_type, getattr(self, "neg_sampling", None))
        options = {**self._sampler.options(), "neg_sampling": negatives}
        return {MADE_OF: {"graph": self._graph_identity, "inputs": None, "sampling": plain(options)}}

    def input_ids(self, input_id: Tensor) -> Tensor:
        """Ids of a batch's inputs, by its `input_id`, if they are a share. Also for inputs left over by other ranks."""
        if self.ranks.inputs is None:
            raise ValueError("this loader's inputs are not a share: look them up in what you gave it")
        return self.ranks.inputs[input_id]

    def take_resume_state(self) -> dict[str, Any] | None:
        state, self._resume = self._resume, None
        return state

    # -- PyG's context managers, for threads instead of processes ------------------------------------------------------

    def _aff_init_fn(self, worker_id: int) -> None:
        """PyG pins a worker process to cores; here a worker thread pins itself."""
        cores = self.loader_cores[worker_id]  # type: ignore[attr-defined]
        os.sched_setaffinity(0, cores if isinstance(cores, list) else [cores])
        self._old_worker_init_fn(worker_id)

    @contextmanager
    def enable_multithreading(self, worker_threads: int | None = None) -> Iterator[None]:
        """Gives every worker `worker_threads` native threads (default: an equal share). Needs no `spawn`."""
        if self.num_workers < 1:
            raise ValueError(f"'enable_multithreading' needs at least one worker (got {self.num_workers})")
        threads = worker_threads or max(1, torch.get_num_threads() // self.num_workers)
        self._worker_threads = threads
        before = self.worker_init_fn
        self._old_worker_init_fn = WorkerInitWrapper(before)
        self.worker_init_fn = self._mt_init_fn  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.worker_init_fn = before


def is_plain(sampler: BaseSampler | None) -> bool:
    """Whether sampling is our code alone: not a user's sampler, nor a subclass that overrides methods."""
    names = ("sample_from_nodes", "sample_from_edges")
    return isinstance(sampler, NeighborSampler) and all(
        getattr(type(sampler), name) is getattr(NeighborSampler, name) and name not in vars(sampler) for name in names
    )


def _graph_of(sampler: BaseSampler | None) -> AnyGraph | None:
    return sampler.graph if isinstance(sampler, NeighborSampler) else None
