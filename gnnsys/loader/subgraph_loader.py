"""SubgraphLoader: mini-batches of subgraphs, from clusters or drawn at random, by any `SubgraphSampler`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gnnsys.graph import Graph, IdsLike, chosen_ids
from gnnsys.loader.batch import Batch
from gnnsys.loader.device_copy import resolve, sampled_on
from gnnsys.loader.fetch import Names
from gnnsys.loader.identity import Identity, graph_identity
from gnnsys.loader.known_words import OF_TORCH, knows_words
from gnnsys.loader.loader import Loader
from gnnsys.loader.options import PipelineOptions, check_seed
from gnnsys.loader.planned import GraphPlaces
from gnnsys.loader.planned_execution import OtherWays, options_given
from gnnsys.loader.reserved import node_names
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.partition import Placement
from gnnsys.pipeline import Stage
from gnnsys.planning import ExecutionPlan
from gnnsys.sampling import DistGraph, Sample, SampleKey, SubgraphSampler
from gnnsys.seeds import IdRange, InputIds, Ranks, Share, assign_shares, owners


class SubgraphLoader(Loader):
    """Batches of `batch_size` inputs of `sampler` each: clusters of a `ClusterSampler`, one subgraph of a GraphSAINT
    sampler.

    `inputs` are numbers in [0, sampler.num_inputs). None: all of them on one rank; with several ranks this rank's
    share, of equal numbers of batches on every rank. Of clusters each rank gets those of its own part, and its batches
    then ask no other machine for anything. `batch.input_id` says which of the inputs a batch is made of.
    Everything random is a function of (seed, epoch, batch). Further options: see `Loader`. `execution="auto"` tries how
    many cores should load on the host; a sampler is bound to its graph, which stays where it is (docs/planning.md).

    >>> sampler = gnnsys.sampling.ClusterSampler(graph, gnnsys.sampling.cluster(graph, 100))
    >>> for batch in SubgraphLoader(graph, sampler, batch_size=10, shuffle=True):
    ...     out = model(batch.x, batch.edge_index)
    """

    @knows_words(instead=OF_TORCH)
    def __init__(
        self,
        graph: Graph | DistGraph,
        sampler: SubgraphSampler,
        *,
        inputs: IdsLike | None = None,
        batch_size: int = 1,
        shuffle: bool | str = False,
        drop_last: bool = False,
        seed: int = 0,
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
        if not isinstance(sampler, SubgraphSampler):
            raise ValueError(
                f"sampler must be a SubgraphSampler, such as ClusterSampler, got {type(sampler).__name__}: samplers of "
                "seeds go with NeighborLoader"
            )
        if sampler.graph is not graph and not (isinstance(graph, Graph) and graph.is_copy_of(sampler.graph)):
            raise ValueError("sampler was made for another graph: make it with the one that the loader gets")
        sampler.check_batch_size(batch_size)
        share: _InputShare | None = None
        numbers: Tensor | IdRange
        if inputs is None:
            share = _share(sampler)
            numbers = share.ids
        else:
            numbers = chosen_ids(inputs, sampler.num_inputs, "inputs", "input").long().cpu()
        if not len(numbers) and (share is None or not share.largest):
            raise ValueError("inputs is empty: nothing to make batches of")
        chosen = InputIds(numbers)
        target = resolve(device, graph)
        where = sampled_on(graph, target) or torch.device("cpu")
        if sampler.device != where:
            raise ValueError(
                f"sampler makes samples on {sampler.device}, the loader needs them on {where}: pass device="
            )
        schedule = Schedule(len(chosen), batch_size, shuffle, drop_last, seed, None if share is None else share.largest)
        ranks = Ranks(graph, share, chosen)
        options = {"sampler": type(sampler).__name__, **sampler.options()}
        super().__init__(
            graph,
            schedule,
            _SampleSubgraph(sampler, chosen, seed),
            ranks=ranks,
            identity=Identity(graph, ranks.told_inputs, options),
            own_names=(*node_names(False, False), *sampler.gives),
            transform=transform,
            num_threads=num_threads,
            prefetch=prefetch,
            device=target or "cpu",
            across_epochs=across_epochs,
            fetch=fetch,
            wire_dtype=wire_dtype,
            stages=stages,
            pipeline=pipeline,
            sampler=sampler,
        )
        if execution is not None:
            in_order = transform is not None or bool(stages)
            others = OtherWays(SubgraphLoader, GraphPlaces(graph, target, None), given)
            self._plan_execution(execution, others, None, is_told_threads=num_threads is not None, is_in_order=in_order)


class _SampleSubgraph:
    """The sample stage: from chosen inputs to their subgraph."""

    def __init__(self, sampler: SubgraphSampler, inputs: InputIds, seed: int) -> None:
        self._sampler, self._inputs, self._seed = sampler, inputs, seed

    def __call__(self, ticket: Ticket, chosen: Tensor) -> Sampled:
        numbers = self._inputs[chosen]
        sample = self._sampler.sample(numbers, key=SampleKey(self._seed, ticket.epoch, ticket.batch))
        if not isinstance(sample, Sample):
            raise ValueError(f"a sampler must return a gnnsys.sampling.Sample, got {type(sample).__name__}")
        node_type = self._sampler.graph.node_types[0]
        return Sampled(sample, node_type, {node_type: {"input_id": chosen}})


@dataclass(eq=False)
class _InputRecipe:
    """How the inputs of a sampler were shared among ranks: a `ShareRecipe`."""

    counts: Sequence[int]  # by subpart
    placement: Placement
    trainers_per_part: int
    shares: Sequence[range]
    digest: str

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def machine_of_rank(self) -> Sequence[int]:
        return self.placement.machine_of_rank

    def owners(self, numbers: range) -> list[tuple[int, range]]:
        return owners(self.counts, self.placement, self.trainers_per_part, numbers)

    def chosen(self) -> _InputRecipe:
        return self

    def ids(self, first: int, end: int) -> IdRange:
        return IdRange(first, end)


@dataclass(eq=False)
class _InputShare:
    """This rank's inputs: a `Share`."""

    ids: IdRange
    type: str
    largest: int
    recipe: _InputRecipe


def _share(sampler: SubgraphSampler) -> _InputShare:
    """This rank's inputs among those of all ranks, by where their subparts are."""
    graph = sampler.graph
    placement = getattr(graph, "placement", None)
    if placement is None:
        known = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
        placement = Placement(rank, (0,) * world_size, ())
    counts = sampler.inputs_by_subpart()
    in_parts = not isinstance(graph, Graph) and len(counts) == graph.book.num_subparts
    trainers = graph.book.trainers_per_part if in_parts and not isinstance(graph, Graph) else 1
    if not in_parts:  # inputs are nobody's: shares are equal ranges
        placement = Placement(placement.rank, placement.machine_of_rank, ())
    shares = assign_shares(counts, placement, trainers)
    mine = shares[placement.rank]
    told = json.dumps([type(sampler).__name__, counts, graph_identity(graph)])
    recipe = _InputRecipe(counts, placement, trainers, shares, hashlib.sha256(told.encode()).hexdigest())
    share = _InputShare(IdRange(mine.start, mine.stop), "inputs", max(map(len, shares)), recipe)
    assert isinstance(share, Share)
    return share
