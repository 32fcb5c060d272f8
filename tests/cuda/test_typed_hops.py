"""All hops of typed graphs in one native call: the sample is that of the walk in Python and of the CPU, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.ops import CSC, HopRelation, HopStructure, sample_hops, workspace_bytes
from gnnsys.ops._library import native
from gnnsys.ops._workspace import SMALL_BYTES
from gnnsys.sampling import LaborSampler, NeighborSampler, Sample, SampleKey
from tests.cuda.places import PLACES, placed, same_sample, same_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

Make = Callable[..., NeighborSampler]
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "uniform": (NeighborSampler, {}),
    "replace": (NeighborSampler, {"replace": True}),
    "labor": (LaborSampler, {}),
}


def random_csc(num_src: int, num_dst: int, num_edges: int, g: torch.Generator, wide: bool, ordered: bool) -> CSC:
    """Destinations of very different in-degrees; in the order of destinations positions are the edge ids."""
    src = torch.randint(0, num_src, (num_edges,), generator=g)
    dst = (torch.rand(num_edges, generator=g) ** 3 * num_dst).long()
    dst = dst.sort().values if ordered else dst
    csc = CSC.from_edge_index(torch.stack([src, dst]), num_src, num_dst, narrow=True)
    ids = csc.edge_ids
    return CSC(csc.indptr, csc.indices.long(), num_src, None if ids is None else ids.long()) if wide else csc


def random_graph(seed: int) -> Graph:
    """2 to 4 node types and 3 to 10 edge types, some of one type with itself, some without edges; ids have 32 bits, 64,
    or some the one and some the other."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    names = "abcd"[: draw.randint(2, 4)]
    num_nodes = {name: draw.choice([5, 40, 150, 400]) for name in names}
    if draw.random() < 0.2 and len(names) > 2:
        num_nodes[draw.choice(names)] = 0
    structures: dict[EdgeType, CSC] = {}
    for number in range(draw.randint(3, 10)):
        src, dst = (draw.choice([t for t in names if num_nodes[t]] if number < 3 else names) for _ in range(2))
        exists = num_nodes[src] and num_nodes[dst] and (number < 3 or draw.random() < 0.8)
        count = draw.choice([30, 900, 5000] if number else [900]) if exists else 0
        wide = seed % 3 == 1 or (seed % 3 == 2 and draw.random() < 0.5)
        made = random_csc(max(num_nodes[src], 1), max(num_nodes[dst], 1), count, g, wide, draw.random() < 0.3)
        if not exists:
            made = CSC(torch.zeros(num_nodes[dst] + 1, dtype=torch.int64), made.indices, num_nodes[src])
        structures[src, f"r{number}", dst] = made
    return Graph(num_nodes, structures)


def random_fanouts(graph: Graph, draw: random.Random) -> dict[EdgeType, list[int]]:
    num_hops = draw.randint(1, 4)
    return {t: [draw.choice([-1, 0, 1, 3, 10, 20, 45]) for _ in range(num_hops)] for t in graph.edge_types}


def random_seeds(graph: Graph, draw: random.Random, g: torch.Generator) -> dict[str, Tensor]:
    """Of one type, of several, of all, or none; some repeat."""
    types = [t for t in graph.node_types if graph.num_nodes(t)]
    chosen = draw.sample(types, draw.randint(0, len(types)))
    return {t: torch.randint(0, graph.num_nodes(t), (draw.choice([0, 1, 30]),), generator=g) for t in chosen}


def same_of_both(there: Sample, here: Sample) -> None:
    same_sample(there, here)
    same_values(there.edge_weight, here.edge_weight, "edge_weight")


