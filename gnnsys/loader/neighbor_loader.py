"""NeighborLoader: mini-batches of seed nodes with their sampled neighbourhoods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gnnsys.graph import Graph, NodeType, check_ours
from gnnsys.loader.batch import Batch
from gnnsys.loader.batch_memory import NumNeighbors, promise_batches
from gnnsys.loader.batches_elsewhere import BatchesElsewhere, SamplerPeers, undescribable, unreadable
from gnnsys.loader.described_loader import DescribedLoader
from gnnsys.loader.device_copy import resolve, sampled_on
from gnnsys.loader.fetch import Fetch, Names
from gnnsys.loader.first_batch import FirstBatch, products_for, sums_for
from gnnsys.loader.first_products import FirstProducts, check_staleness
from gnnsys.loader.first_sums import FirstSums
from gnnsys.loader.identity import Identity, graph_identity
from gnnsys.loader.known_words import OF_TORCH, knows_words
from gnnsys.loader.layout import check_user_stages
from gnnsys.loader.loader import Loader
from gnnsys.loader.loader_guide import LoaderGuide, check_guide
from gnnsys.loader.node_inputs import NodeInputs
from gnnsys.loader.options import PipelineOptions, check_seed
from gnnsys.loader.padding import Padding, PadSizes, as_pad_sizes
from gnnsys.loader.planned import GraphPlaces
from gnnsys.loader.planned_execution import OtherWays, options_given
from gnnsys.loader.reserved import node_names
from gnnsys.loader.row_cache import fill_caches
from gnnsys.loader.sample_stages import SampleByBoth, SampleFunction, SampleStage, check_node_sampler, make_sample_stage
from gnnsys.loader.sampling_options import DrawOptions, check_can_pad, check_typed
from gnnsys.loader.schedule import Schedule
from gnnsys.ops import hop_workspaces
from gnnsys.pipeline import Stage
from gnnsys.planning import ExecutionPlan, Way
from gnnsys.sampling import DistGraph, EdgeFilter, NeighborSampler, Sampler, batch_visits, seeds_alone
from gnnsys.seeds import InputIds, InputNodes

_log = logging.getLogger(__name__)


class NeighborLoader(Loader):
    """Batches of `batch_size` seed nodes, each with `num_neighbors[h]` neighbours of every node at hop h.

    `graph` is in memory, or what `gnnsys.open` returns. `input_nodes`: ids, a bool mask or the name of one, a list or a
    range; in a heterogeneous graph a node type or (node type, any of these), or a dict of these by node type: a batch
    then has seeds of several types, each with its own `batch_size` and `input_id`; None: all nodes. Or this rank's
    share, as `gnnsys.split` returns it: then every rank has the same number of batches, of nearly equal sizes. On parts
    ids and masks without a name carry their numbering: `graph.from_original(ids)`.
    `num_neighbors`: one number per hop (-1: all), or a list per edge type. `input_time` is the seeds' time under
    temporal sampling (default: their own `time_attr`). `sampler`: any `gnnsys.sampling.Sampler`, or a function of
    the user's own (`SampleFunction`), instead of `num_neighbors` and the options that say how to draw. `guide`: a
    `gnnsys.explain.Guide`, by which less is read of other parts (docs/explanation.md). `edge_mask`: the only edges that
    are sampled, by the name of a mask of edges or by `gnnsys.split_links`.
    Everything random is a function of (seed, epoch, batch). Further options: see `Loader`.

    `device`: where batches arrive. A graph on a GPU (`graph.to("cuda")`) is sampled and gathered from there, by default
    for batches there; so is one in pinned memory (`graph.pin_memory()`) for `device="cuda"`. Of any other graph batches
    are made on the host and copied ahead. The batches are the same.

    `pad`: batches are padded to a few sizes, so that a step can be captured once per size (`gnnsys.cuda.capture`).
    Results for the seeds stay the same. `batch.seed_mask` tells seeds from padding; see `PadSizes` and docs/gpu.md.

    `shuffle="adaptive"`: batches in the order of `input_nodes` until what you `observe` after each epoch stops rising,
    and shuffled from the next epoch on, on all ranks: docs/shuffle.md.

    `execution="auto"` tries where the graph is best kept for a GPU, or how many cores should load on the host, during
    the first batches of training, and goes on with what was fastest: `loader.plan`, docs/planning.md. The batches are
    the same. With `model` also whether sums of its first layer are made by the loader, from the graph's rows: then
    `batch.x` has all rows for whoever asks, and the layer takes its sums; or whether the host multiplies rows by the
    first layer's weights, and only products go to the GPU. `staleness=k` lets these be made of the weights of k batches
    before, ahead of their step; 0 is exact.

    `samplers`: whether batches are made by the samplers that `gnnsys.open` was given, or its plan has for this rank; by
    default where they can be, True says why where they cannot. The batches are the same (docs/samplers_elsewhere.md).

    >>> loader = NeighborLoader(graph, [15, 10], input_nodes=train_ids, batch_size=1024, shuffle=True)
    >>> for batch in loader:
    ...     out = model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    @knows_words(instead=OF_TORCH)
    def __init__(
        self,
        graph: Graph | DistGraph,
        num_neighbors: NumNeighbors | None = None,
        *,
        input_nodes: InputNodes = None,
        input_time: Tensor | Mapping[NodeType, Tensor] | None = None,
        batch_size: int = 1,
        shuffle: bool | str = False,
        drop_last: bool = False,
        seed: int = 0,
        replace: bool = False,
        subgraph_type: str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        expand: str = "new",
        edge_mask: str | EdgeFilter | None = None,
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
        execution: str | ExecutionPlan | None = None,
        model: nn.Module | None = None,
        staleness: int = 0,
        samplers: bool | None = None,
        _way: Way | None = None,
    ) -> None:
        given = options_given(locals())
        seed = check_seed(seed)
        check_ours(graph)
        check_staleness(staleness, model, _way if execution is None else execution)
        if model is not None and execution is None and _way is None:
            raise ValueError('model is read by plans alone: give execution="auto" as well, or leave model away')
        if execution is not None and pad:
            raise ValueError("sizes that batches are padded to are found by one way: leave execution or pad away")
        sizes = as_pad_sizes(pad)
        if sizes is not None:
            check_can_pad(sampler or guide, subgraph_type, expand)
        if isinstance(input_nodes, Mapping):
            check_typed(sampler, guide, pad)
        inputs = NodeInputs(graph, input_nodes, input_time, time_attr)
        draws = DrawOptions(
            replace=replace, subgraph_type=subgraph_type, disjoint=disjoint, temporal_strategy=temporal_strategy,
            time_attr=time_attr, weight_attr=weight_attr, expand=expand, edge_mask=edge_mask,
        )  # fmt: skip
        schedule = Schedule(len(inputs), batch_size, shuffle, drop_last, seed, inputs.largest)
        target = resolve(device, graph)
        if num_neighbors is not None:  # before parts and caches take what is left
            room = promise_batches(
                graph, target, num_neighbors, inputs.most_in_batch(batch_size), names=fetch, num_threads=num_threads,
                prefetch=prefetch, disjoint=draws.has_trees, subgraph_type=subgraph_type, expand=expand,
            )  # fmt: skip
            if room is not None:
                room.keep_for(self)
        where = sampled_on(graph, target)
        made: NeighborSampler | None = None  # by num_neighbors
        if guide is not None:
            check_guide(guide, sampler, num_neighbors, is_plain=draws.are_default and inputs.time is None)
            made = guide.make_sampler(graph, num_neighbors, inputs.all_ids(), schedule)
        elif sampler is None:
            if num_neighbors is None:
                raise ValueError("num_neighbors must be given, a fanout per hop, unless you bring your own sampler")
            made = draws.make_sampler(graph, num_neighbors, where)
            alone = seeds_alone(made.fanouts)
            if _way is None and expand == "new" and alone is not None:
                _log.warning("%s", alone)
        elif num_neighbors is not None or not draws.are_default:
            raise ValueError("your sampler decides what is sampled: leave num_neighbors and options of ours away")
        chosen: Any = sampler if made is None else made
        check_node_sampler(chosen, graph, inputs)
        can_foresee = made is not None and isinstance(inputs.ids, InputIds) and len(inputs) > 0  # which rows are read
        visits = _Visits(made, num_neighbors, inputs, batch_size) if can_foresee else None
        if visits is not None and isinstance(graph, DistGraph) and target is not None:
            fill_caches(graph, target, visits, fetch)
        sample = make_sample_stage(graph, chosen, inputs, subgraph_type, seed, where)
        is_ours = guide is None and sampler is None
        name, drawn = "a user's own", {}
        if isinstance(chosen, Sampler):
            name, drawn = type(chosen).__name__, chosen.options()
        options = {"input_nodes of type": inputs.types, "sampler": None if is_ours else name, **drawn}
        if is_ours:
            options["subgraph_type"] = subgraph_type
        has_trees = bool(drawn.get("disjoint")) or drawn.get("time_attr") is not None
        own_names = (*node_names(has_trees, inputs.has_times), *getattr(chosen, "gives", ()))
        if sizes is not None:
            sample, own_names = Padding(sample, schedule, sizes), (*own_names, "seed_mask")
        on_host: SampleStage | None = None  # what the host draws for the device, or could
        if made is not None and is_ours and graph.device.type == "cpu" and (execution is not None or _way is not None):
            drawn_there = draws.make_sampler(graph, num_neighbors, None)  # type: ignore[arg-type]
            on_host = make_sample_stage(
                graph, drawn_there, inputs, subgraph_type, seed, None if _way is None else where
            )
        is_by_both = _way is not None and any(_way.by_host) and on_host is not None and where is not None
        if is_by_both:
            sample = SampleByBoth(sample, on_host, schedule, _way.by_host)  # type: ignore[arg-type, union-attr]
        sums: FirstSums | str = "no plan asks for them"
        if execution is not None or (_way is not None and any(_way.sums)):
            pattern = (True,) if _way is None else _way.sums
            sums = sums_for(graph, model, fetch, pattern, pin=target is not None, has_stages=bool(stages))
        if _way is not None and isinstance(sums, str) and any(_way.sums):
            raise ValueError(f"sums of the first layer cannot be made: {sums}")
        products: FirstProducts | str = "no plan asks for them"
        if execution is not None or (_way is not None and any(_way.products)):
            products = products_for(
                graph, model, fetch, (True,) if _way is None else _way.products, for_device=target is not None,
                staleness=staleness if num_threads != 0 else 0, has_stages=bool(stages),
            )  # fmt: skip
        if _way is not None and isinstance(products, str) and any(_way.products):
            raise ValueError(f"products of the first layer cannot be made by the host: {products}")
        ranks = inputs.ranks()
        elsewhere: Callable[[Fetch], BatchesElsewhere | None] | None = None
        if (samplers or (samplers is None and getattr(graph, "samplers", None) is not None)) and _way is None:
            check_user_stages(stages)
            policy = None if pipeline is None else pipeline.policy
            own: dict[str, Any] = {
                "sampler": sampler,
                "guide": guide,
                "execution": execution,
                "pad": pad,
                "wire_dtype": wire_dtype,
            }
            own |= {"policy": policy, "edge_mask": edge_mask}
            why = undescribable(graph, target, where is not None, own, stages)
            elsewhere = _Elsewhere(graph, samplers is True, why, num_neighbors, draws, sample, schedule)
        super().__init__(
            graph,
            schedule,
            sample,
            ranks=ranks,
            identity=Identity(graph, inputs.told(ranks), options),
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
            sampler=chosen if isinstance(chosen, Sampler) and not is_ours else None,
            sums=sums if execution is None and isinstance(sums, FirstSums) else None,
            products=products if execution is None and isinstance(products, FirstProducts) else None,
            by_host=is_by_both,
            elsewhere=elsewhere,
        )
        self._planned_sampler = made if is_ours else None
        if guide is not None:
            guide.watch(self._fetch.counts, self._identity.state)
        if execution is not None:
            in_order = transform is not None or bool(stages) or guide is not None
            others = OtherWays(NeighborLoader, GraphPlaces(graph, target, visits), given)
            first = None
            if on_host is not None and len(schedule):
                first = FirstBatch(on_host, None if where is None else sample, schedule, sums, products)
            self._plan_execution(
                execution, others, visits, is_told_threads=num_threads is not None, is_in_order=in_order, first=first,
                sums=sums, products=products,
            )  # fmt: skip

    def planned_workspaces(self, num_nodes: Sequence[Sequence[int]], num_edges: Sequence[Sequence[int]]) -> list[int]:
        made = self._planned_sampler
        fanouts = None if made is None else made.plain_fanouts
        by_hop = all(num_edges) and len({len(each) for each in num_edges}) == 1
        if getattr(self.graph, "planned_place", "host") == "host" or fanouts is None or not by_hop:
            return super().planned_workspaces(num_nodes, num_edges)
        number = {t: i for i, t in enumerate(self.graph.node_types)}
        ends = [number[end] for src, _, dst in fanouts for end in (src, dst)]
        flat = [fanout for of_hops in fanouts.values() for fanout in of_hops]
        return hop_workspaces(ends, flat, num_nodes, num_edges)


