"""LinkNeighborLoader: mini-batches of links with the sampled neighbourhoods of their ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, check_ours, check_rows_of_inputs
from gnnsys.loader.batch import Batch
from gnnsys.loader.batch_memory import NumNeighbors
from gnnsys.loader.device_copy import resolve, sampled_on
from gnnsys.loader.fetch import Names
from gnnsys.loader.given_links import InputLinks, resolve_inputs, resolve_reverse, resolve_typed_links
from gnnsys.loader.hard_negatives import ScoredNegatives
from gnnsys.loader.identity import Identity
from gnnsys.loader.known_words import OF_TORCH, knows_words
from gnnsys.loader.link_inputs import check_labels, give_weights, make_seeder
from gnnsys.loader.link_seeds import LinkSeeder
from gnnsys.loader.link_visits import LinkVisits, SampledVisits
from gnnsys.loader.links import EdgeInputs, Exclusion, LinkReader, Links
from gnnsys.loader.loader import Loader
from gnnsys.loader.loader_guide import LoaderGuide, check_guide
from gnnsys.loader.negatives import NegativeSampling, negative_stream
from gnnsys.loader.options import PipelineOptions, as_values, check_seed
from gnnsys.loader.planned import GraphPlaces, Visits
from gnnsys.loader.planned_execution import OtherWays, options_given
from gnnsys.loader.reserved import link_names
from gnnsys.loader.sample_stages import on_device
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.sampling_options import DrawOptions, check_sampler, check_times
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.loader.subgraph import shape_subgraph
from gnnsys.loader.typed_links import SampleTypedLinks, typed_link_names, typed_schedule
from gnnsys.pipeline import Stage
from gnnsys.planning import ExecutionPlan
from gnnsys.sampling import AnyGraph, EdgeFilter, NeighborSampler, SampleKey, Sampler, check_reverse_mask
from gnnsys.seeds import Ranks

_MOST_ENDS = 1 << 16  # that are looked up to see whom samples are for
LinkWeights: TypeAlias = "Tensor | Sequence[float] | str"


class LinkNeighborLoader(Loader):
    """Batches of `batch_size` links, with `num_neighbors[h]` neighbours of every node at hop h around their ends.

    `edge_label_index`: [2, num_links], an edge type, or (edge type, [2, num_links]); None: all edges; or a rank's share
    of the edges of a type (`gnnsys.split`); or a dict of these by edge type, and a batch has links of all of them, or
    of one in turn (`one_type_per_batch`); labels, and negatives if you like, are then dicts as well. On parts links
    carry their numbering, `graph.from_original([2, num_links])`; where links are edges of the parts, their ends are
    looked up batch by batch. With `neg_sampling` negatives are drawn beside them.

    A batch's own links are kept out of its message passing (`exclude_supervision`), as are their reverses: in a
    homogeneous graph the same edges the other way round, in a heterogeneous one those of `reverse_edge_type` (by
    default the type named `rev_...`, or its counterpart). `exclude_supervision="reverse"` insists that there is
    such a type, `"self"` leaves reverses in, and False leaves both in, as PyG does. `edge_mask`: the only edges that
    messages may pass, by the name of a mask of edges or by `gnnsys.split_links`, on parts too: held-out links are never
    sampled.

    `edge_label_weight`: what each link counts, finite floats >= 0 [num_links], or the name of an array of edges, which
    is read where they live. Batches have it by `edge_label_weight`, beside `edge_label`, with ones for negatives; of
    triplets it is beside `dst_pos_index`. What it weighs is up to your loss.

    `sampler`: any `gnnsys.sampling.Sampler` that can exclude edges, instead of `num_neighbors` and the options that say
    how to draw. `guide`: a `gnnsys.explain.Guide`, which explains the model that makes rows of nodes
    (docs/explanation.md).

    `execution="auto"` tries where the graph is best kept and how many cores should load, as `NeighborLoader` does:
    docs/planning.md.

    >>> loader = LinkNeighborLoader(graph, [10, 5], edge_label_index=train_links, neg_sampling="binary", batch_size=512)
    >>> for batch in loader:
    ...     src, dst = model(batch.x, batch.edge_index)[batch.edge_label_index]
    """

    @knows_words(instead=OF_TORCH)
    def __init__(
        self,
        graph: AnyGraph,
        num_neighbors: NumNeighbors | None = None,
        *,
        edge_label_index: InputLinks | Mapping[EdgeType, InputLinks] = None,
        edge_label: Tensor | Mapping[EdgeType, Tensor] | None = None,
        edge_label_time: Tensor | None = None,
        edge_label_weight: LinkWeights | Mapping[EdgeType, LinkWeights] | None = None,
        neg_sampling: NegativeSampling | str | Mapping[Any, Any] | None = None,
        exclude_supervision: bool | str = True,
        reverse_edge_type: EdgeType | None = None,
        one_type_per_batch: bool = False,
        edge_mask: str | EdgeFilter | None = None,
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
        execution: str | ExecutionPlan | None = None,
    ) -> None:
        given = options_given(locals())
        seed = check_seed(seed)
        check_ours(graph)
        draws = DrawOptions(
            replace=replace, subgraph_type=subgraph_type, disjoint=disjoint, temporal_strategy=temporal_strategy,
            time_attr=time_attr, weight_attr=weight_attr, expand=expand, edge_mask=edge_mask,
        )  # fmt: skip
        if guide is not None:
            check_guide(guide, sampler, num_neighbors, is_plain=draws.are_default and edge_label_time is None)
        if sampler is not None:
            if num_neighbors is not None or not draws.are_default:
                raise ValueError("your sampler decides what is sampled: leave num_neighbors and options of ours away")
            drawn = check_takes_links(sampler, graph)
            disjoint, time_attr = bool(drawn.get("disjoint")), drawn.get("time_attr")
        elif num_neighbors is None:
            raise ValueError("num_neighbors must be given, a fanout per hop, unless you bring your own sampler")
        if (edge_label_time is None) != (time_attr is None):
            raise ValueError("edge_label_time and time_attr go together: give both, or neither")
        target = resolve(device, graph)
        where = sampled_on(graph, target)
        rest: dict[str, Any] = {
            "transform": transform,
            "num_threads": num_threads,
            "prefetch": prefetch,
            "device": target or "cpu",
            "across_epochs": across_epochs,
            "fetch": fetch,
            "wire_dtype": wire_dtype,
            "stages": stages,
            "pipeline": pipeline,
            "sampler": sampler,
        }
        if isinstance(edge_label_index, Mapping):
            if guide is not None or disjoint or time_attr is not None or reverse_edge_type is not None:
                raise ValueError(
                    "links of several edge types go with neither guide, disjoint, times nor reverse_edge_type: their "
                    "reverses are found by name"
                )
            by = sampler or draws.make_sampler(graph, num_neighbors or (), where)
            links = resolve_typed_links(
                graph, by, edge_label_index, edge_label, edge_label_weight, neg_sampling, exclude_supervision
            )
            cut = (batch_size, shuffle, drop_last, seed)
            several = typed_schedule(links, *cut, in_turn=one_type_per_batch)
            options = {
                "edge_label_index of types": list(links),
                **({} if sampler is None else {"sampler": type(sampler).__name__}),
                **by.options(),
                "subgraph_type": subgraph_type,
                "exclude_supervision": exclude_supervision,
                "one_type_per_batch": one_type_per_batch,
                "neg_sampling": [of.seeder.told_negatives for of in links.values()],
                **_told_names(edge_label_weight),
            }
            sample_typed = SampleTypedLinks(graph, by, subgraph_type, links, seed, where)
            super().__init__(
                graph,
                several,
                sample_typed,
                ranks=Ranks(graph, None, None),
                identity=Identity(graph, [rows for of in links.values() for rows in of.told], options),
                own_names=(*typed_link_names(links), *by.gives),
                **rest,
            )
            foreseen = SampledVisits(graph, sample_typed, several) if sampler is None and len(several) else None
            self._plan_links(execution, foreseen, given, [of.negatives for of in links.values()])
            return
        if one_type_per_batch:
            raise ValueError(
                "one_type_per_batch is for links of several types: edge_label_index must be a dict by type"
            )
        if isinstance(edge_label, Mapping):
            raise ValueError("edge_label is by edge type, and edge_label_index is not: give both as a dict by type")
        if isinstance(edge_label_weight, Mapping):
            raise ValueError("edge_label_weight is by edge type, and edge_label_index is not: give both as a dict")
        edge_label, edge_label_time = as_values(edge_label, "edge_label"), as_values(edge_label_time, "edge_label_time")
        edge_label, edge_label_time = (None if of is None else of.cpu() for of in (edge_label, edge_label_time))
        negatives = NegativeSampling.cast(neg_sampling)
        check_times("edge_label_time", edge_label_time)
        check_rows_of_inputs(
            graph, edge_label_index, edge_label=edge_label, edge_label_time=edge_label_time,
            edge_label_weight=edge_label_weight,
        )  # fmt: skip
        edge_type, inputs, num_links, shares = resolve_inputs(
            graph, edge_label_index, check_labels(negatives, edge_label), edge_label_time
        )
        for name, values in (("edge_label", edge_label), ("edge_label_time", edge_label_time)):
            if values is not None and values.shape[0] != num_links:
                raise ValueError(f"{name} must have one entry per link, {num_links}, got {values.shape[0]}")
        weights = give_weights(graph, edge_type, inputs, num_links, edge_label_weight)
        by_link = {"edge_label": edge_label, "edge_label_time": edge_label_time, "edge_label_weight": weights}
        own = [name for name, of in by_link.items() if of is not None]
        ids = inputs.ids if isinstance(inputs, EdgeInputs) else None
        disjoint = disjoint or time_attr is not None
        schedule = Schedule(num_links, batch_size, shuffle, drop_last, seed, **shares)
        if guide is not None:
            sampler = guide.make_sampler(graph, num_neighbors, _some_ends(inputs, num_links), schedule)
            rest["sampler"] = sampler
        chosen = sampler
        if chosen is None:
            assert num_neighbors is not None
            chosen = draws.make_sampler(graph, num_neighbors, where)
        seeder = make_seeder(graph, edge_type, negatives, disjoint, time_attr, num_links, inputs.has_edge_ids)
        reverse_edge_type = resolve_reverse(graph, edge_type, reverse_edge_type, exclude_supervision)
        if isinstance(edge_mask, str):
            check_reverse_mask(edge_mask, edge_type, reverse_edge_type, graph.edge_data)
        exclude = Exclusion(chosen, edge_type, reverse_edge_type) if exclude_supervision else None
        sample = _SampleLinks(graph, chosen, seeder, subgraph_type, inputs, exclude, seed, where)
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
            **_told_names(edge_label_weight),
        }
        super().__init__(
            graph,
            schedule,
            sample,
            ranks=ranks,
            identity=Identity(
                graph, [*ends, edge_label, edge_label_time, *([] if weights is None else [weights])], options
            ),
            own_names=(
                *link_names(
                    disjoint,
                    negatives,
                    is_labelled=edge_label is not None,
                    is_timed=edge_label_time is not None,
                    is_weighted=edge_label_weight is not None,
                ),
                *chosen.gives,
            ),
            **rest,
        )
        if guide is not None:
            guide.watch(self._fetch.counts, self._identity.state)
        visits = None
        if sampler is None and num_neighbors is not None and len(schedule):
            assert isinstance(chosen, NeighborSampler)
            visits = LinkVisits(
                graph, sample, schedule, sampler=chosen, num_neighbors=num_neighbors, inputs=inputs, seeder=seeder
            )
        self._plan_links(execution, visits, given, [negatives])

    def _plan_links(
        self,
        execution: str | ExecutionPlan | None,
        visits: Visits | None,
        given: Mapping[str, Any],
        negatives: Sequence[NegativeSampling | None],
    ) -> None:
        if execution is None:
            return
        target = None if self._device.type == "cpu" else self._device
        own = given["transform"] is not None or given["stages"] or given["guide"] is not None
        self._plan_execution(
            execution,
            OtherWays(LinkNeighborLoader, GraphPlaces(self.graph, target, visits), given),
            visits,
            is_told_threads=given["num_threads"] is not None,
            is_in_order=bool(own) or any(map(_calls_the_user, negatives)),
        )


def _calls_the_user(negatives: NegativeSampling | None) -> bool:
    """Whether negatives are scored by a function of the user's: what it knows may change from batch to batch."""
    kind = None if negatives is None else negatives.kind
    return isinstance(kind, ScoredNegatives) or isinstance(getattr(kind, "of", None), ScoredNegatives)


