"""Streaming assignment: recounted cuts and loads, random graphs of every awkward kind, METIS for quality, memory."""

from __future__ import annotations

import os

import numpy as np
import pymetis
import pytest
import torch

from gnnsys.graph import Graph, rmat, save, sbm, typed_graph
from gnnsys.ops import CSC, NodeRun, PairTable, drop_pages, stream_cluster, stream_cut, stream_refine
from gnnsys.partition import estimate_in_memory, estimate_streaming, stream_assignment
from gnnsys.partition.adjacency import Adjacency, first_nodes
from gnnsys.partition.constraints import constraints_of
from tests.support.grid import grid
from tests.support.memory_probe import peak_memory

MEMORY = 256 << 20


def weight_of(graph: Graph, name: str):
    return constraints_of(graph, [name]).columns[name]


def random_graph(seed: int, num_nodes: int, num_edges: int) -> Graph:
    """With loops, repeated edges and nodes without any."""
    edges = torch.from_numpy(np.random.default_rng(seed).integers(0, max(num_nodes, 1), (2, num_edges)))
    return Graph.from_edge_index(edges % max(2 * num_nodes // 3, 1), num_nodes)


def joined_edges(graph: Graph) -> torch.Tensor:
    """All edges in the one numbering of all nodes, [2, E]."""
    begins = first_nodes(graph)
    edges = [graph.edge_index(t) + torch.tensor([[begins[t[0]]], [begins[t[2]]]]) for t in graph.edge_types]
    return torch.cat(edges, 1)


def recount_cut(graph: Graph, part: torch.Tensor) -> int:
    src, dst = joined_edges(graph)
    return int((part[src] != part[dst]).sum())


def symmetric(graph: Graph) -> CSC:
    src, dst = joined_edges(graph)
    other = src != dst
    edges = torch.stack([src[other], dst[other]])
    num_nodes = sum(graph.num_nodes(t) for t in graph.node_types)
    return CSC.from_edge_index(torch.cat([edges, edges.flip(0)], 1), num_nodes, narrow=True)


def runs(csc: CSC, size: int) -> list[NodeRun]:
    result = []
    for first in range(0, csc.num_dst, size):
        indptr = csc.indptr[first : first + size + 1]
        result.append(NodeRun(first, indptr, csc.indices[int(indptr[0]) : int(indptr[-1])]))
    return result


def metis(graph: Graph, num_parts: int, weight: torch.Tensor | None) -> torch.Tensor:
    csc = symmetric(graph)
    adjacency = pymetis.CSRAdjacency(csc.indptr.numpy(), csc.indices.long().numpy())
    found = []
    for recursive in (False, True):
        vertex = None if weight is None else weight.numpy()
        _, part = pymetis.part_graph(num_parts, adjacency, vweights=vertex, recursive=recursive)
        found.append(torch.as_tensor(part))
    return min(found, key=lambda part: recount_cut(graph, part))


@pytest.mark.parametrize("memory", [2000, 20_000, 1 << 20])
def test_the_adjacency_holds_both_directions_of_every_edge_of_every_type(memory, tmp_path):
    graph = typed_graph(60, num_features=1)
    expected = symmetric(graph)
    adjacency = Adjacency.build(graph, tmp_path, memory)
    seen = list(adjacency.runs())
    assert [run.first for run in seen] == sorted({run.first for run in seen})
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), *(run.indptr[1:] for run in seen)])
    assert torch.equal(indptr, expected.indptr) and adjacency.num_neighbors == expected.num_edges
    indices = torch.cat([run.indices for run in seen])
    for v in range(expected.num_dst):
        column = slice(int(indptr[v]), int(indptr[v + 1]))
        assert torch.equal(indices[column].sort().values, expected.indices[column].sort().values)


