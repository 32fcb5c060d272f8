"""What loaders see of a graph whose arrays are changed between two of them, natively and through DGL's face.

Every kind of array x every way of changing it: a loader that is made afterwards has the new values. A running loader
of DGL's face refuses to go on with arrays that were replaced.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("DGLBACKEND", "pytorch")
dgl = pytest.importorskip("dgl", reason="dgl is not installed")

import gnnsys  # noqa: E402
import gnnsys.dgl as ours  # noqa: E402
from gnnsys.graph import EDGE, NODE, Graph  # noqa: E402
from gnnsys.sampling import NeighborSampler  # noqa: E402
from tests.support.grid import grid  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_NODES, SEEDS = 30, torch.arange(12)
Arrays = dict[str, Tensor]


def edges() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, NUM_NODES, (2, 200), generator=generator)
    return src, dst


def arrays(seed: int) -> Arrays:
    """By what they are: rows to read, and rows to draw by, of which few edges are left."""
    generator = torch.Generator().manual_seed(seed)
    of_edges = torch.randperm(200, generator=generator)
    return {
        "node features": torch.rand(NUM_NODES, 3, generator=generator),
        "labels": torch.randint(0, 9, (NUM_NODES,), generator=generator),
        "edge features": torch.rand(200, 2, generator=generator),
        "weights": (of_edges % 3 == 0).float(),
        "edge mask": of_edges % 3 == 0,
        "seed mask": torch.randperm(NUM_NODES, generator=generator) % 3 == 0,
        "node times": torch.randint(0, 9, (NUM_NODES,), generator=generator),
        "edge times": torch.randint(0, 9, (200,), generator=generator),
    }


ON_EDGES = {"edge features", "weights", "edge mask", "edge times"}
NAME = "changed"  # of the array in the graph


def assigned(rows: Tensor, to: Tensor, assign: Callable[[Tensor], None]) -> None:
    assign(to)


def in_place(rows: Tensor, to: Tensor, assign: Callable[[Tensor], None]) -> None:
    rows.copy_(to)


def through_numpy(rows: Tensor, to: Tensor, assign: Callable[[Tensor], None]) -> None:
    rows.numpy()[:] = to.numpy()


CHANGES = [assigned, in_place, through_numpy]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- natively ----------------------------------------------------------------------------------------------------------


def native(kind: str, rows: Tensor) -> Graph:
    data: Any = {NAME: rows}
    args = ({}, data) if kind in ON_EDGES else (data, {})
    return Graph.from_edge_index(torch.stack(edges()), NUM_NODES, *args)


def native_batches(graph: Graph, kind: str) -> list[Tensor]:
    options: dict[str, dict[str, Any]] = {
        "weights": {"weight_attr": NAME},
        "edge mask": {"edge_mask": NAME},
        "seed mask": {"input_nodes": NAME},
        "node times": {"time_attr": NAME},
        "edge times": {"time_attr": NAME, "input_time": torch.full_like(SEEDS, 5)},
    }
    given = {"input_nodes": SEEDS, **options.get(kind, {})}
    loader = gnnsys.NeighborLoader(graph, [3, 3], batch_size=5, seed=1, num_threads=1, **given)
    found = [rows for batch in loader for rows in (batch.n_id, batch.e_id, batch[NAME])]
    loader.close()
    return found


@grid(kind=list(arrays(0)), change=CHANGES)
def test_a_native_loader_has_what_the_graph_has_when_it_is_made(kind: str, change: Callable[..., None]) -> None:
    before, after = arrays(0)[kind], arrays(1)[kind]
    graph = native(kind, before)
    old = native_batches(graph, kind)
    change(before, after, lambda rows: (graph.set_edge_data if kind in ON_EDGES else graph.set_node_data)(NAME, rows))
    expected = native_batches(native(kind, arrays(1)[kind]), kind)
    assert same(native_batches(graph, kind), expected) and not same(old, expected)


@grid(kind=["weights", "edge mask", "node times", "edge times"], change=[assigned, in_place])
def test_a_native_sampler_whose_arrays_changed_is_refused_by_a_loader(kind: str, change: Callable[..., None]) -> None:
    graph = native(kind, arrays(0)[kind])
    drawn_by = {"weights": {"weight": NAME}, "edge mask": {"edges": NAME}}.get(kind, {"time": NAME})
    sampler = NeighborSampler(graph, [3], **drawn_by)
    given: Any = {"input_nodes": SEEDS, "input_time": torch.full_like(SEEDS, 5) if kind.endswith("times") else None}
    gnnsys.NeighborLoader(graph, sampler=sampler, **given).close()
    graph.set_node_data("another", torch.rand(NUM_NODES))
    gnnsys.NeighborLoader(graph, sampler=sampler, **given).close()
    rows = (graph.edge_data if kind in ON_EDGES else graph.node_data)[EDGE if kind in ON_EDGES else NODE]
    change(rows[NAME], arrays(1)[kind], lambda to: rows.update({NAME: to}))
    with pytest.raises(
        ValueError, match=r"'changed' changed after the NeighborSampler was made.*make the sampler again"
    ):
        gnnsys.NeighborLoader(graph, sampler=sampler, **given)


# -- through DGL's face ------------------------------------------------------------------------------------------------

READ_BY = {"node features": "node", "labels": "labels", "edge features": "edge", "seed mask": "node"}
Sampling = Callable[[Any, dict[str, Any]], Any]
SAMPLERS: dict[str, tuple[Sampling, set[str]]] = {  # and what they draw by
    "neighbors": (lambda g, options: ours.NeighborSampler([3, 3], **options), {"weights", "edge mask"}),
    "labor": (lambda g, options: ours.LaborSampler([3, 3], **options), set()),
    "shadow": (lambda g, options: ours.ShaDowKHopSampler([3], **options), {"weights"}),
    "clusters": (lambda g, options: ours.ClusterGCNSampler(g, 12, cache_path=None, **options), set()),
    "saint": (lambda g, options: ours.SAINTSampler("node", 9, **options), set()),
}


def options_of(sampler: str, kind: str, is_prefetched: bool) -> dict[str, Any]:
    if kind in ("weights", "edge mask"):
        return {"prob" if kind == "weights" else "mask": NAME}
    if not is_prefetched:
        return {}
    of_graph = sampler in ("clusters", "saint")
    names = {"edge features": ("prefetch_edge_feats", "prefetch_edata"), "labels": ("prefetch_labels", None)}
    return {names.get(kind, ("prefetch_node_feats", "prefetch_ndata"))[of_graph]: [NAME]}


def of_dgl(kind: str, rows: Tensor) -> Any:
    g = dgl.graph(edges(), num_nodes=NUM_NODES)
    frame(g, kind)[NAME] = rows
    return g


def frame(g: Any, kind: str) -> Any:
    return g.edata if kind in ON_EDGES else g.ndata


def cases() -> Iterator[tuple[str, str, bool]]:
    for sampler, (_, drawn_by) in SAMPLERS.items():
        for kind in ("node features", "labels", "edge features", "seed mask", *sorted(drawn_by)):
            if kind == "seed mask" and sampler not in ("neighbors", "labor", "shadow"):
                continue
            if kind == "labels" and sampler in ("shadow", "clusters", "saint"):
                continue  # these prefetch no labels
            yield sampler, kind, False
            if kind in ("node features", "labels", "edge features"):
                yield sampler, kind, True


def dgl_loader(g: Any, sampler: Any, kind: str, loader: Any = ours.DataLoader) -> Any:
    indices = g.ndata[NAME] if kind == "seed mask" else SEEDS
    options = {"seed": 1, "num_workers": 1} if loader is ours.DataLoader else {}
    return loader(g, indices, sampler, batch_size=6, **options)


def graphs_of(batch: Any) -> list[Any]:
    made = batch if isinstance(batch, dgl.DGLGraph) else batch[-1]
    return made if isinstance(made, list) else [made]


def contents(batch: Any, kind: str) -> list[Tensor]:
    """Everything a batch has: ids, and the array that is changed."""
    of_batch = graphs_of(batch)
    found = [frame_of[ids] for b in of_batch for frame_of, ids in ((b.srcdata, dgl.NID), (b.edata, dgl.EID))]
    if kind in ON_EDGES:
        return found + [b.edata[NAME] for b in of_batch]
    return [*found, of_batch[0].srcdata[NAME], of_batch[-1].dstdata[NAME]]


def dgl_batches(loader: Any, kind: str) -> list[Tensor]:
    torch.manual_seed(2)
    return [rows for batch in loader for rows in contents(batch, kind)]


@functools.cache
def batches_of_a_fresh_graph(case: Any) -> list[Tensor]:
    """With the new values from the start."""
    name, kind, is_prefetched = case
    g = of_dgl(kind, arrays(1)[kind])
    return dgl_batches(dgl_loader(g, SAMPLERS[name][0](g, options_of(name, kind, is_prefetched)), kind), kind)


@grid(case={", ".join(map(str, case)): case for case in cases()}, change=CHANGES)
def test_a_loader_of_dgls_face_has_what_the_graph_has_when_it_is_made(case: Any, change: Callable[..., None]) -> None:
    """With the sampler that the loader before it had."""
    name, kind, is_prefetched = case
    make, options = SAMPLERS[name][0], options_of(name, kind, is_prefetched)
    before, after = arrays(0)[kind], arrays(1)[kind]
    g = of_dgl(kind, before)
    sampler = make(g, options)
    old = dgl_batches(dgl_loader(g, sampler, kind), kind)
    change(before, after, lambda rows: frame(g, kind).update({NAME: rows}))
    expected = batches_of_a_fresh_graph(case)
    assert same(dgl_batches(dgl_loader(g, sampler, kind), kind), expected) and not same(old, expected)


@grid(case={", ".join(map(str, case)): case for case in cases()}, change=[assigned, in_place])
def test_dgls_own_loader_has_what_the_graph_has_with_our_samplers(case: Any, change: Callable[..., None]) -> None:
    name, kind, is_prefetched = case
    make, options = SAMPLERS[name][0], options_of(name, kind, is_prefetched)
    if kind == "seed mask":
        return  # DGL takes ids alone
    before, after = arrays(0)[kind], arrays(1)[kind]
    g = of_dgl(kind, before)
    sampler = make(g, options)
    dgl_batches(dgl_loader(g, sampler, kind, dgl.dataloading.DataLoader), kind)
    change(before, after, lambda rows: frame(g, kind).update({NAME: rows}))
    fresh = of_dgl(kind, arrays(1)[kind])
    expected = dgl_batches(dgl_loader(fresh, make(fresh, options), kind, dgl.dataloading.DataLoader), kind)
    assert same(dgl_batches(dgl_loader(g, sampler, kind, dgl.dataloading.DataLoader), kind), expected)


@grid(case={", ".join(map(str, case)): case for case in cases()})
def test_a_running_loader_of_dgls_face_never_goes_on_with_replaced_arrays(case: Any) -> None:
    """What it prefetches or draws by, it refuses; what it does not prefetch, it slices from the graph as it is."""
    name, kind, is_prefetched = case
    g = of_dgl(kind, arrays(0)[kind])
    loader = dgl_loader(g, SAMPLERS[name][0](g, options_of(name, kind, is_prefetched)), kind)
    batches = iter(loader)
    next(batches)
    frame(g, kind)[NAME] = arrays(1)[kind]
    if is_prefetched or kind in ("weights", "edge mask"):
        with pytest.raises(ValueError, match=r"'changed'.* after this DataLoader was made.*make a new DataLoader"):
            next(batches)
    else:
        for made in graphs_of(next(batches)):
            of_batch, ids = (made.edata, dgl.EID) if kind in ON_EDGES else (made.srcdata, dgl.NID)
            assert torch.equal(of_batch[NAME], arrays(1)[kind][of_batch[ids]])
    loader.close()


def test_a_running_loader_refuses_edges_that_were_added() -> None:
    g = of_dgl("labels", arrays(0)["labels"])
    batches = iter(ours.DataLoader(g, SEEDS, ours.NeighborSampler([3]), batch_size=5))
    next(batches)
    g.add_edges(torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="edges changed after this DataLoader was made"):
        next(batches)


def test_options_of_a_sampler_that_are_changed_count_for_the_next_loader() -> None:
    g, sampler = of_dgl("labels", arrays(0)["labels"]), ours.NeighborSampler([2])
    for fanout in (2, 5):
        sampler.fanouts[0] = fanout
        ((_, _, (block,)),) = ours.DataLoader(g, torch.arange(NUM_NODES), sampler, batch_size=NUM_NODES)
        assert int(block.in_degrees().max()) == fanout


def test_layer_wise_inference_computes_what_the_whole_graph_gives() -> None:
    """As in DGL's example for several GPUs: one sampler, a loader for each layer, and g.ndata["h"] in between."""
    g = of_dgl("node features", arrays(0)["node features"])
    torch.manual_seed(0)
    layers = nn.ModuleList(
        [dgl.nn.SAGEConv(3, 8, "mean"), dgl.nn.SAGEConv(8, 8, "mean"), dgl.nn.SAGEConv(8, 4, "mean")]
    )
    expected = g.ndata[NAME]
    g.ndata["h"] = g.ndata[NAME]
    sampler = ours.MultiLayerFullNeighborSampler(1, prefetch_node_feats=["h"])
    with torch.no_grad():
        for layer in layers:
            expected = layer(g, expected)
            y = torch.empty(NUM_NODES, expected.shape[1])
            for _, output_nodes, blocks in ours.DataLoader(g, torch.arange(NUM_NODES), sampler, batch_size=7):
                y[output_nodes] = layer(blocks[0], blocks[0].srcdata["h"])
            g.ndata["h"] = y
    torch.testing.assert_close(y, expected)
