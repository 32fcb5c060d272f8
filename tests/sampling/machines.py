"""Small graphs in parts on several machines of one process: real servers and clients, one service and store each."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Client, Handler, Request, Server
from gnnsys.graph import EdgeType, Graph, NodeType
from gnnsys.loader.batch import apply_to_block
from gnnsys.partition import Assignment, Parts, cut_clusters, open_parts, relabel, write_parts
from gnnsys.sampling import DistGraph, GraphService, Sample, graph_tables, part_rows
from gnnsys.store import Shard, Store

WRITES: EdgeType = ("author", "writes", "paper")
CITES: EdgeType = ("paper", "cites", "paper")
REV_WRITES: EdgeType = ("paper", "rev_writes", "author")
AT: EdgeType = ("paper", "at", "venue")


def homogeneous(num_nodes: int = 120, num_edges: int = 900, seed: int = 0) -> Graph:
    """Self loops and parallel edges are likely; the last nodes have no edges. Times fall together often."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, num_nodes - 5, (2, num_edges), generator=g)
    node_data = {
        "x": torch.randn(num_nodes, 4, generator=g),
        "t": torch.randint(0, 30, (num_nodes,), generator=g),
    }
    edge_data = {
        "w": torch.rand(num_edges, generator=g) * (torch.rand(num_edges, generator=g) < 0.8),
        "et": torch.randint(0, 30, (num_edges,), generator=g, dtype=torch.int32),
        "number": torch.arange(num_edges),
    }
    return Graph.from_edge_index(edges, num_nodes, node_data, edge_data)


def copies(graph: Graph, number: int) -> Graph:
    """A graph beside itself, without its data: node v of copy c is c * num_nodes + v, and so are edges.

    Draws depend on nodes' ids, so one sample of all copies is as many samples of the graph, in the time of a few.
    """
    edges, num_nodes = graph.edge_index(), graph.num_nodes()
    shifts = torch.arange(number).repeat_interleave(edges.shape[1]) * num_nodes
    return Graph.from_edge_index(edges.repeat(1, number) + shifts, number * num_nodes)


def typed(seed: int = 1) -> Graph:
    """Four edge types, one without edges, and a node type without nodes."""
    g = torch.Generator().manual_seed(seed)

    def edges(src: int, dst: int, count: int) -> Tensor:
        return torch.stack([torch.randint(0, n, (count,), generator=g) for n in (src, dst)])

    writes = edges(40, 90, 300)
    index = {WRITES: writes, CITES: edges(90, 90, 500), REV_WRITES: writes.flip(0), AT: torch.empty(2, 0).long()}
    node_data = {
        "paper": {"x": torch.randn(90, 3, generator=g), "t": torch.randint(0, 20, (90,), generator=g)},
        "author": {"t": torch.randint(0, 20, (40,), generator=g)},
    }
    edge_data = {
        CITES: {"w": torch.rand(500, generator=g), "et": torch.randint(0, 20, (500,), generator=g)},
        WRITES: {"et": torch.randint(0, 20, (300,), generator=g)},
    }
    return Graph.from_edge_indices(index, {"paper": 90, "author": 40, "venue": 0}, node_data, edge_data)


def assign(graph: Graph, num_parts: int, *, seed: int = 0, used: Sequence[int] | None = None) -> Assignment:
    """Nodes at random to the parts of `used`; the other parts are empty."""
    g = torch.Generator().manual_seed(seed)
    parts = torch.tensor(list(range(num_parts)) if used is None else list(used), dtype=torch.int32)
    subpart = {t: parts[torch.randint(0, parts.numel(), (graph.num_nodes(t),), generator=g)] for t in graph.node_types}
    return Assignment(num_parts, 1, subpart)


_OPENED: OrderedDict[bytes, tuple[Parts, TemporaryDirectory[str]]] = OrderedDict()
_MOST_OPENED = 32


