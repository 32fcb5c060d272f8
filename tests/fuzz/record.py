"""Real traffic, as it passes: a proxy between clients and a server, and a small job that asks for everything once."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import zmq

import gnnsys
from gnnsys.comm import Kind, Limits, wire
from gnnsys.store import DistEmbedding, Pull, SparseAdam
from tests.fuzz.served import NUM_NODES

Frames = list[bytes]


class Recorder:
    """Forwards what clients and a server say to each other, and keeps every request."""

    def __init__(self, endpoint: str) -> None:
        self.requests: list[Frames] = []
        self._context = zmq.Context()
        self._target = endpoint
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self._front.bind("tcp://127.0.0.1:*")
        self.endpoint = self._front.last_endpoint.decode().rstrip("\0")
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._closed:
            for socket, _ in poller.poll(50):
                if socket is self._front:
                    name, *frames = socket.recv_multipart()
                    self.requests.append(frames)
                    if name not in self._backs:
                        back = self._backs[name] = self._context.socket(zmq.DEALER)
                        back.routing_id = name
                        back.connect(self._target)
                        poller.register(back, zmq.POLLIN)
                    self._backs[name].send_multipart(frames)
                else:
                    name = next(name for name, back in self._backs.items() if back is socket)
                    self._front.send_multipart([name, *socket.recv_multipart()])


def record(folder: Path, endpoint: str) -> list[Frames]:
    """The requests of a job that trains an embedding on samples; what is large or comes again is left away."""
    recorder = Recorder(endpoint)
    try:
        with gnnsys.init(process_group=False) as session:
            graph = session.open(folder, servers=[recorder.endpoint])
            _train(graph, folder)
    finally:
        recorder.close()
    chosen: dict[tuple[object, ...], Frames] = {}
    for frames in recorder.requests:
        header = wire.read_header(frames[0], Limits())
        chosen.setdefault((header.kind, header.num_arrays, len(frames), len(frames[0]) // 256), frames)
    ping = wire.encode(wire.make_header(Kind.PING, 1, timeout_us=10**7), [torch.arange(40)], None, Limits())
    waits = wire.encode(wire.make_header(Kind.RAISE, 2, timeout_us=10**7, loader=1, batch=3), (), None, Limits())
    return [*chosen.values(), *([bytes(frame) for frame in frames] for frames in (ping, waits))]


def _train(graph: gnnsys.sampling.DistGraph, folder: Path) -> None:
    store, ids = graph.store, torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(3))
    (node_type,), (edge_type,) = graph.node_types, graph.edge_types
    train = gnnsys.split(graph, "train")
    for options in ({}, {"weight_attr": "w"}, {"replace": True}):
        loader = gnnsys.NeighborLoader(graph, [5, 3], input_nodes=train, batch_size=64, **options)
        next(iter(loader))
        loader.close()
    links = torch.stack(graph.edge_ends(torch.arange(50), edge_type))
    graph.neighborhoods(time="et")
    graph.neighborhoods(time="t")
    graph.original_edge_ids(torch.arange(30), edge_type)
    graph.in_degrees(ids[:50], edge_type)
    view = gnnsys.sampling.part_view.ViewSpec().key
    head = torch.tensor([view, 0, 0, 10, 1, 10])
    pending = graph.client.request(0, Kind.FIND_EDGES, [head, links[0][:20], torch.arange(20)])
    pending.result()
    _sample(graph, ids[:40])
    gnnsys.sampling.expected_visits(graph, [5, 3], ids[:200], batch_size=10)
    table = store.create("fuzzed", NUM_NODES, (8,))
    store.pull([Pull("fuzzed", ids[:100]), Pull(f"node/{node_type}/x", ids), Pull("fuzzed", ids)]).result()
    table.pull(ids[:10], columns=torch.tensor([0, 3]))
    table[ids[:20]] = torch.ones(20, 8)
    store.push("fuzzed", ids[:2000], torch.ones(2000, 8), mode="add").result()
    store.save("fuzzed", str(folder.parent / "tables"))
    store.load("fuzzed", str(folder.parent / "tables"))
    embedding = DistEmbedding(store, 500, 8, "trained")
    optimizer = SparseAdam([embedding], lr=0.1)
    for _ in range(2):
        embedding(ids[ids < 500][:60]).square().sum().backward()
        optimizer.step()
    store.drop("fuzzed")


def _sample(graph: gnnsys.sampling.DistGraph, seeds: torch.Tensor) -> None:
    """By rules, by scores, and edges among chosen nodes."""
    (node_type,), key = graph.node_types, gnnsys.sampling.SampleKey()
    guided = gnnsys.sampling.GuidedSampler(graph, [3, 2], requester=0)
    remote = torch.arange(graph.book.part_range(0, node_type).stop, graph.num_nodes(node_type))
    scores = torch.randint(1, 256, remote.shape, generator=torch.Generator().manual_seed(4)).byte()
    guided.use(gnnsys.sampling.NodeScores(0, remote, scores), at=(0, 0))
    for sampler in (guided, gnnsys.sampling.LaborSampler(graph, [3, 2])):
        sampler.sample({node_type: seeds}, key=key)
    gnnsys.sampling.edges_within(graph, seeds, torch.arange(100))
