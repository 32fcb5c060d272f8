"""`gnnsys bench loader`: sampling three hops into blocks, and whole training epochs, beside DGL's.

Sampling runs as DGL does it (the whole frontier is expanded again at every hop), so that both sides do the same work.
Each uses threads its own way: ours makes whole batches side by side, DGL's splits every batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.bench import parts_beside_memory, peers
from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, milliseconds, of_peer
from gnnsys.bench.ops.peer_graphs import dgl_graph
from gnnsys.bench.workload import Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.sampling import NeighborSampler, SampleKey

NUM_CLASSES, NUM_LAYERS = 47, 3
WITHIN = 1.15  # an epoch may take this much longer than the slower of its two halves
MANY_THREADS = 4  # times the cores
NUM_BATCHES = 8
DENSE = "dense products alone"


def sampling(work: Workload) -> Iterator[Case]:
    """Batches per loading thread against DGL's sampler on as many OpenMP threads: how each of them uses threads."""
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            sides = {OURS: Side(_our_loading(work, threads))}
            if "dgl" not in peers.missing("dgl"):
                sides["dgl"] = of_peer(lambda: _dgl_sampling(work), threads)
            return sides

        name = f"sampling/{NUM_BATCHES} batches/{threads}t"
        yield Case(name, milliseconds(), sides, (Versus(("dgl",), 3.0),), missing=peers.missing("dgl"))


def sampling_threads(work: Workload) -> Iterator[Case]:
    many = MANY_THREADS * _num_cores()

    def sides() -> dict[str, Side]:
        return {f"{threads} threads": Side(_our_loading(work, threads)) for threads in (2, 1, many)}

    yield Case("sampling/two threads", milliseconds(), sides, (Versus(("1 threads",), 1.6),), ours="2 threads")
    best = Versus(("1 threads", "2 threads"), 0.7)  # oversubscribed: slower, but no collapse
    yield Case(f"sampling/{many} threads", milliseconds(), sides, (best,), ours=f"{many} threads")


def one_batch(work: Workload) -> Iterator[Case]:
    """A single batch that someone waits for, on two threads: one numbers neighbours while the other draws."""

    def sides() -> dict[str, Side]:
        return {f"{threads} threads": Side(_our_sampling(work), threads) for threads in (2, 1)}

    yield Case("sampling/one batch", milliseconds(), sides, (Versus(("1 threads",), 1.5),), ours="2 threads")


def epoch(work: Workload) -> Iterator[Case]:
    """One thread loads and one computes; loading alone and compute alone have one thread each.

    The wider the layers, the more of an epoch is dense products that both sides leave to the same BLAS, and the closer
    to one the ratio can come; `dense products alone` is what no loader and no sparse kernel can save.
    """
    for hidden in (64, 128):
        yield _epoch_case(work, hidden)


def _epoch_case(work: Workload, hidden: int) -> Case:
    def sides() -> dict[str, Side]:
        graph, seeds = _training_graph(work), _training_seeds(work)
        model = _HostModel(GraphSAGE(work.sizes.dim, hidden, NUM_LAYERS, NUM_CLASSES))
        loader = NeighborLoader(
            graph,
            list(work.sizes.fanout),
            input_nodes=seeds,
            batch_size=work.sizes.num_seeds,
            shuffle=True,
            across_epochs=False,  # nothing is prepared while other sides are timed
        )
        held = list(loader)
        widths = [work.sizes.dim, *[hidden] * (NUM_LAYERS - 1), NUM_CLASSES]
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda: _for_each(model.step_on_batch, loader),
            "loading alone": lambda: _for_each(lambda batch: None, loader),
            DENSE: lambda: _for_each(lambda batch: _dense_products(batch.num_sampled_nodes, widths), held),
            "compute alone": lambda: _for_each(model.step_on_batch, held),
        }
        found = {name: Side(call) for name, call in calls.items()}
        if "dgl" not in peers.missing("dgl"):
            for workers in (0, 1):
                make = partial(_dgl_epoch, work, graph, seeds, hidden, workers)
                found[f"dgl, {workers} workers"] = of_peer(make)
        return found

    dgl_sides = ("dgl, 0 workers", "dgl, 1 workers")
    versus = (
        Versus(("loading alone", "compute alone"), 1 / WITHIN, pick="worst"),
        Versus(dgl_sides, 2.0),
        Versus(("PyG NeighborLoader",), required=False),
    )
    missing = {side: reason for side in dgl_sides for reason in peers.missing("dgl").values()}
    missing["PyG NeighborLoader"] = "PyG samples only with pyg-lib or torch-sparse, and neither is installed"
    return Case(f"epoch/sage-{hidden}", milliseconds(), sides, versus, limit=DENSE, repeats=3, missing=missing)


BENCHMARKS: list[Benchmark] = [sampling, sampling_threads, one_batch, epoch, *parts_beside_memory.BENCHMARKS]