def _told_names(weights: Any) -> dict[str, Any]:
    """Names of arrays that links are weighed by, for a loader's state; numbers are told with the links."""
    by_type = list(weights.items()) if isinstance(weights, Mapping) else [(None, weights)]
    named = [name if of is None else [of, name] for of, name in by_type if isinstance(name, str)]
    return {"edge_label_weight": named} if named else {}


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
        inputs: LinkReader,
        exclusion: Exclusion | None,
        seed: int,
        device: torch.device | None,
    ) -> None:
        self._graph = graph
        self._sampler = sampler
        self._seeder = seeder
        self._subgraph_type = subgraph_type
        self._inputs = inputs
        self._exclusion = exclusion
        self._seed, self._device = seed, device

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        asked = self._inputs.begin(chosen)
        key = SampleKey(self._seed, ticket.epoch, ticket.batch)
        seeds = self._seeder(asked, negative_stream(key), self._exclusion)
        sample = self._sampler.sample(
            seeds.seeds,
            key=key,
            seed_time=seeds.seed_time,
            tree=seeds.tree,
            exclude=seeds.exclude,
        )
        if sample.tree is not None:
            sample.tree = seeds.owners(sample.tree)
        sample = shape_subgraph(sample, self._graph, self._subgraph_type, seeds.exclude)
        edge_type = self._seeder.edge_type
        sampled = Sampled(sample, edge_type, seeds.by_type(edge_type, asked.input_id))
        return on_device(sampled, self._device)