def check(graph: Graph, place: str, kind: str, fanouts: Any, batches: list[Mapping[str, Tensor]]) -> int:
    """How many edges were compared."""
    make, options = KINDS[kind]
    here = make(graph, fanouts, **options)
    there, walk = (make(placed(graph, place), fanouts, device="cuda", **options) for _ in range(2))
    assert there._plain is not None
    walk._plain = None
    num_edges = 0
    for number, seeds in enumerate(batches):
        key = SampleKey(seed=3, epoch=1, batch=number)
        expected = here.sample(seeds, key=key)
        same_of_both(there.sample(seeds, key=key), expected)
        same_of_both(walk.sample(seeds, key=key), expected)
        num_edges += sum(map(sum, expected.num_sampled_edges.values()))
    return num_edges


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_graph_gives_the_sample_of_the_walk_and_of_the_cpu(place: str, kind: str, seed: int) -> None:
    graph, draw, g = random_graph(seed), random.Random(seed), torch.Generator().manual_seed(seed)
    everyone = {t: torch.arange(graph.num_nodes(t)) for t in graph.node_types}
    num_edges = 0
    for _ in range(3):
        batches = [random_seeds(graph, draw, g) for _ in range(3)]
        num_edges += check(graph, place, kind, random_fanouts(graph, draw), [*batches, everyone, {}])
    assert num_edges > 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_relations", [31, 33, 60])
def test_more_relations_than_one_launch_takes(kind: str, num_relations: int) -> None:
    g = torch.Generator().manual_seed(num_relations)
    sizes = {"a": 300, "b": 50}
    ends = [("a", "b"), ("b", "a"), ("a", "a")]
    structures = {
        (src, f"r{i}", dst): random_csc(sizes[src], sizes[dst], 400 + i, g, i % 7 == 3, i % 2 == 0)
        for i in range(num_relations)
        for src, dst in [ends[i % 3]]
    }
    seeds = {"b": torch.arange(20), "a": torch.tensor([4, 4, 299])}
    check(Graph(sizes, structures), "device", kind, [3, 2, -1], [seeds, {"a": seeds["a"]}, {"b": seeds["b"]}])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fanouts", [[10, 8, 5], [-1, -1], [3, -1, 2]], ids=str)
def test_many_nodes_of_several_types(place: str, fanouts: list[int]) -> None:
    """Many tiles per list, and tables of some types that are made anew while others stay."""
    g = torch.Generator().manual_seed(5)
    sizes = {"paper": 100_000, "author": 60_000, "place": 300}
    ends = [("author", "paper", 400_000), ("paper", "paper", 700_000), ("place", "author", 60_000)]
    ends += [(dst, src, count) for src, dst, count in ends]
    structures = {
        (src, f"r{i}", dst): random_csc(sizes[src], sizes[dst], count, g, False, i == 2)
        for i, (src, dst, count) in enumerate(ends)
    }
    batches = [{"paper": torch.randint(0, 100_000, (1200,), generator=g)}, {"place": torch.arange(200)}]
    check(Graph(sizes, structures), place, "uniform", fanouts, batches)


def test_a_type_that_one_hop_does_not_find_may_be_found_by_a_later_one() -> None:
    """a -> b -> c, from seeds of c: hop 0 finds b alone, hop 1 a alone, and hop 2 nothing."""
    chain = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])
    structures = {("a", "to", "b"): chain, ("b", "to", "c"): chain, ("d", "to", "d"): chain}
    graph = Graph.from_edge_indices(structures, dict.fromkeys("abcd", 4))
    batches = [{"c": torch.tensor([0, 1])}, {"c": torch.tensor([3])}, {"a": torch.arange(4)}]
    check(graph, "device", "uniform", [2, 2, 2, 2], batches)
    sample = NeighborSampler(graph.to("cuda"), [2, 2, 2, 2]).sample(batches[0], key=SampleKey(0, 0, 0))
    assert sample.num_sampled_nodes == {"a": [0, 0, 4, 0, 0], "b": [0, 3, 0, 0, 0], "c": [2, 0, 0, 0, 0], "d": [0] * 5}
    assert sample.num_sampled_edges[("d", "to", "d")] == [0] * 4


def structure_of(graph: Graph) -> HopStructure:
    number = {t: i for i, t in enumerate(graph.node_types)}
    relations = [HopRelation(graph.csc(t), number[t[0]], number[t[2]]) for t in graph.edge_types]
    return HopStructure(relations, [graph.num_nodes(t) for t in graph.node_types])


