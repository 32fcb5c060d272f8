"""Batches of a sampling loader: how many are on the device at a time, and how large the largest of many epochs is.

Batches differ in size. Their structure alone is drawn here, on the host, for some of them; no row is fetched. Sizes of
batches are sums over many seeds, so they are nearly normal. The largest of N has a quantile of its own:

    P(all of N <= size) = P(one <= size) ** N    =>    size = mean + deviation * z(confidence ** (1 / N))
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

from torch import Tensor

CONFIDENCE, NUM_EPOCHS = 0.99, 10
FEWEST_DRAWN, MOST_DRAWN, DRAW_SECONDS = 8, 96, 2.0
_EDGE_BYTES, _NODE_BYTES = 24, 8  # of its ends and its id; of its id
_NORMAL = NormalDist()


class HeldBatches(NamedTuple):
    """What a loader has on a device beside the batch that is trained on, as its `planned_use` tells."""

    waiting: int
    making: int
    sampling_bytes: int

    @property
    def lead(self) -> int:
        """So many steps before its own a batch is there."""
        return self.waiting + self.making


class BatchCounts(NamedTuple):
    """A batch's nodes per type and hop, the seeds first, and its edges per edge type and hop; in all where a sampler
    does not say what was found when. `is_whole`: it has as many seeds as others."""

    nodes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, ...], ...]
    is_whole: bool = True

    @property
    def num_nodes(self) -> int:
        return sum(map(sum, self.nodes))

    @property
    def num_edges(self) -> int:
        return sum(map(sum, self.edges))


@dataclass(frozen=True)
class LargestBatch:
    """The sizes of `num_drawn` batches in bytes, and a bound on the largest of `num_batches` that holds with
    `confidence`; it is as likely as not above `likely_bytes`. `factor` is the bound over the largest batch that an
    estimate has."""

    num_drawn: int
    mean_bytes: float
    deviation_bytes: float
    largest_drawn: int
    likely_bytes: int
    bound_bytes: int
    num_batches: int
    confidence: float
    factor: float


def held_batches(loader: Any, num_edges: int) -> HeldBatches:
    """Of a loader of ours; others are taken to have none on the device but the one that is trained on."""
    plan = getattr(loader, "planned_use", None)
    return HeldBatches(0, 0, 0) if plan is None else HeldBatches(*plan(num_edges))


def draw_last(loader: Any) -> BatchCounts | None:
    """An epoch's last batch, if it has fewer seeds than others; as `draw_batches`."""
    schedule = getattr(loader, "schedule", None)
    sample = None if schedule is None else _sampler(loader)
    if schedule is None or sample is None or len(schedule) <= _num_whole(schedule):
        return None
    return _counts(sample(len(schedule) - 1), is_whole=False)


def draw_batches(
    loader: Any, most: int = MOST_DRAWN, seconds: float = DRAW_SECONDS, fewest: int = FEWEST_DRAWN
) -> list[BatchCounts]:
    """The first batches of a loader of ours, in their order, structure alone; empty for any other.

    After `seconds` no more than `fewest` are drawn.
    """
    sample = _sampler(loader)
    if sample is None:
        return []
    drawn: list[BatchCounts] = []
    whole, per_epoch = _num_whole(loader.schedule), max(len(loader.schedule), 1)
    begun = time.perf_counter()
    for at in range(max(most, fewest)):
        if len(drawn) >= fewest and time.perf_counter() - begun > seconds:
            break
        drawn.append(_counts(sample(at), at % per_epoch < whole))
    return drawn


def _sampler(loader: Any) -> Callable[[int], Any] | None:
    """What draws the structure of batch `at` of a loader of ours, which has it drawn at once."""
    if not all(hasattr(loader, name) for name in ("stages_in_turn", "schedule", "row_bytes")):
        return None
    stages = {stage.name: stage for stage in loader.stages_in_turn()}
    if "schedule" not in stages or "sample" not in stages or stages["sample"].begin is not None:
        return None
    return lambda at: stages["sample"].run(stages["schedule"].run(loader.schedule.ticket(at))).sample