@pytest.mark.parametrize(
    "num_nodes,num_edges", [(0, 0), (1, 0), (1, 3), (6, 0), (3, 9), (30, 20), (60, 400), (400, 3000)]
)
@grid(num_parts=[1, 2, 5, 40])
def test_whatever_the_graph_every_node_gets_a_part_and_the_report_is_true(num_nodes, num_edges, num_parts):
    for seed in range(2 if num_nodes < 60 else 1):
        graph = random_graph(seed, num_nodes, num_edges)
        found = stream_assignment(graph, num_parts, memory_limit=MEMORY)
        assert found.part.dtype == torch.int32 and found.part.shape == (num_nodes,)
        assert num_nodes == 0 or 0 <= int(found.part.min()) <= int(found.part.max()) < num_parts
        assert found.num_cut == recount_cut(graph, found.part) and found.num_edges == num_edges
        degrees = graph.csc().in_degrees()
        for row, weight in enumerate([torch.ones(num_nodes, dtype=torch.int64), degrees]):
            load = torch.zeros(num_parts, dtype=torch.int64).index_add_(0, found.part.long(), weight)
            assert torch.equal(found.load[row], load)
            assert (row in found.excess) == bool((load > found.limit[row]).any())
        only_nodes = stream_assignment(graph, num_parts, [weight_of(graph, "nodes")], memory_limit=MEMORY)
        assert only_nodes.excess == [] and int(only_nodes.load.max()) <= max(-(-num_nodes * 21 // (20 * num_parts)), 1)


def test_disconnected_communities_are_not_cut():
    cliques = []
    for i in range(12):
        members = torch.arange(i * 40, (i + 1) * 40)
        pairs = torch.cartesian_prod(members, members).t()
        cliques.append(pairs[:, pairs[0] != pairs[1]])
    edges = torch.randperm(480, generator=torch.Generator().manual_seed(0))[torch.cat(cliques, 1)]
    found = stream_assignment(Graph.from_edge_index(edges, 480), 4, memory_limit=MEMORY)
    assert found.num_cut == 0 and found.excess == [] and found.load[0].tolist() == [120] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: sbm(20_000, num_classes=16, homophily=0.9, num_features=1),
        pytest.param(lambda: sbm(20_000, num_features=1), marks=pytest.mark.long),
        lambda: rmat(10_000, 200_000),
    ],
)
def test_the_cut_is_close_to_metis_in_memory(make):
    graph = make()
    found = stream_assignment(graph, 8, memory_limit=MEMORY)
    assert found.excess == []
    expected = recount_cut(graph, metis(graph, 8, 1 + graph.csc().in_degrees()))
    assert found.num_cut <= 1.05 * expected


def test_one_pass_of_greedy_alone_is_worse():
    """What the clusters are for."""
    graph = sbm(20_000, num_classes=16, homophily=0.9, num_features=1)
    csc = symmetric(graph)
    part, load = torch.full((20_000,), -1, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int64)
    limit = torch.full((1, 8), 2625)
    _, greedy = stream_refine(runs(csc, 20_000)[0], torch.ones(1, 20_000, dtype=torch.int64), part, load, limit)
    assert greedy == recount_cut(graph, part) and int(load.max()) <= 2625
    found = stream_assignment(graph, 8, [weight_of(graph, "nodes")], memory_limit=MEMORY)
    assert found.num_cut < 0.5 * greedy < 0.5 * 0.875 * graph.num_edges()


def test_constraints_that_metis_alone_breaks_are_all_kept():
    """Train nodes in a few communities, three node types: every one of them within 5%."""
    graph = typed_graph(10_000, num_features=1)
    begins, num_nodes = first_nodes(graph), sum(graph.num_nodes(t) for t in graph.node_types)
    weights = [weight_of(graph, "edges")]
    for node_type in graph.node_types:
        is_type = torch.zeros(num_nodes, dtype=torch.bool)
        is_type[begins[node_type] : begins[node_type] + graph.num_nodes(node_type)] = True
        weights.append(is_type)
    train = torch.zeros(num_nodes, dtype=torch.uint8)
    train[: graph.num_nodes("paper")] = graph.node_data["paper"]["y"] == 0
    found = stream_assignment(graph, 4, [*weights, train], memory_limit=MEMORY)
    assert found.excess == []
    assert torch.equal(found.load[-1], torch.bincount(found.part[train.bool()].long(), minlength=4))
    plain = torch.bincount(metis(graph, 4, None)[train.bool()], minlength=4)
    assert int(plain.max()) > 1.5 * int(plain.sum()) / 4 and int(found.load[-1].max()) <= found.limit[-1, 0]
    assert float(found.limit[-1, 0]) <= 1.05 * int(train.sum()) / 4 + 1


