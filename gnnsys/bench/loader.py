"""`gnnsys bench loader`: sampling three hops into blocks, and whole training epochs, beside DGL's.

Sampling runs as DGL does it (the whole frontier is expanded again at every hop), so that both sides do the same work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Benchmark, Case, Side, Versus, milliseconds
from gnnsys.bench.ops.peer_graphs import dgl_graph
from gnnsys.bench.workload import Workload
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.nn import GraphSAGE
from gnnsys.sampling import NeighborSampler, SampleKey

NUM_CLASSES, NUM_LAYERS = 47, 3
WITHIN = 1.15  # an epoch may take this much longer than the slower of its two halves
MANY_THREADS = 4  # times the cores


def sampling(work: Workload) -> Iterator[Case]:
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            calls = {OURS: _our_sampling(work)}
            if "dgl" not in peers.missing("dgl"):
                calls["dgl"] = _dgl_sampling(work)
            return {name: Side(call, threads) for name, call in calls.items()}

        name = f"sampling/blocks/{threads}t"
        yield Case(name, milliseconds(), sides, (Versus(("dgl",), 3.0),), missing=peers.missing("dgl"))


def sampling_threads(work: Workload) -> Iterator[Case]:
    many = MANY_THREADS * _num_cores()

    def sides() -> dict[str, Side]:
        return {f"{threads} threads": Side(_our_sampling(work), threads) for threads in (2, 1, many)}

    yield Case("sampling/two threads", milliseconds(), sides, (Versus(("1 threads",), 1.6),), ours="2 threads")
    best = Versus(("1 threads", "2 threads"), 0.7)  # oversubscribed: slower, but no collapse
    yield Case(f"sampling/{many} threads", milliseconds(), sides, (best,), ours=f"{many} threads")


def epoch(work: Workload) -> Iterator[Case]:
    """One thread loads and one computes; loading alone and compute alone have one thread each.

    The wider the layers, the more of an epoch is dense products that both sides leave to the same BLAS, and the closer
    to one the ratio: the wide model informs.
    """
    yield _epoch_case(work, hidden=64, target=2.0)
    yield _epoch_case(work, hidden=128, target=None)


def _epoch_case(work: Workload, hidden: int, target: float | None) -> Case:
    def sides() -> dict[str, Side]:
        graph, seeds = _training_graph(work), _training_seeds(work)
        model = _Trained(GraphSAGE(work.sizes.dim, hidden, NUM_LAYERS, NUM_CLASSES))
        loader = NeighborLoader(
            graph,
            list(work.sizes.fanout),
            input_nodes=seeds,
            batch_size=work.sizes.num_seeds,
            shuffle=True,
            across_epochs=False,  # nothing is prepared while other sides are timed
        )
        held = list(loader)
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda: _for_each(model.step_on_batch, loader),
            "loading alone": lambda: _for_each(lambda batch: None, loader),
            "compute alone": lambda: _for_each(model.step_on_batch, held),
        }
        if "dgl" not in peers.missing("dgl"):
            for workers in (0, 1):
                calls[f"dgl, {workers} workers"] = _dgl_epoch(work, graph, seeds, hidden, workers)
        return {name: Side(call) for name, call in calls.items()}

    dgl_sides = ("dgl, 0 workers", "dgl, 1 workers")
    versus = (
        Versus(("loading alone", "compute alone"), 1 / WITHIN, pick="worst"),
        Versus(dgl_sides, target),
        Versus(("PyG NeighborLoader",), required=False),
    )
    missing = {side: reason for side in dgl_sides for reason in peers.missing("dgl").values()}
    missing["PyG NeighborLoader"] = "PyG samples only with pyg-lib or torch-sparse, and neither is installed"
    return Case(f"epoch/sage-{hidden}", milliseconds(), sides, versus, repeats=3, missing=missing)


BENCHMARKS: list[Benchmark] = [sampling, sampling_threads, epoch]


# -- sampling ----------------------------------------------------------------------------------------------------------


def _seed_batches(work: Workload, count: int = 8) -> list[Tensor]:
    return list(work.seeds(count * work.sizes.num_seeds).split(work.sizes.num_seeds))


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
    batches = cycle(_seed_batches(work))
    return lambda: sampler.sample_blocks(graph, next(batches))


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


class _Trained:
    """A model with its optimizer; a step per batch, or per DGL's blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step_on_batch(self, batch: Any) -> None:
        out = self.model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        self._step(out, batch.y[: batch.batch_size])

    def step_on_blocks(self, blocks: list[Any]) -> None:
        x = blocks[0].srcdata["x"]
        for index, (conv, block) in enumerate(zip(self.model, blocks)):  # type: ignore[call-overload]
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
    model = _Trained(nn.ModuleList(dgl.nn.SAGEConv(i, o, "mean") for i, o in pairwise(widths)))
    return lambda: _for_each(lambda batch: model.step_on_blocks(batch[2]), loader)