def _num_whole(schedule: Any) -> int:
    """Batches of an epoch that have as many seeds as others."""
    return max(1, schedule.num_inputs // max(schedule.batch_size, 1))


def _counts(sample: Any, is_whole: bool) -> BatchCounts:
    nodes = {t: [ids.numel()] for t, ids in sample.node.items()}
    edges = {t: [ends.numel()] for t, ends in sample.row.items()}
    if set(sample.num_sampled_nodes) >= set(nodes) and set(sample.num_sampled_edges) >= set(edges):
        nodes, edges = sample.num_sampled_nodes, sample.num_sampled_edges
    return BatchCounts(tuple(map(tuple, nodes.values())), tuple(map(tuple, edges.values())), is_whole)


def batch_size_bytes(drawn: Sequence[BatchCounts], row_bytes: int) -> list[int]:
    """What whole batches take: rows and ids of nodes, ends and ids of edges."""
    whole = [counts for counts in drawn if counts.is_whole]
    return [each.num_nodes * (row_bytes + _NODE_BYTES) + each.num_edges * _EDGE_BYTES for each in whole]


def largest_batch(
    drawn: Sequence[int], num_traced: int, num_batches: int, confidence: float = CONFIDENCE, is_likely: bool = False
) -> LargestBatch | None:
    """A bound on the largest of `num_batches`, from the sizes of some; None from fewer than four.

    `is_likely`: an estimate has the likely largest one, and not only those that were traced.
    Half of what may go wrong is left to the deviation, which is known from a few batches only: its upper limit is used.

    >>> largest_batch([100, 104, 96, 102, 98, 100], 2, 1000).bound_bytes
    126
    """
    if len(drawn) < 4:
        return None
    risk = (1 - confidence) / 2
    deviation = stdev(drawn) * math.sqrt((len(drawn) - 1) / _chi_square(len(drawn) - 1, risk))
    mean = fmean(drawn) + deviation / math.sqrt(len(drawn))
    bound = mean + deviation * _NORMAL.inv_cdf((1 - risk) ** (1 / max(num_batches, 1)))
    bound = max(bound, max(drawn))
    likely = fmean(drawn) + stdev(drawn) * _NORMAL.inv_cdf(0.5 ** (1 / max(num_batches, 1)))
    traced = max(drawn[: max(num_traced, 1)])
    counted = max(likely, *drawn) if is_likely else traced
    return LargestBatch(
        num_drawn=len(drawn), mean_bytes=fmean(drawn), deviation_bytes=stdev(drawn), largest_drawn=max(drawn),
        likely_bytes=int(likely), bound_bytes=int(bound), num_batches=num_batches, confidence=confidence,
        factor=bound / counted,
    )  # fmt: skip


def placed_tensors(loader: Any) -> Iterator[tuple[Tensor, str]]:
    """(tensor, name) of what a loader's graph has on the device: structure, rows that were moved there, caches.

    A pinned graph's structure is copied to the device that samples it.
    """
    graph = getattr(loader, "graph", None)
    place = getattr(graph, "planned_place", "host")
    if graph is None or not hasattr(graph, "edge_types") or not hasattr(graph, "node_data"):
        return
    if place != "host" and hasattr(graph, "csc"):
        for edge_type in graph.edge_types:
            csc = graph.csc(edge_type)
            for name in ("indptr", "indices", "edge_ids"):
                if isinstance(getattr(csc, name, None), Tensor):
                    yield getattr(csc, name), f"graph.{name}"
    yield from ((rows, f"copy.{name}") for name, rows in getattr(loader, "planned_copies", dict)().items())
    for arrays in [*graph.node_data.values(), *getattr(graph, "edge_data", {}).values()]:
        for name, values in arrays.items():
            if isinstance(values, Tensor):
                if place == "device":
                    yield values, f"graph.{name}"
            elif hasattr(values, "on_device"):
                yield from ((tensor, f"cache.{name}") for tensor in values.on_device())


def _chi_square(freedom: int, below: float) -> float:
    """The quantile of chi-square, by Wilson and Hilferty: within 1% from three degrees of freedom on."""
    part = 2 / (9 * freedom)
    return float(freedom * max(1 - part + _NORMAL.inv_cdf(below) * math.sqrt(part), 0.05) ** 3)