def test_limits_per_part_are_kept():
    graph = sbm(3000, num_features=1)
    limits = torch.tensor([[400, 800, 2000]])
    found = stream_assignment(graph, 3, [weight_of(graph, "nodes")], limits, memory_limit=MEMORY)
    assert found.excess == [] and (found.load <= limits).all()


def test_a_constraint_that_cannot_be_kept_is_named():
    graph = random_graph(0, 10, 30)
    one_heavy = torch.ones(10, dtype=torch.int64)
    one_heavy[3] = 100
    limits = torch.tensor([5, 60])
    found = stream_assignment(graph, 2, [weight_of(graph, "nodes"), one_heavy], limits, memory_limit=MEMORY)
    assert found.excess == [1]


def test_the_answer_does_not_depend_on_threads_or_on_how_weights_are_given():
    graph = rmat(5000, 60_000)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(stream_assignment(graph, 6, memory_limit=MEMORY).part)
    finally:
        torch.set_num_threads(before)
    weights = torch.stack([torch.ones(5000, dtype=torch.int64), graph.csc().in_degrees()])
    results.append(stream_assignment(graph, 6, weights, memory_limit=MEMORY).part)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_how_the_nodes_are_cut_into_runs_does_not_matter():
    graph = rmat(500, 6000)
    csc = symmetric(graph)
    answers = []
    for size in (1, 7, 500):
        weight, limit = torch.ones(1, 500, dtype=torch.int64), torch.full((1, 4), 130)
        part, load = torch.full((500,), -1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int64)
        label, sizes = torch.arange(500, dtype=torch.int32), torch.ones(500, dtype=torch.int64)
        counts, orphans = torch.zeros(500, dtype=torch.int32), torch.full((500,), -1, dtype=torch.int32)
        for run in runs(csc, size) * 2:
            mine = weight[:, run.first : run.first + run.indptr.numel() - 1].contiguous()
            stream_refine(run, mine, part, load, limit)
            stream_cluster(run, mine[0], label, sizes, counts, 20, orphans)
        answers.append((part, load, label))
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