# -- sampling ----------------------------------------------------------------------------------------------------------


def _seed_batches(work: Workload) -> list[Tensor]:
    return list(work.seeds(NUM_BATCHES * work.sizes.num_seeds).split(work.sizes.num_seeds))


def _our_loading(work: Workload, num_threads: int) -> Callable[[], Any]:
    loader = NeighborLoader(
        work.graph,
        list(work.sizes.fanout),
        input_nodes=torch.cat(_seed_batches(work)),
        batch_size=work.sizes.num_seeds,
        expand="frontier",
        num_threads=num_threads,
        prefetch=num_threads + 1,
        across_epochs=False,
    )
    return lambda: _for_each(lambda batch: None, loader)


def _our_sampling(work: Workload) -> Callable[[], Any]:
    sampler = NeighborSampler(work.graph, list(work.sizes.fanout), expand="frontier")
    batches = cycle(enumerate(_seed_batches(work)))

    def call() -> Any:
        index, seeds = next(batches)
        return sampler.sample({NODE: seeds}, key=SampleKey(0, 0, index))

    return call


def _dgl_sampling(work: Workload) -> Callable[[], Any]:
    dgl = peers.find("dgl")
    assert not isinstance(dgl, str)
    graph = dgl_graph(work.csc, torch.int64, formats="csc")
    sampler = dgl.dataloading.NeighborSampler(list(reversed(work.sizes.fanout)))  # DGL lists the innermost hop last
    batches = _seed_batches(work)
    return lambda: _for_each(lambda seeds: sampler.sample_blocks(graph, seeds), batches)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- training ----------------------------------------------------------------------------------------------------------


def _training_graph(work: Workload) -> Graph:
    labels = work.ids(work.sizes.num_nodes, work.sizes.num_nodes) % NUM_CLASSES
    rows = {"x": work.rows(work.sizes.num_nodes, work.sizes.dim), "y": labels}
    return Graph({NODE: work.sizes.num_nodes}, {EDGE: work.csc}, {NODE: rows})


def _training_seeds(work: Workload) -> Tensor:
    return work.seeds(work.sizes.epoch_batches * work.sizes.num_seeds)


def _for_each(step: Callable[[Any], None], batches: Iterable[Any]) -> None:
    for batch in batches:
        step(batch)


def _dense_products(num_sampled_nodes: list[int], widths: list[int]) -> None:
    """The matrix products of one step: two linear maps per layer over its destinations, forward and backward."""
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        num_rows = sum(num_sampled_nodes[: NUM_LAYERS - layer])
        rows, grad, weight = torch.ones(num_rows, inputs), torch.ones(num_rows, outputs), torch.ones(inputs, outputs)
        for _ in range(2):
            torch.mm(rows, weight)
            torch.mm(rows.t(), grad)
            if layer > 0:  # the features themselves need no gradient
                torch.mm(grad, weight.t())


class _HostModel:
    """A model with its optimizer; a step per batch, or per DGL's blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step_on_batch(self, batch: Any) -> None:
        out = self.model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        self._step(out, batch.y[: batch.batch_size])

    def step_on_blocks(self, blocks: list[Any]) -> None:
        x = blocks[0].srcdata["x"]
        for index, (conv, block) in enumerate(zip(self.model, blocks, strict=True)):  # type: ignore[call-overload]
            x = conv(block, x)
            x = x.relu() if index < NUM_LAYERS - 1 else x
        self._step(x, blocks[-1].dstdata["y"])

    def _step(self, out: Tensor, labels: Tensor) -> None:
        loss = F.cross_entropy(out, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def _dgl_epoch(work: Workload, graph: Graph, seeds: Tensor, hidden: int, num_workers: int) -> Callable[[], Any]:
    """DGL's own way: its sampler fetches features and labels by itself (prefetch_*), its SAGEConv, the same sizes."""
    dgl = peers.find("dgl")
    assert not isinstance(dgl, str)
    peer = dgl_graph(graph.csc(), torch.int64)
    peer.ndata["x"], peer.ndata["y"] = graph.node_data[NODE]["x"], graph.node_data[NODE]["y"]
    sampler = dgl.dataloading.NeighborSampler(
        list(reversed(work.sizes.fanout)), prefetch_node_feats=["x"], prefetch_labels=["y"]
    )
    loader = dgl.dataloading.DataLoader(
        peer, seeds, sampler, batch_size=work.sizes.num_seeds, shuffle=True, num_workers=num_workers
    )
    widths = [work.sizes.dim, hidden, hidden, NUM_CLASSES]
    model = _HostModel(nn.ModuleList(dgl.nn.SAGEConv(i, o, "mean") for i, o in pairwise(widths)))
    return lambda: _for_each(lambda batch: model.step_on_blocks(batch[2]), loader)