class _Elsewhere:
    """Makes what asks samplers for a loader's batches, once it is known which rows these have; None where none can."""

    def __init__(
        self, graph: Graph | DistGraph, is_required: bool, why_not: str | None, num_neighbors: Any, draws: DrawOptions,
        sample: Any, schedule: Schedule,
    ) -> None:  # fmt: skip
        self._graph, self._is_required, self._why_not = graph, is_required, why_not
        self._num_neighbors, self._draws, self._sample, self._schedule = num_neighbors, draws, sample, schedule

    def __call__(self, fetch: Fetch) -> BatchesElsewhere | None:
        graph, why_not = self._graph, self._why_not
        peers: SamplerPeers | None = getattr(graph, "samplers", None)
        if peers is None:
            why_not = why_not or "gnnsys.open was given none, by samplers=N or by a plan"
        elif why_not is None:
            why_not = unreadable(cast(DistGraph, graph), fetch, self._draws.time_attr)
        if why_not is None and peers is not None:
            return BatchesElsewhere(peers, self._described(fetch), self._sample, fetch, self._schedule)
        if self._is_required:
            raise ValueError(f"samplers elsewhere cannot make these batches: {why_not}")
        if peers is not None:
            _log.info("batches are made here, and not by samplers: %s", why_not)
        return None

    def _described(self, fetch: Fetch) -> DescribedLoader:
        given, draws = self._num_neighbors, self._draws
        by_type = isinstance(given, Mapping)
        fanouts = [(tuple(t), tuple(map(int, c))) for t, c in given.items()] if by_type else list(map(int, given))
        return DescribedLoader(
            graph=graph_identity(self._graph),
            seed=self._schedule.seed,
            num_neighbors=tuple(fanouts),
            names=tuple((key, tuple(names)) for key, names in fetch.all_names().items()),
            replace=draws.replace,
            subgraph_type=draws.subgraph_type,
            disjoint=draws.has_trees,
            temporal_strategy=draws.temporal_strategy,
            time_attr=draws.time_attr,
            weight_attr=draws.weight_attr,
            expand=draws.expand,
            edge_mask=cast("str | None", draws.edge_mask),
        )


class _Visits:
    """How likely a batch is to hold each node, by what a loader was given; computed when it is asked for."""

    def __init__(self, sampler: Any, num_neighbors: Any, inputs: NodeInputs, batch_size: int) -> None:
        self._sampler, self._num_neighbors, self._inputs, self._batch_size = sampler, num_neighbors, inputs, batch_size
        self._found: dict[NodeType, Tensor] | None = None

    def __call__(self) -> dict[NodeType, Tensor]:
        if self._found is None:
            self._found = self._find()
        return self._found

    def _find(self) -> dict[NodeType, Tensor]:
        drawn = self._sampler.options()
        options = {name: drawn[name] for name in ("replace", "disjoint", "expand", "temporal_strategy")}
        return batch_visits(
            self._sampler.graph,
            self._num_neighbors,
            self._inputs.all_ids(),
            batch_size=self._batch_size,
            node_type=self._inputs.node_type,
            seed_time=self._inputs.time,
            weight=drawn["weight_attr"],
            time=drawn["time_attr"],
            **options,
        )
