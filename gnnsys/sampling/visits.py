"""How often batches will fetch each node's row: what a cache of rows is filled by. Pure functions on arrays.

`expected_visits` is computed from the graph, the fanouts and the seeds (the vertex-inclusion-probability analysis of
SALIENT++, Kaler et al. 2023, section 3); `presampled_visits` counts, for samplers that this does not describe
(weighted, in time, typed, layer-wise); `batch_visits` takes the one or the other, as the sampler needs; `degree_visits`
is the baseline that knows neither seeds nor fanouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import Graph, NodeType
from gnnsys.ops import CSC, degrees
from gnnsys.sampling.dist_graph import DistGraph
from gnnsys.sampling.fanouts import Fanouts, check_fanouts
from gnnsys.sampling.neighbor import NeighborSampler, SampleKey
from gnnsys.sampling.neighborhoods import AnyGraph
from gnnsys.sampling.part_visits import HOST_PIECE, PartedSums, add_hop, log_of_rest
from gnnsys.sampling.sample import Sample

_EDGES = 1 << 24  # looked at together on a device: bounds the memory at 16 bytes for each


def expected_visits(
    csc: CSC | DistGraph, fanouts: Sequence[int], seeds: Tensor, *, batch_size: int, replace: bool = False
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

    An opened graph may stand in place of the CSC: seeds and result are then by global id, on the host, and each part
    adds up its own edges, where it lies. Per hop 8 bytes go to another machine for every node of its parts, and 8 come
    back for every node and halo node; so much is held here, too. Which machine has which part changes no bit of the
    result.

    >>> chain = CSC(torch.tensor([0, 2, 2, 2]), torch.tensor([1, 2]), 3)  # 1 -> 0 and 2 -> 0
    >>> expected_visits(chain, [1], torch.tensor([0]), batch_size=1)
    tensor([1.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    sums: Callable[[Tensor, int, bool], Tensor]
    if isinstance(csc, DistGraph):
        fanouts = _fanouts_of_one_type(csc, fanouts)
        num_nodes, device, sums = csc.num_nodes(), torch.device("cpu"), PartedSums(csc)
    elif csc.num_src != csc.num_dst:
        raise ValueError(
            f"csc must have as many sources as destinations, got {csc.num_src} and {csc.num_dst}: use "
            "presampled_visits for graphs with several node types"
        )
    else:
        num_nodes, device, sums = csc.num_dst, csc.indptr.device, partial(_sum_over_out_edges, csc)
    _check_batch_size(batch_size)
    found = _seed_probability(num_nodes, seeds, batch_size, device)
    log_missed = log_of_rest(found)
    for fanout in fanouts:
        found = -torch.expm1(sums(found, fanout, replace))
        log_missed += log_of_rest(found)
    return -torch.expm1(log_missed)


def batch_visits(
    graph: AnyGraph,
    fanouts: Fanouts,
    seeds: Tensor,
    *,
    batch_size: int,
    node_type: NodeType | None = None,
    num_batches: int = 32,
    seed_time: Tensor | None = None,
    **options: Any,
) -> dict[NodeType, Tensor]:
    """The probability that a loader's batch holds each node, by node type, float64 [num_nodes] on the host: what the
    rows of a cache are chosen by. The same for the same arguments, wherever the graph lies.

    `seeds` are of `node_type`; `options` are those of `NeighborSampler`. A graph with one node type and one edge type
    that is drawn from uniformly has `expected_visits`. Anything else is sampled: as many batches as an epoch has,
    `num_batches` at most, are counted.
    """
    _check_batch_size(batch_size)
    node_type = _only_type(graph) if node_type is None else node_type
    if isinstance(graph, DistGraph):
        options = {"device": "cpu", **options}  # nothing of a device is used before its cache is there
    sampler = NeighborSampler(graph, fanouts, **options)
    drawn = sampler.options()
    is_plain = not sampler.disjoint and sampler.expand == "new" and drawn["weight_attr"] is None
    if is_plain and len(graph.node_types) == len(graph.edge_types) == 1:
        structure = graph.csc(graph.edge_types[0]) if isinstance(graph, Graph) else graph
        per_hop, replace = drawn["num_neighbors"], sampler.replace
        return {node_type: expected_visits(structure, per_hop, seeds, batch_size=batch_size, replace=replace).cpu()}
    if num_batches < 1 or not seeds.numel():
        raise ValueError(
            f"there must be seeds, and a batch to count, got {seeds.numel()} and num_batches={num_batches}"
        )
    num_batches = min(num_batches, -(-seeds.numel() // batch_size))
    samples = sample_batches(sampler, seeds, batch_size, node_type=node_type, seed_time=seed_time)
    found = {t: torch.zeros(graph.num_nodes(t), dtype=torch.float64, device="cpu") for t in graph.node_types}
    for sample in islice(samples, num_batches):
        for t, ids in sample.node.items():
            found[t][ids.cpu().long().unique()] += 1  # trees of their own may hold a node twice
    return {t: counts / num_batches for t, counts in found.items()}


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
    sampler: NeighborSampler,
    seeds: Tensor,
    batch_size: int,
    *,
    node_type: NodeType | None = None,
    seed: int = 0,
    seed_time: Tensor | None = None,
) -> Iterator[Sample]:
    """Samples of shuffled batches of `seeds`, epoch after epoch, without end: what `presampled_visits` may count.

    `seed_time` has a time for each seed, where the sampler needs one.
    """
    node_type = sampler.graph.node_types[0] if node_type is None else node_type
    if seeds.numel() == 0:
        raise ValueError("seeds must not be empty")
    generator = torch.Generator().manual_seed(seed)
    epoch = 0
    while True:
        order = torch.randperm(seeds.numel(), generator=generator, device="cpu")
        for batch, some in enumerate(order.split(batch_size)):
            time = None if seed_time is None else {node_type: seed_time[some]}
            yield sampler.sample({node_type: seeds[some]}, key=SampleKey(seed, epoch, batch), seed_time=time)
        epoch += 1


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def _seed_probability(num_nodes: int, seeds: Tensor, batch_size: int, device: torch.device) -> Tensor:
    """p_0; a seed that is given several times is so many times as likely."""
    if seeds.dim() != 1 or seeds.dtype not in (torch.int32, torch.int64) or seeds.numel() == 0:
        raise ValueError(f"seeds must be ids, int32 or int64 [num_seeds], got {list(seeds.shape)} {seeds.dtype}")
    if not 0 <= int(seeds.min()) <= int(seeds.max()) < num_nodes:
        raise ValueError(f"seeds must be in [0, {num_nodes}), got {int(seeds.min())} to {int(seeds.max())}")
    share = min(1.0, batch_size / seeds.numel())
    counts = torch.zeros(num_nodes, dtype=torch.float64, device=device)
    seeds = seeds.to(counts.device).long()
    counts.index_add_(0, seeds, torch.ones_like(seeds, dtype=torch.float64))
    return (counts * share).clamp(max=1.0)


def _fanouts_of_one_type(graph: DistGraph, fanouts: Sequence[int]) -> tuple[int, ...]:
    if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
        raise ValueError(
            f"the graph must have one node type and one edge type, got {len(graph.node_types)} and "
            f"{len(graph.edge_types)}: use batch_visits"
        )
    return check_fanouts(graph, fanouts)[graph.edge_types[0]]


def _only_type(graph: AnyGraph) -> NodeType:
    if len(graph.node_types) != 1:
        raise ValueError(f"node_type must name the type of the seeds, one of {graph.node_types[:9]}")
    return graph.node_types[0]


def _sum_over_out_edges(csc: CSC, found: Tensor, fanout: int, replace: bool) -> Tensor:
    """Of every source u, the sum over its edges u -> v of log(1 - p(v) t(v))."""
    total = torch.zeros(csc.num_src, dtype=torch.float64, device=found.device)
    piece = min(_EDGES, HOST_PIECE) if found.is_cpu else _EDGES
    for _ in add_hop(total, csc, found, fanout, replace, piece=piece):
        pass
    return total


def _nodes(batch: Any, node_type: NodeType | None) -> Tensor:
    """Ids of the nodes of a Sample, or of a loader's batch."""
    if isinstance(batch, Sample):
        if node_type is None and len(batch.node) > 1:
            raise ValueError(f"node_type must name one of {list(batch.node)}")
        return batch.node[next(iter(batch.node)) if node_type is None else node_type]
    return (batch if node_type is None else batch[node_type]).n_id
