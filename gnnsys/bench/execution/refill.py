"""Of `gnnsys bench execution`, rows that cross the bus where a device's cache is filled once, and anew for every group.

Once a group of batches is sampled its visits are known exactly. Keeping row r for a group saves as many crossings as
the group visits r, and costs one where r is not kept yet; so the best rows are those of the most visits, with one more
for rows that are kept already. This is a count of rows, the same on every machine. It leaves out what else a refill
costs: finding the rows, and a pipeline that waits until the batches of the group before have left the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, value
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.graph import NODE, Graph, rmat, sbm
from gnnsys.sampling import NeighborSampler, SampleKey

ONCE = "filled once"
FANOUTS, SHARES, GROUPS = (15, 10, 5), (0.05, 0.2), (2, 4, 8, 16, 32, 64)
_SEEDS_PER_NODE = 1024 / 2_450_000  # as the batches of `bench gpu`
_TRAINED = 12  # one node in so many


def refilled_caches(work: Workload) -> Iterator[Case]:
    """Rows a batch, by the best size of groups, beside those of a cache that was filled by earlier batches' visits."""
    num_nodes = 120_000 if work.sizes is FULL else 4_000

    def graphs() -> dict[str, Graph]:
        return work.once(
            "execution/refill",
            lambda: {
                "power law": rmat(num_nodes, 50 * num_nodes, seed=SEED),
                "communities": sbm(num_nodes, avg_degree=50, num_features=1, seed=SEED),
            },
        )

    def visited(kind: str) -> list[Tensor]:
        count = 256 if work.sizes is FULL else 128
        return work.once(f"execution/refill/{kind}", lambda: _batches(graphs()[kind], count))

    for kind in ("power law", "communities"):
        for share in SHARES:

            def sides(kind: str = kind, share: float = share) -> dict[str, Side]:
                def ours() -> float:
                    return min(rows_crossing(visited(kind), num_nodes, share, size) for size in GROUPS)

                return {OURS: Side(ours), ONCE: Side(lambda: rows_crossing(visited(kind), num_nodes, share))}

            name = f"execution/refill/{kind}, {100 * share:g}% cached"
            yield Case(name, value("rows"), sides, (Versus((ONCE,)),), repeats=1)


def rows_crossing(batches: Sequence[Tensor], num_nodes: int, share: float, group: int | None = None) -> float:
    """Rows a batch that are not kept, and those that are brought for a group. The first half of the batches tells what
    is kept at first, and the second half is counted."""
    half, num_kept = len(batches) // 2, int(share * num_nodes)
    before = _visits(batches[:half], num_nodes)
    kept = _marked(torch.topk(before, num_kept).indices, num_nodes)
    rest = batches[half:]
    if group is None:
        return float(_visits(rest, num_nodes)[~kept].sum()) / len(rest)
    crossing, ties = 0.0, before / (2 * before.max())
    for begin in range(0, len(rest), group):
        visits = _visits(rest[begin : begin + group], num_nodes)
        chosen = _marked(torch.topk(visits + kept.to(visits.dtype) + ties, num_kept).indices, num_nodes)
        crossing += float(visits[~chosen].sum()) + int((chosen & ~kept & (visits > 0)).sum())
        kept = chosen
    return crossing / len(rest)


def _batches(graph: Graph, count: int) -> list[Tensor]:
    """Input rows of the first batches of some epochs."""
    num_nodes, sampler = graph.num_nodes(NODE), NeighborSampler(graph, list(FANOUTS))
    draw = torch.Generator("cpu").manual_seed(SEED)
    train = torch.randperm(num_nodes, generator=draw)[: num_nodes // _TRAINED]
    size = max(1, int(_SEEDS_PER_NODE * num_nodes))
    found: list[Tensor] = []
    epochs = -(-count * size // train.numel())
    for epoch in range(epochs):
        seeds = train[torch.randperm(train.numel(), generator=draw)].split(size)
        for batch, some in enumerate(seeds[: count - len(found)]):
            key = SampleKey(seed=SEED, epoch=epoch, batch=batch)
            found.append(sampler.sample({NODE: some}, key=key).node[NODE].to(torch.int64))
    return found


def _visits(batches: Sequence[Tensor], num_nodes: int) -> Tensor:
    counts = torch.zeros(num_nodes, dtype=torch.float64, device="cpu")
    for rows in batches:
        counts[rows] += 1  # a batch reads a row once
    return counts


def _marked(rows: Tensor, num_nodes: int) -> Tensor:
    marks = torch.zeros(num_nodes, dtype=torch.bool, device="cpu")
    marks[rows] = True
    return marks


BENCHMARKS: list[Benchmark] = [refilled_caches]
