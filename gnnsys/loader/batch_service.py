"""The answering side of samplers elsewhere: makes batches for loaders of other processes, structure and rows.

LOADER describes a loader (JSON, checked by its digest) and the graph it is for; BATCH asks for one batch of it. A batch
is a function of the description and of its seeds, so any process may make any of them, in any order, or twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gnnsys.comm import Client, Handler, Header, Kind, Reply, Request, RequestContext, use_context
from gnnsys.loader.batch_message import WantedBatch, answer
from gnnsys.loader.described_loader import DescribedLoader
from gnnsys.loader.fetch import Fetch
from gnnsys.loader.identity import graph_identity
from gnnsys.loader.sampled import Sampled
from gnnsys.loader.sampling_options import make_sampler
from gnnsys.loader.subgraph import shape_subgraph
from gnnsys.ops import BufferPool
from gnnsys.sampling import DistGraph
from gnnsys.store import RowBuffers, read_rows

MOST_LOADERS = 16  # that are remembered: one that was asked for longest ago is forgotten, and described again
KEEP_BATCHES = 2  # whose rows of other machines stay for those behind them, as in a trainer
UNKNOWN = "no such loader is described here"


class BatchMaker:
    """Makes batches of one described loader."""

    def __init__(self, graph: DistGraph, loader: DescribedLoader, num_at_once: int) -> None:
        self.loader = loader
        self._graph = graph
        self._sampler = make_sampler(
            graph, loader.fanouts, loader.subgraph_type, replace=loader.replace, disjoint=loader.disjoint,
            weight=loader.weight_attr, time=loader.time_attr, temporal_strategy=loader.temporal_strategy,
            expand=loader.expand, edges=loader.edge_mask, device=torch.device("cpu"),
        )  # fmt: skip
        self._fetch = Fetch(graph, names=loader.arrays, wire_dtype=None)
        pool = BufferPool(max_free=(num_at_once + 1) * self._fetch.num_arrays)
        self._fetch.prepare(RowBuffers(pool), num_at_once + 1 if self._fetch.waits else 0, KEEP_BATCHES)

    def is_of(self, graph: DistGraph) -> bool:
        return self._graph is graph

    def make(self, wanted: WantedBatch, position: int = -1) -> Sampled:
        """Structure and rows. ValueError for seeds that the graph has not."""
        graph, loader, times = self._graph, self.loader, wanted.times
        if unknown := [t for t in wanted.seeds if t not in graph.node_types]:
            raise ValueError(f"seeds of type {unknown[0]!r} are asked for, the graph has {graph.node_types}")
        if loader.time_attr is not None and times is None:
            own = read_rows([(graph.node_data[t][loader.time_attr], ids) for t, ids in wanted.seeds.items()])
            times = {t: rows.cpu() for t, rows in zip(wanted.seeds, own, strict=True)}
        sample = self._sampler.sample(wanted.seeds, key=wanted.key(loader.seed), seed_time=times, tree=wanted.trees)
        sampled = Sampled(shape_subgraph(sample, graph, loader.subgraph_type), "", position=position)
        return self._fetch(sampled)


class BatchService:
    """Handlers of LOADER and BATCH. `open_graph(opening)` is the graph that a trainer describes; it may keep it.

    `num_at_once`: how many batches are made beside each other.
    """

    def __init__(self, open_graph: Callable[[Mapping[str, Any]], DistGraph], num_at_once: int) -> None:
        self._open_graph, self._num_at_once = open_graph, num_at_once
        self._makers: OrderedDict[str, BatchMaker] = OrderedDict()
        self._in_work: dict[tuple[int, int, int], tuple[RequestContext, Client | None]] = {}
        self._lock = threading.Lock()

    def on_raise(self, header: Header) -> None:
        """A trainer waits for a batch that is being made here: what this process asks others for it is urgent too."""
        found = self._in_work.get((header.sender, header.loader, header.batch))
        if found is not None:
            context, client = found
            context.await_batch(header.batch, [] if client is None else [client], True)

    def handlers(self) -> dict[int, Handler]:
        return {Kind.LOADER: self._describe, Kind.BATCH: self._batch}

    def _describe(self, request: Request) -> Reply:
        if sorted(request.options) != ["graph", "loader"] or not isinstance(request.options["graph"], dict):
            raise ValueError("LOADER has the options graph and loader")
        described = DescribedLoader.from_json(request.options["loader"])
        graph = self._open_graph(request.options["graph"])
        if described.graph != graph_identity(graph):
            raise ValueError("the loader is for other parts than those that are open here: their manifests differ")
        made = BatchMaker(graph, described, self._num_at_once)
        with self._lock:
            kept = self._makers.get(described.digest)
            if kept is None or not kept.is_of(graph):  # opened anew: the servers are others
                self._makers[described.digest] = made
            self._makers.move_to_end(described.digest)
            while len(self._makers) > MOST_LOADERS:
                self._makers.popitem(last=False)
        return Reply(options={"loader": described.digest})

    def _batch(self, request: Request) -> Iterator[Reply]:
        digest, wanted = WantedBatch.from_request(request)
        with self._lock:
            maker = self._makers.get(digest)
            if maker is not None:
                self._makers.move_to_end(digest)
        if maker is None:
            raise ValueError(UNKNOWN)
        header = request.header
        context = RequestContext.of_header(header)
        work = header.sender, header.loader, header.batch
        self._in_work[work] = context, getattr(maker.loader.graph, "client", None)
        try:
            with use_context(context):
                sampled = maker.make(wanted, header.batch)
        finally:
            self._in_work.pop(work, None)
        return answer(sampled, maker.loader.arrays, request)
