"""How often batches will fetch each node's row: what a cache of rows is filled by. Pure functions on arrays.

`expected_visits` is computed from the graph, the fanouts and the seeds (the vertex-inclusion-probability analysis of
SALIENT++, Kaler et al. 2023, section 3); `presampled_visits` counts, for samplers that this does not describe
(weighted, in time, typed, layer-wise); `degree_visits` is the baseline that knows neither seeds nor fanouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import NodeType
from gnnsys.ops import CSC, degrees
from gnnsys.sampling.neighbor import NeighborSampler, SampleKey
from gnnsys.sampling.sample import Sample

_EDGES = 1 << 24  # looked at together: bounds the memory at 8 bytes for each


def expected_visits(
    csc: CSC, fanouts: Sequence[int], seeds: Tensor, *, batch_size: int, replace: bool = False
) -> Tensor:
    """The probability that a batch holds each node, float64 [num_nodes]: the expected number of batches, out of all,
    that fetch its row.

    A batch's seeds are drawn uniformly from `seeds`, and its hops take the in-neighbours of what the hop before found:

        p_0(v) = batch_size / num_seeds, for a seed
        p_h(u) = 1 - prod over edges u -> v of (1 - p_{h-1}(v) t_h(v))
        t_h(v) = min(1, fanout_h / in_degree(v)), or 1 - (1 - 1 / in_degree(v))^fanout_h with replacement
        visits(u) = 1 - prod over hops h of (1 - p_h(u))

    Hops are joined by the product and not by their sum, because a batch fetches a row once, however many of its hops
    find the node. The recurrence takes what happens to different nodes for independent, which it nearly is where
    batches are small parts of the graph. Products are sums of logarithms in float64; O(num_edges) per hop, on the
    device of the CSC.

    >>> chain = CSC(torch.tensor([0, 2, 2, 2]), torch.tensor([1, 2]), 3)  # 1 -> 0 and 2 -> 0
    >>> expected_visits(chain, [1], torch.tensor([0]), batch_size=1)
    tensor([1.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    if csc.num_src != csc.num_dst:
        raise ValueError(
            f"csc must have as many sources as destinations, got {csc.num_src} and {csc.num_dst}: use "
            "presampled_visits for graphs with several node types"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    found = _seed_probability(csc, seeds, batch_size)
    log_missed = _log_of_rest(found)
    in_degrees = csc.in_degrees()
    for fanout in fanouts:
        found = -torch.expm1(_sum_over_out_edges(csc, _log_of_rest(found * _taken(in_degrees, fanout, replace))))
        log_missed += _log_of_rest(found)
    return -torch.expm1(log_missed)


def presampled_visits(
    batches: Iterable[Any], num_batches: int, *, num_nodes: int, node_type: NodeType | None = None
) -> Tensor:
    """How many of the first `num_batches` of `batches` hold each node, as a share of them, float64 [num_nodes].

    `batches` is a loader, whose batches name their nodes as `n_id`, or an iterable of Samples (`sample_batches`). A
    loader is iterated, which uses an epoch of it up: pass one of its own. Of several node types, `node_type` names the
    one that is counted.
    """
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, got {num_batches}")
    count = 0
    visits = torch.zeros(num_nodes, dtype=torch.float64, device="cpu")
    for batch in islice(batches, num_batches):
        visits[_nodes(batch, node_type).cpu().long().unique()] += 1  # trees of their own may hold a node twice
        count += 1
    return visits / max(count, 1)


def degree_visits(csc: CSC) -> Tensor:
    """Out-degrees, float64 [num_nodes]: visits as if every edge were as likely to be taken as any other."""
    return degrees(csc.indices, csc.num_src).double()


def sample_batches(
    sampler: NeighborSampler, seeds: Tensor, batch_size: int, *, node_type: NodeType | None = None, seed: int = 0
) -> Iterator[Sample]:
    """Samples of shuffled batches of `seeds`, epoch after epoch, without end: what `presampled_visits` may count."""
    node_type = sampler.graph.node_types[0] if node_type is None else node_type
    if seeds.numel() == 0:
        raise ValueError("seeds must not be empty")
    generator = torch.Generator().manual_seed(seed)
    epoch = 0
    while True:
        shuffled = seeds[torch.randperm(seeds.numel(), generator=generator, device="cpu")]
        for batch, some in enumerate(shuffled.split(batch_size)):
            yield sampler.sample({node_type: some}, key=SampleKey(seed, epoch, batch))
        epoch += 1


def _seed_probability(csc: CSC, seeds: Tensor, batch_size: int) -> Tensor:
    """p_0; a seed that is given several times is so many times as likely."""
    if seeds.dim() != 1 or seeds.dtype not in (torch.int32, torch.int64) or seeds.numel() == 0:
        raise ValueError(f"seeds must be ids, int32 or int64 [num_seeds], got {list(seeds.shape)} {seeds.dtype}")
    if not 0 <= int(seeds.min()) <= int(seeds.max()) < csc.num_dst:
        raise ValueError(f"seeds must be in [0, {csc.num_dst}), got {int(seeds.min())} to {int(seeds.max())}")
    share = min(1.0, batch_size / seeds.numel())
    counts = torch.zeros(csc.num_dst, dtype=torch.float64, device=csc.indptr.device)
    seeds = seeds.to(counts.device).long()
    counts.index_add_(0, seeds, torch.ones_like(seeds, dtype=torch.float64))
    return (counts * share).clamp(max=1.0)


def _taken(in_degrees: Tensor, fanout: int, replace: bool) -> Tensor:
    """t_h: the probability that a node's draw takes a given one of its in-edges."""
    if fanout < 0:
        return torch.ones_like(in_degrees, dtype=torch.float64)
    in_degrees = in_degrees.double().clamp(min=1.0)
    if replace:
        return -torch.expm1(fanout * torch.log1p(-1.0 / in_degrees)) if fanout else torch.zeros_like(in_degrees)
    return (fanout / in_degrees).clamp(max=1.0)


def _log_of_rest(probability: Tensor) -> Tensor:
    """log(1 - p), -inf where it is certain."""
    return torch.log1p(-probability.clamp(max=1.0))


def _sum_over_out_edges(csc: CSC, values: Tensor) -> Tensor:
    """Of every source u, the sum of `values` of the destinations of its edges; some columns at a time."""
    total = torch.zeros(csc.num_src, dtype=torch.float64, device=values.device)
    ends = csc.indptr.cpu()
    first = 0
    while first < csc.num_dst:
        last = int(torch.searchsorted(ends, int(ends[first]) + _EDGES, right=True)) - 1
        last = min(max(last, first + 1), csc.num_dst)
        begin, end = int(ends[first]), int(ends[last])
        of_edge = values[first:last].repeat_interleave(csc.indptr[first : last + 1].diff(), output_size=end - begin)
        total.index_add_(0, csc.indices[begin:end], of_edge)
        first = last
    return total


def _nodes(batch: Any, node_type: NodeType | None) -> Tensor:
    """Ids of the nodes of a Sample, or of a loader's batch."""
    if isinstance(batch, Sample):
        if node_type is None and len(batch.node) > 1:
            raise ValueError(f"node_type must name one of {list(batch.node)}")
        return batch.node[next(iter(batch.node)) if node_type is None else node_type]
    return (batch if node_type is None else batch[node_type]).n_id