@pytest.mark.parametrize("num_hops", [1, 3])
@pytest.mark.parametrize("labor", [False, True])
@pytest.mark.parametrize("fanout, num_edges", [(6, 90_000), (500, 900)])  # tables are made for what fanouts promise
def test_a_call_takes_no_more_memory_than_it_says(num_hops: int, labor: bool, fanout: int, num_edges: int) -> None:
    g = torch.Generator().manual_seed(1)
    sizes = {"a": 20_000, "b": 9000}
    ends = [("a", "b"), ("b", "a"), ("a", "a")]
    graph = Graph(sizes, {(s, "to", d): random_csc(sizes[s], sizes[d], num_edges, g, False, False) for s, d in ends})
    structure, on = structure_of(graph.to("cuda")), torch.empty(0, device="cuda")
    seeds, fanouts = [torch.arange(500), torch.arange(300)], [fanout] * (3 * num_hops)
    arguments = (*structure.arguments, seeds, fanouts, list(range(len(fanouts))), False, labor, on)
    stated = workspace_bytes("sample_hops", *arguments, device="cuda")
    native.sample_hops(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    nodes, edge_index, edge_ids, _, weight = native.sample_hops(*arguments)
    most = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    kept = sum(t.nbytes for each in (nodes, edge_index, edge_ids, weight) for t in each)
    assert 0 < most - kept <= stated + SMALL_BYTES


def test_an_id_that_is_none_is_refused_in_a_graph_whose_ids_have_two_widths() -> None:
    one = [torch.tensor([0, 1, 2]), torch.tensor([0, -7])]
    wide, narrow = (CSC(one[0].cuda(), one[1].cuda().to(dtype), 2) for dtype in (torch.int64, torch.int32))
    wide.indices.zero_()
    structure = HopStructure([HopRelation(wide, 0, 0), HopRelation(narrow, 0, 0)], [2])
    with pytest.raises(ValueError, match=r"ids must be in \[0, 4294967296\), got -1"):
        sample_hops(structure, [torch.tensor([0, 1])], [5, 5], keys=[1, 2], on=torch.empty(0, device="cuda"))


def test_bad_arguments_are_refused() -> None:
    graph = Graph.from_edge_indices({("a", "to", "b"): torch.tensor([[0, 1], [2, 0]])}, {"a": 2, "b": 3})
    there = graph.to("cuda")
    structure, on = structure_of(there), torch.empty(0, device="cuda")
    none, some = torch.empty(0, dtype=torch.int64), torch.tensor([2])
    found = sample_hops(structure, [none, some], [1], keys=[5], on=on)
    assert found.num_nodes == [[0, 1], [1, 0]] and found.num_edges == [[1]] and found.nodes[0].tolist() == [0]
    with pytest.raises(ValueError, match=r"seeds must be in \[0, 2\), got 2 to 2"):
        sample_hops(structure, [some, none], [1], keys=[5], on=on)
    with pytest.raises(ValueError, match="seeds must have an entry for each of 2 node types"):
        sample_hops(structure, [some], [1], keys=[5], on=on)
    with pytest.raises(ValueError, match="a fanout and a key per relation and hop"):
        sample_hops(structure, [none, some], [1, 2], keys=[5], on=on)
    with pytest.raises(ValueError, match="fanout must be -1"):
        sample_hops(structure, [none, some], [-2], keys=[5], on=on)
    with pytest.raises(ValueError, match="leave one of labor and replace away"):
        sample_hops(structure, [none, some], [1], keys=[5], replace=True, labor=True, on=on)
    with pytest.raises(ValueError, match="on must be a tensor on the device"):
        sample_hops(structure, [none, some], [1], keys=[5], on=none)
    csc = there.csc(("a", "to", "b"))
    with pytest.raises(ValueError, match=r"ends must be node types, in \[0, 2\)"):
        sample_hops(HopStructure([HopRelation(csc, 0, 2)], [2, 3]), [none, some], [1], keys=[5], on=on)
    with pytest.raises(ValueError, match="indptr must have 3 entries"):
        sample_hops(HopStructure([HopRelation(csc, 1, 0)], [2, 3]), [none, none], [1], keys=[5], on=on)
    with pytest.raises(ValueError, match="original must have one id per node, 3, got 2"):
        short = HopStructure([HopRelation(csc, 0, 1)], [2, 3], [torch.arange(2, device="cuda")] * 2)
        sample_hops(short, [none, some], [1], keys=[5], on=on)
    in_host_memory = structure_of(graph)
    with pytest.raises(ValueError, match="or in pinned host memory"):
        sample_hops(in_host_memory, [none, some], [1], keys=[5], on=on)
