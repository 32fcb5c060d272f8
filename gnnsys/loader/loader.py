"""What every loader is: a schedule, the stages a batch passes, and a pipeline that runs them across epochs."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from gnnsys.comm import BatchLoop, RequestContext, use_context
from gnnsys.graph import Graph, IdsLike, as_ids
from gnnsys.loader.batch import Batch
from gnnsys.loader.batch_memory import PlannedUse, planned_use, room_for_groups
from gnnsys.loader.batch_stages import batch_stages
from gnnsys.loader.batches_elsewhere import BatchesElsewhere
from gnnsys.loader.default_threads import LoadingWork, SumThreads, default_fetch_threads, default_num_threads
from gnnsys.loader.device_copy import DeviceCopy, resolve, sampled_on
from gnnsys.loader.fetch import Fetch, Names
from gnnsys.loader.first_batch import FirstBatch
from gnnsys.loader.first_products import FirstProducts
from gnnsys.loader.first_sums import FirstSums
from gnnsys.loader.identity import Identity, checksum
from gnnsys.loader.layout import StageLayout, check_user_stages
from gnnsys.loader.options import PipelineOptions
from gnnsys.loader.planned import AUTO, Visits, check_made_for, hardware, make_plan
from gnnsys.loader.planned_execution import OtherWays, PlannedExecution, WayLoader
from gnnsys.loader.reserved import check_names_free
from gnnsys.loader.resumable import Resumable, warn_of_no_batch
from gnnsys.loader.row_cache import keeper_of
from gnnsys.loader.same_options import SameOptions
from gnnsys.loader.sampled import Inputs, Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.observe import BatchTrace, Trace
from gnnsys.ops import BufferPool
from gnnsys.pipeline import OfThisProcess, Pipeline, Scope, Stage, StageCounters
from gnnsys.planning import ExecutionPlan, Way, is_given
from gnnsys.sampling import DistGraph, Sampler, SubgraphSampler, loader_context
from gnnsys.seeds import Leftover, Ranks, ShareRecipe
from gnnsys.store import MemoryBudget, RowBuffers

_CALL = Ticket(epoch=-1, batch=0)  # the random stream of loader(ids), apart from every epoch's


class Loader(Resumable):
    """Iterates over an epoch's batches, loaded ahead by `num_threads` threads, `prefetch` of them waiting.

    With `num_threads=0` everything happens in `next`; None is what the machine has and what pays (`default_threads`),
    which `repr(loader)` tells. With `across_epochs` the pipeline runs on into the next epoch while this one ends;
    without it nothing is loaded between epochs, and an epoch ends only when a device has read all of it too (choose
    that if rows of the graph change then). `fetch` names the arrays that batches have, for all types or by type: all by
    default, but for tables that train, which are read in the forward pass. Rows travel as `wire_dtype` if one is given.
    What the graph is given after the loader was made, the loader does not see. `stages` are the user's own, each with
    the stage it comes `after`: "schedule" (gets `Inputs`), "sample" or "fetch" (`Sampled`), "compact" (`Batch`).
    `pipeline` is how threads are laid out. Subclasses give the sample stage: a callable that turns a `Ticket` and the
    chosen inputs into a `Sampled`.
    """

    def __init__(
        self,
        graph: Graph | DistGraph,
        schedule: Schedule,
        sample: Callable[[Ticket, torch.Tensor], Sampled],
        *,
        ranks: Ranks,
        identity: Identity,
        own_names: Sequence[str],
        transform: Callable[[Batch], Batch] | None,
        num_threads: int | None,
        prefetch: int,
        device: torch.device | str | None,
        across_epochs: bool,
        fetch: Names | None = None,
        wire_dtype: torch.dtype | None = None,
        stages: Sequence[Stage] = (),
        pipeline: PipelineOptions | None = None,
        sampler: Sampler | SubgraphSampler | None = None,
        sums: FirstSums | None = None,
        products: FirstProducts | None = None,
        by_host: bool = False,
        elsewhere: Callable[[Fetch], BatchesElsewhere | None] | None = None,
    ) -> None:
        self._of_this_process = OfThisProcess(type(self).__name__)
        options = PipelineOptions() if pipeline is None else pipeline
        if not isinstance(options, PipelineOptions):
            raise ValueError(f"pipeline must be a gnnsys.loader.PipelineOptions, got {type(options).__name__}")
        target = resolve(device, graph)
        self.graph = graph
        super().__init__(schedule, ranks, identity, sampler)
        self._same_options = SameOptions(ranks, schedule.largest)
        self._across_epochs = across_epochs
        self._context = loader_context(graph, options.priority, options.path)
        on_device = sampled_on(graph, target) is not None
        by_device = target if on_device else None
        self._fetch = Fetch(graph, names=fetch, wire_dtype=wire_dtype, policy=options.policy, device=by_device)
        check_names_free(self._fetch.all_names(), own_names, graph.is_homogeneous)
        self._elsewhere = None if elsewhere is None else elsewhere(self._fetch)
        waits = self._fetch.waits or getattr(graph, "is_remote", False) or self._elsewhere is not None
        check_user_stages(stages)
        fetch_threads, self._told_threads = 1, num_threads
        self._prefetch = prefetch
        if num_threads is None:
            here = LoadingWork.DEVICE if on_device else LoadingWork.HOST
            across = LoadingWork.DEVICE_MACHINES if on_device else LoadingWork.MACHINES
            work = across if waits else here
            if on_device and not waits and _reads_bus(graph):
                work = LoadingWork.BUS if sums is None and not by_host else LoadingWork.SUMS
            if work is LoadingWork.HOST and (transform is not None or any(stage.is_inline for stage in stages)):
                work = LoadingWork.IN_ORDER
            num_threads = default_num_threads(work, target)
            if transform is None and not any(stage.is_inline for stage in stages):  # these see batches in order
                fetch_threads = default_fetch_threads(num_threads)
        self.num_threads, self._device = num_threads, target or torch.device("cpu")
        layout = StageLayout(
            num_threads=num_threads, prefetch=prefetch, waits=waits, options=options, on_device=on_device,
            fetch_threads=fetch_threads, native_threads=SumThreads.here().each if sums is not None and on_device else 1,
            group_bytes=room_for_groups(by_device) if options.group else None,
            asks_ahead=0 if self._elsewhere is None else self._elsewhere.num_ahead,
        )  # fmt: skip
        self.num_ahead = layout.num_ahead  # batches on the network besides the one whose turn it is
        self.num_ahead_when_late = layout.num_ahead_when_late  # the same where rows come late
        self.num_under_way = layout.num_under_way  # the same, and those that wait to be trained on
        num_batches = prefetch + num_threads + 1 + layout.sample_depth  # that wait, are made, and are used
        pool = BufferPool(max_free=num_batches * self._fetch.num_arrays)
        MemoryBudget.of("cpu").watch(pool, "loader buffers", BufferPool.held_bytes)
        num_shared = layout.num_in_flight if waits and options.share else 0
        self._fetch.prepare(RowBuffers(pool, pin=target is not None), num_shared, options.keep)
        self._fetch.widens = target is None or any(stage.after == "fetch" for stage in stages)
        self._trace = Trace(options.trace) if options.trace else None
        client = getattr(graph, "client", None)
        if self._trace is not None and client is not None:
            client.traces[self._context.loader] = self._trace
        if target is None:
            self._fetch.check_on_host()
        self._copy = None if target is None else DeviceCopy(target)
        made = batch_stages(
            graph, schedule, sample, self._fetch, products if sums is None else sums, trace=self._trace,
            device_name=str(target or "cpu"), sampler=sampler if isinstance(sampler, Sampler) else None,
            elsewhere=self._elsewhere,
        )  # fmt: skip
        self._stages = layout.arrange(made, transform, stages, self._copy)
        if products is not None:
            self._stages.append(Stage("give out", products.give_out, threads=0))  # by the consumer
        self._products = products
        self._caches = keeper_of(graph, by_device, fetch) if len(schedule) else None
        if isinstance(graph, DistGraph):
            graph.loaders.add(self)
            if self._caches is not None:
                self._caches.join(graph, self)
        self._pipeline: Pipeline | None = None

    def _plan_execution(
        self, execution: str | ExecutionPlan, others: OtherWays[Loader], visits: Visits | None, *,
        is_told_threads: bool, is_in_order: bool, first: FirstBatch | None = None,
        sums: FirstSums | str = "loaders of nodes alone make them",
        products: FirstProducts | str = "loaders of nodes alone make them",
    ) -> None:  # fmt: skip
        """Has batches made by a plan, or by the best that is possible. `others` makes loaders that go other ways."""
        target = None if self._device.type == "cpu" else self._device
        made_for = {"loader": checksum(repr(self._identity.state()), *self._schedule.state().values())}
        made_for |= hardware(target)
        if isinstance(execution, ExecutionPlan):
            check_made_for(execution, made_for)
            ways = execution.ways if execution.way is None else [execution.way]
            if isinstance(sums, str) and any(any(way.sums) for way in ways):
                raise ValueError(f"this plan makes sums of the first layer ahead, and here {sums}")
            if isinstance(products, str) and any(any(way.products) for way in ways):
                raise ValueError(f"this plan makes products of the first layer on the host, and here {products}")
            plan = execution.copy()  # two loaders must not write into one
        elif execution == AUTO:
            plan = make_plan(
                self.graph, target, visits, made_for, num_threads=self.num_threads, is_told_threads=is_told_threads,
                is_in_order=is_in_order, first=first,
            )  # fmt: skip
        else:
            raise ValueError(f'execution must be None, "{AUTO}" or an ExecutionPlan, got {execution!r}')
        me = weakref.ref(self)  # what carries out the plan must not keep the loader alive

        def loader_of(way: Way) -> WayLoader:
            own = cast(Loader, me())
            if is_given(way):
                trace = own._trace
                return WayLoader(
                    lambda position: cast(Loader, me())._pipeline_at(position), lambda: None, lambda leftover: None,
                    lambda: [] if trace is None else trace.records(),
                )  # fmt: skip
            loader = others.make(way)
            loader._schedule.shuffle_start = own._schedule.shuffle_start  # they switch together

            def take_over(leftover: Leftover | None) -> None:
                loader.close()
                loader._schedule.leftover = leftover
                loader._take_over(leftover)

            if own._schedule.leftover is not None:
                take_over(own._schedule.leftover)
            return WayLoader(loader._pipeline_at, loader.close, take_over, loader.trace)

        state, cut = self._identity.state(), self._schedule
        alike = (type(self).__name__, state["graph"], repr(state["sampling"]), cut.batch_size, cut.shuffle, cut.seed)
        self._execution = PlannedExecution(
            plan, loader_of, target, f"{checksum(*alike):08x}", others.places.were_written
        )

    @property
    def plan(self) -> ExecutionPlan | None:
        """By which batches are made; None without `execution`."""
        return None if self._execution is None else self._execution.plan

    # -- epochs ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._schedule)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next `iter` begins or goes on with."""
        return self._at.epoch

    def __iter__(self) -> Iterator[Batch]:
        at = self._at
        if not self._same_options.is_over:
            cut = {"batch_size": self._schedule.batch_size, "drop_last": self._schedule.drop_last}
            self._same_options.check(cut)
        if self._shuffling.agree(at.epoch + (at.batch > 0), goes_on=self._is_resuming and at.batch > 0):
            self._drop_order()
        if len(self) == 0:
            return iter(())
        self._iteration += 1
        is_resuming, self._is_resuming = self._is_resuming, False
        if not is_resuming and at.batch > 0:
            self._position = self._schedule.first(self.epoch + 1)  # an epoch that was left early is over
        elif self._ending is not None:  # resumed behind its last batch: only the caller's own end of it is left to do
            warn_of_no_batch(self._ending, self._ranks.rank)
            self._ending = None
            return iter(())
        self._ending = None
        if not self._across_epochs:
            self.close()  # what loads may have come to the end of an epoch whose iterator was not asked for its end
        begins, planned = self._position, self._execution
        return self._epoch(
            self._iteration, self._pipeline_at(begins) if planned is None else planned.at(begins, self.epoch)
        )

    def _epoch(self, iteration: int, pipeline: Iterator[Batch]) -> Iterator[Batch]:
        epoch, end = self.epoch, self._schedule.first(self.epoch + 1)
        loop, watch = BatchLoop(), getattr(self.graph, "plan_watch", None)
        try:
            while self._position < end:
                if iteration != self._iteration:
                    raise RuntimeError("another iteration over this loader has begun: use one loader for each")
                batch = next(pipeline)
                if watch is not None and (line := watch.take(time.perf_counter(), len(self))) and self._ranks.rank == 0:
                    print(f"gnnsys: {line}", file=sys.stderr)
                if self._sampler is not None:
                    self._sampler.consumed((epoch, self._position - self._schedule.first(epoch)))
                loop.use(self._context.at(self._position))  # what is asked for meanwhile, rows of embeddings say
                self._position += 1
                self._ending = epoch if self._position == end else None
                record = None if self._trace is None else self._trace.record(self._position - 1)
                began, used = time.perf_counter(), time.thread_time()
                yield batch
                del batch  # not kept while the next one is waited for
                if record is not None:
                    record.stages["use"] = (began, time.perf_counter())
                    record.add_cpu("use", time.thread_time() - used)
            if iteration == self._iteration:
                self._ending = None
                if self._caches is not None and isinstance(self.graph, DistGraph):
                    self._caches.end_epoch(self.graph, self)
        finally:
            loop.leave()
            if not self._across_epochs and iteration == self._iteration:
                self.close()

    def observe(self, validation: float) -> None:
        """Tells a loader with `shuffle="adaptive"` how good the model is after an epoch: more is better, so of a loss
        its negative. Call it once per epoch, on any ranks.

        Shuffling begins with the first epoch that is begun after the curve has bent (`elbow_of`), on all ranks, and
        stays. Ranks with a score count by their mean. NaN and infinities are no score.
        """
        self._shuffling.observe(validation)

    @property
    def shuffled_from(self) -> int | None:
        """The first epoch that is shuffled; None where there is none, or none yet."""
        return self._schedule.shuffle_start.epoch

    def _drop_order(self) -> None:
        """Other epochs are shuffled than before: what was loaded ahead, and what was measured of it, is void."""
        if self._execution is not None:
            self._execution.begin_anew()
        self.close()

    def _pipeline_at(self, position: int) -> Pipeline:
        if self._copy is not None:
            self._copy.follow()
        if self._pipeline is None or self._pipeline.is_closed:
            self._fetch.forget()
            observer = None if self._trace is None else self._trace.add_time
            self._pipeline = Pipeline(
                self._source, self._stages, position=position, observer=observer, scope=self._scope,
                on_ask=self._on_ask,
            )  # fmt: skip
        elif self._pipeline.position != position:
            self._fetch.forget()
            self._pipeline.seek(position)
        return self._pipeline

    @property
    def _scope(self) -> Scope:
        context = self._context  # not the loader, which threads would keep alive
        return lambda position: use_context(context.at(position))

    @property
    def _on_ask(self) -> Callable[[int, bool], None]:
        context, elsewhere = self._context, self._elsewhere
        clients = [getattr(self.graph, "client", None), None if elsewhere is None else elsewhere.client]
        asked = [client for client in clients if client is not None]
        return lambda position, waits: context.await_batch(position, asked, waits)

    @property
    def _source(self) -> Callable[[int], Iterator[Ticket]]:
        schedule = self._schedule
        if self._across_epochs:
            return schedule.tickets
        return lambda position: schedule.tickets(position, end=schedule.first(schedule.ticket(position).epoch + 1))

    def __call__(self, index: IdsLike) -> Batch:
        """The batch of the given inputs (positions in what the loader was given, or a mask), made here and now."""
        chosen = as_ids(index, self._num_inputs, "index", "input").long().cpu()
        if self._copy is not None:
            self._copy.follow()
        item: Any = Inputs(_CALL, chosen, None)
        with use_context(self._context):
            for stage in self._stages[1:]:
                item = stage.run(item if stage.begin is None else stage.begin(item))
        return item

    @property
    def _num_inputs(self) -> int:
        return self._schedule.num_inputs

    def input_ids(self, input_id: torch.Tensor) -> torch.Tensor:
        """The ids of a batch's inputs, by its `input_id`; those that were taken over from other ranks too."""
        if self._ranks.inputs is None:
            raise ValueError("this loader's inputs are links that were given by their ends: they have no ids")
        return self._ranks.inputs[input_id]

    # -- for who makes its batches one by one (`in_turn`) ----------------------------------------------------------

    def stages_in_turn(self) -> list[Stage]:
        """The stages of a batch, from its ticket on. Rows that are under way now are not shared with what comes."""
        self.close()
        return list(self._stages)

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @property
    def context(self) -> RequestContext:
        """What the messages of its batches say."""
        return self._context

    # -- counters and end --------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, StageCounters]:
        """Batches, seconds, bytes and waiting batches per stage since the pipeline was started; empty before.

        What `fetch` counts itself (bytes and rows, by where they came from) is counted since the loader was made.
        """
        if self._execution is not None:
            return self._execution.counters()
        return {} if self._pipeline is None else self._pipeline.counters()

    def trace(self) -> list[BatchTrace]:
        """Records of the last batches (`PipelineOptions.trace` of them), those in flight included."""
        if self._execution is not None:
            return self._execution.trace()
        return [] if self._trace is None else self._trace.records()

    def save_trace(self, path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> None:
        """Writes the records of the last batches to a file, for `gnnsys profile --trace`; each rank its own. With
        `model`, the bytes of its gradients are noted too. ValueError where the graph is not in parts."""
        from gnnsys.loader.run_trace import RunTrace

        RunTrace.of_loader(self, model).save(path)

    @property
    def recipe(self) -> ShareRecipe | None:
        """How its inputs were made of all seeds; None where they are no share of `gnnsys.split`."""
        return self._ranks.recipe

    @property
    def device(self) -> torch.device:
        """Where batches arrive."""
        return self._device

    def row_bytes(self) -> int:
        """Bytes of a node's rows that batches have, over all arrays and types of nodes."""
        return self._fetch.row_bytes()

    def planned_use(self, num_edges: int) -> PlannedUse:
        """What it would hold on a GPU beside the batch that is trained on, of batches with so many edges; by where an
        estimate has put the graph (`Graph.planned_place`)."""
        place = getattr(self.graph, "planned_place", "host")
        return planned_use(place, self._told_threads, self._prefetch, len(self.graph.edge_types), num_edges)

    def planned_workspaces(self, num_nodes: Sequence[Sequence[int]], num_edges: Sequence[Sequence[int]]) -> list[int]:
        """What a GPU would take while it samples a batch of known counts, one block after the other, until the batch is
        there: nodes per type and hop, edges per relation and hop. Where a sampler does not tell, one block."""
        if getattr(self.graph, "planned_place", "host") == "host":
            return []
        most = self.planned_use(sum(map(sum, num_edges))).sampling_bytes
        return [most] if most else []

    def planned_copies(self) -> dict[str, torch.Tensor]:
        """Tables of short rows that a GPU would copy, as an estimate has the graph pinned."""
        place = getattr(self.graph, "planned_place", "host")
        return self._fetch.copied_tables() if place == "pinned" else {}

    def close(self) -> None:
        """Ends the threads; iterating again starts new ones. Also done on garbage collection and at exit.

        When it returns, nothing of the graph is read any more, by a device neither: rows may change from here on.
        """
        if self._execution is not None:
            self._execution.close()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._copy is not None:
            self._copy.wait()
        if self._products is not None:
            self._products.close()
        self._fetch.forget()

    def __repr__(self) -> str:
        threads = f"{self.num_threads or 'no'} loading thread{'' if self.num_threads == 1 else 's'}"
        batches = f"{len(self)} batches per epoch, {threads}, batches on {self._device}"
        planned = "" if self.plan is None else f", {self.plan!r}"
        return f"{type(self).__name__}({self._num_inputs:,} inputs, {batches}{planned})"


def _reads_bus(graph: Graph | DistGraph) -> bool:
    """Whether the device that samples a graph reads some of it from host memory."""
    return graph.is_pinned if isinstance(graph, Graph) else graph.registered is not None