def parts_of(
    graph: Graph,
    num_parts: int,
    folder: Path,
    *,
    used: Sequence[int] | None = None,
    clusters: int | None = None,
    **options: Any,
) -> Parts:
    """The graph in parts, which `folder` becomes a link to.

    Graphs that were parted alike before are not written again, nor opened again: both take longer than most tests do.
    Nobody may alter the files.
    """
    key = digest(graph, num_parts, used, clusters, sorted(options.items()), relabel.INT32_END)
    if key not in _OPENED:
        place = TemporaryDirectory()
        assignment = assign(graph, num_parts, used=used)
        cut = None if clusters is None else cut_clusters(graph, assignment, clusters)
        write_parts(graph, assignment, Path(place.name) / "parts", clusters=cut, **options)
        _OPENED[key] = open_parts(Path(place.name) / "parts"), place
    _OPENED.move_to_end(key)
    while len(_OPENED) > _MOST_OPENED:
        _OPENED.popitem(last=False)[1][1].cleanup()  # what has mapped the files keeps them
    parts = _OPENED[key][0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(parts.path)
    return open_parts(folder) if torch.cuda.is_available() else parts  # a driver registers a mapping once


def digest(graph: Graph, *options: object) -> bytes:
    """The same for graphs that are equal in all, to the last bit."""
    found = hashlib.blake2b(repr(options).encode())

    def add(what: object, rows: Tensor | None) -> None:
        found.update(repr((what, None if rows is None else (rows.dtype, rows.shape))).encode())
        if rows is not None:
            found.update(rows.contiguous().view(-1).view(torch.uint8).numpy())

    found.update(repr(graph.info).encode())
    for node_type in graph.node_types:
        add((node_type, graph.num_nodes(node_type)), None)
        for name, rows in graph.node_data[node_type].items():
            add(name, rows)
    for edge_type in graph.edge_types:
        csc = graph.csc(edge_type)
        for what, ids in (("indptr", csc.indptr), ("indices", csc.indices), ("edge ids", csc.edge_ids)):
            add((edge_type, what), ids)
        for name, rows in graph.edge_data[edge_type].items():
            add(name, rows)
    return found.digest()


@contextmanager
def machines(
    graph: Graph,
    folder: Path,
    num_parts: int,
    *,
    machine_of_part: Sequence[int] | None = None,
    used: Sequence[int] | None = None,
    halo_hops: int = 1,
    edge_ids: bool = True,
    clusters: int | None = None,
    seen: list[Request] | None = None,
) -> Iterator[list[DistGraph]]:
    """The graph as every machine sees it; by default a machine for each part. `seen` gets every request."""
    parts = parts_of(graph, num_parts, folder, used=used, halo_hops=halo_hops, edge_ids=edge_ids, clusters=clusters)
    owner = list(range(num_parts)) if machine_of_part is None else list(machine_of_part)
    num_machines = 1 + max(owner)
    specs = graph_tables(parts)
    with ExitStack() as stack:
        endpoints = {}
        for machine in range(num_machines):
            shard, own = Shard(machine), [p for p, m in enumerate(owner) if m == machine]
            for p in own:
                for name, rows in part_rows(parts, p).items():
                    shard.add(specs[name], p, rows)
            handlers = {**GraphService(parts, own).handlers(), **shard.handlers()}
            if seen is not None:
                handlers = {kind: recorded(handler, seen) for kind, handler in handlers.items()}
            server = Server(handlers, name=f"machine {machine}")
            stack.callback(shard.close)
            stack.callback(server.close)
            endpoints[machine] = server.start().endpoints[0]
        graphs = []
        for machine in range(num_machines):
            client = Client(endpoints, sender=machine, incarnation=1)
            stack.callback(client.close)
            store = Store(machine_of_part=owner, machine=machine, client=client, rank=machine, world_size=num_machines)
            graphs.append(DistGraph(parts, store, client, machine, owner))
        yield graphs


def recorded(handler: Handler, seen: list[Request]) -> Handler:
    def handle(request: Request) -> Any:
        seen.append(request)
        return handler(request)

    return handle


def to_global(graph: DistGraph, seeds: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
    return {t: graph.global_ids(ids, t) for t, ids in seeds.items()}


def on_host(sample: Sample) -> Sample:
    def moved(tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        return {key: tensor.cpu() for key, tensor in tensors.items()}

    structure = {name: moved(getattr(sample, name)) for name in ("node", "row", "col", "edge")}
    for name in ("tree", "edge_weight", "node_weight"):
        structure[name] = None if getattr(sample, name) is None else moved(getattr(sample, name))
    return replace(sample, **structure, blocks=[apply_to_block(b, Tensor.cpu) for b in sample.blocks])


def assert_same_sample(ours: Sample, theirs: Sample, graph: DistGraph) -> None:
    """`ours` was taken on parts, by the host or by a device; in original ids it is `theirs`, entry for entry."""
    ours = on_host(ours)
    assert list(ours.node) == list(theirs.node)
    for t in ours.node:
        assert torch.equal(graph.original_ids(ours.node[t], t), theirs.node[t]), t
    for name in ("row", "col"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert list(mine) == list(other)
        assert all(torch.equal(mine[t], other[t]) for t in mine), name
    assert list(ours.edge) == list(theirs.edge)
    for t in ours.edge:
        assert torch.equal(graph.original_edge_ids(ours.edge[t], t), theirs.edge[t]), t
    assert ours.num_sampled_nodes == theirs.num_sampled_nodes and ours.num_sampled_edges == theirs.num_sampled_edges
    assert (ours.tree is None) == (theirs.tree is None)
    if ours.tree is not None and theirs.tree is not None:
        assert all(torch.equal(ours.tree[t], theirs.tree[t]) for t in ours.tree)
    weights = [(ours.edge_weight, theirs.edge_weight), (ours.node_weight, theirs.node_weight)]
    weights += [(a.edge_weight, b.edge_weight) for a, b in zip(ours.blocks, theirs.blocks, strict=True)]
    for mine, other in weights:
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert list(mine) == list(other) and all(torch.equal(mine[t], other[t]) for t in mine)
    assert len(ours.blocks) == len(theirs.blocks)
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        assert a.num_src == b.num_src and a.num_dst == b.num_dst and list(a.csc) == list(b.csc)
        for t in a.csc:
            assert torch.equal(a.csc[t].indptr, b.csc[t].indptr) and torch.equal(a.csc[t].indices, b.csc[t].indices)
            assert torch.equal(graph.original_edge_ids(a.csc[t].edge_ids, t), b.csc[t].edge_ids)