@grid(seed=range(20))
def test_a_pass_never_cuts_more_or_breaks_a_limit_and_counts_exactly(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(seed, 80, 500)
    csc = symmetric(graph)
    num_parts = int(rng.integers(2, 7))
    weights = torch.from_numpy(rng.integers(0, 9, (3, 80)))
    part = torch.from_numpy(rng.integers(0, num_parts, 80)).int()
    load = torch.zeros(3, num_parts, dtype=torch.int64).index_add_(1, part.long(), weights)
    limit = load + torch.from_numpy(rng.integers(0, 30, (3, num_parts)))
    cut = recount_cut(graph, part)
    for _ in range(4):
        _, change = stream_refine(runs(csc, 80)[0], weights, part, load, limit)
        cut += change
        assert change <= 0 and cut == recount_cut(graph, part) == stream_cut(runs(csc, 80)[0], part) // 2
        assert torch.equal(load, torch.zeros_like(load).index_add_(1, part.long(), weights))
        assert (load <= limit).all()
    tight = (weights.sum(1, keepdim=True) // num_parts + 9).expand(-1, num_parts).contiguous()
    over = (load - tight).clamp(min=0).double().div(tight).sum()
    stream_refine(runs(csc, 80)[0], weights, part, load, tight, float("inf"))
    assert (load - tight).clamp(min=0).double().div(tight).sum() <= over


def test_clusters_keep_their_limit_and_sizes():
    csc = symmetric(rmat(2000, 20_000))
    weight = torch.from_numpy(np.random.default_rng(0).integers(1, 5, 2000))
    label, sizes = torch.arange(2000, dtype=torch.int32), weight.clone()
    counts, orphans = torch.zeros(2000, dtype=torch.int32), torch.full((2000,), -1, dtype=torch.int32)
    for gathering in (None, None, orphans):
        stream_cluster(runs(csc, 2000)[0], weight, label, sizes, counts, 60, gathering)
        assert torch.equal(sizes, torch.zeros_like(sizes).index_add_(0, label.long(), weight))
        assert int(sizes.max()) <= 60 and not counts.any()
    with_edges = csc.in_degrees() > 0
    assert label[with_edges].unique().numel() < int(with_edges.sum()) / 4


@pytest.mark.parametrize("num_slots", [1 << 14, 1 << 8])
def test_edges_between_clusters_are_counted_and_the_lightest_forgotten(num_slots):
    graph = rmat(1000, 20_000)
    csc = symmetric(graph)
    label = torch.from_numpy(np.random.default_rng(0).integers(-1, 40, 1000)).int()
    table, counts = PairTable(num_slots), torch.zeros(1000, dtype=torch.int32)
    for run in runs(csc, 300):
        table.add(run, label, counts)
    dense = torch.zeros(40, 40, dtype=torch.int64)
    src, dst = label[csc.indices.long()].long(), label[csc.dst()].long()
    inside = (src >= 0) & (dst >= 0) & (dst < src)
    dense.index_put_((dst[inside], src[inside]), torch.ones(1, dtype=torch.int64), accumulate=True)
    (smaller, larger), count = table.pairs()
    assert (smaller < larger).all() and torch.stack([smaller, larger]).unique(dim=1).shape[1] == smaller.numel()
    assert int(count.sum()) + table.forgotten == int(dense.sum())
    if num_slots > 40 * 40:
        assert table.forgotten == 0 and torch.equal(dense[smaller, larger], count)
        assert smaller.numel() == int((dense > 0).sum())
    else:
        assert table.forgotten > 0 and smaller.numel() <= num_slots and (count <= dense[smaller, larger]).all()
        assert dense[smaller, larger].double().mean() > dense[dense > 0].double().mean()


def test_dropped_pages_come_back(tmp_path):
    values = np.arange(1 << 16)
    np.save(tmp_path / "a.npy", values)
    mapped = torch.from_numpy(np.load(tmp_path / "a.npy", mmap_mode="c"))
    mapped[5] = -1  # private to this process, and not in the file
    anonymous = torch.arange(1 << 16)
    for rows in (mapped, anonymous, mapped[:3], mapped[:0]):
        drop_pages(rows)
    assert int(mapped[5]) == -1 and torch.equal(mapped[6:], torch.from_numpy(values)[6:])
    assert torch.equal(anonymous, torch.from_numpy(values))


def test_bad_arguments_are_refused():
    graph = random_graph(0, 10, 30)
    for arguments, message in [
        ({"num_parts": 0}, "num_parts must be at least 1"),
        ({"memory_limit": 1000}, "memory_limit must be at least"),
        ({"weights": [torch.ones(9, dtype=torch.int64)]}, r"weights\[0\] must be integers \[10\]"),
        ({"weights": [torch.ones(10)]}, "must be integers"),
        ({"weights": [-torch.ones(10, dtype=torch.int64)]}, "must be >= 0"),
        ({"weights": []}, "at least one constraint"),
        ({"limits": torch.tensor([1])}, r"limits must be \[2\] or \[2, 3\]"),
        ({"imbalance": 0.9}, "imbalance must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream_assignment(graph, **({"num_parts": 3, "memory_limit": MEMORY} | arguments))


@pytest.mark.parametrize("change,message", [
    ({"indices": torch.tensor([0, 9], dtype=torch.int32)}, "indices must be in"),
    ({"indptr": torch.tensor([0, 2, 1])}, "never decrease"),
    ({"first": 2}, "2 nodes from 2 on are not in"),
    ({"part": torch.zeros(3)}, "part must be Int"),
    ({"weights": torch.ones(1, 3, dtype=torch.int64)}, "a column per node"),
    ({"limit": torch.ones(1, 3, dtype=torch.int64)}, "a column per part"),
    ({"limit": torch.tensor([[5, -(2**63)]])}, "limit must not be negative"),
    ({"load": torch.tensor([[5, -1]])}, "load must not be negative"),
    ({"weights": torch.tensor([[2**61, 2**61 + 1]])}, r"add up to at most 2\^62"),
    ({"load": torch.tensor([[2**62, 0]])}, r"add up to at most 2\^62"),
])  # fmt: skip
def test_a_malformed_run_is_refused(change, message):
    given = {
        "first": 0,
        "indptr": torch.tensor([0, 1, 2]),
        "indices": torch.tensor([1, 0], dtype=torch.int32),
        "weights": torch.ones(1, 2, dtype=torch.int64),
        "part": torch.zeros(3, dtype=torch.int32),
        "load": torch.zeros(1, 2, dtype=torch.int64),
        "limit": torch.ones(1, 2, dtype=torch.int64),
    } | change
    run = NodeRun(given.pop("first"), given.pop("indptr"), given.pop("indices"))
    with pytest.raises(ValueError, match=message):
        stream_refine(run, **given)


@pytest.mark.parametrize("change,message", [
    ({"weight": torch.tensor([1, -1])}, "weight must not be negative, node 1 has -1"),
    ({"limit": -1}, "limit must not be negative"),
    ({"limit": 2**63 - 1, "size": torch.tensor([2**63 - 1, 1, -(2**63)])}, None),
])  # fmt: skip
def test_sizes_of_clusters_do_not_overflow(change, message):
    run = NodeRun(0, torch.tensor([0, 1, 2]), torch.tensor([1, 0], dtype=torch.int32))
    given = {
        "weight": torch.ones(2, dtype=torch.int64),
        "label": torch.arange(3, dtype=torch.int32),
        "size": torch.ones(3, dtype=torch.int64),
        "counts": torch.zeros(3, dtype=torch.int32),
        "limit": 5,
    } | change
    if message is None:
        assert stream_cluster(run, **given) == 1, "one follows the other, who has no room for it"
        return
    with pytest.raises(ValueError, match=message):
        stream_cluster(run, **given)


@pytest.mark.parametrize("damage,message", [
    (lambda table: table._keys.fill_(7), "keys has no room left, and state says that it has"),
    (lambda table: table._state.fill_(60), "state says that keys has 60 pairs, and it has none"),
])  # fmt: skip
def test_a_damaged_table_of_pairs_is_refused_instead_of_searched_for_ever(damage, message):
    table = PairTable(64)
    damage(table)
    run = NodeRun(0, torch.tensor([0, 1, 2]), torch.tensor([1, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        table.add(run, torch.arange(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))


def test_nothing_is_left_behind(tmp_path):
    stages: dict[str, list[float]] = {}
    found = stream_assignment(
        rmat(2000, 20_000), 4, memory_limit=MEMORY, folder=tmp_path,
        progress=lambda done, total, stage: stages.setdefault(stage, []).append(done / total),
    )  # fmt: skip
    assert os.listdir(tmp_path) == [] and found.num_passes >= 3
    assert list(stages) == ["adjacency", "clustering", "contracting", "refining"]
    for shares in stages.values():
        assert shares == sorted(shares) and 0 < shares[-1] <= 1


STREAM = """
import sys
from pathlib import Path
import pymetis, torch
from gnnsys.graph import load
from gnnsys.partition import stream_assignment
torch.set_num_threads(2)
graph = load(sys.argv[1], verify=False)
print("ready", flush=True)
found = stream_assignment(graph, 8, memory_limit=int(sys.argv[2]), folder=Path(sys.argv[3]))
print(found.num_cut / found.num_edges, found.excess == [])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_a_graph_larger_than_the_limit_is_assigned_within_the_limit_and_the_estimate(tmp_path):
    """2.4M edges: METIS would want several times the limit, which is the least there is."""
    num_nodes, num_edges, limit = 40_000, 2_400_000, 64 << 20
    save(sbm(num_nodes, avg_degree=60, num_classes=16, homophily=0.9, num_features=1), tmp_path / "graph")
    peak = peak_memory(STREAM, tmp_path / "graph", limit, tmp_path, timeout=300)
    estimate = estimate_streaming(num_nodes, num_edges, 8, memory_limit=limit)
    assert peak.anonymous <= estimate.peak <= limit
    assert estimate_in_memory(num_nodes, num_edges, method="metis").peak > 4 * limit
    assert peak.anonymous < 8 * num_edges  # which the graph takes, with two ids of 4 bytes per edge
    cut, kept = peak.output.split()
    assert float(cut) < 0.12 and kept == "True"  # the communities themselves leave 0.094
