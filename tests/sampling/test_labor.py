"""LaborSampler: one answer on a graph and on parts over real connections, and fewer nodes at the same variance."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph, NodeType, rmat
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.partition import relabel
from gnnsys.sampling import LaborSampler, NeighborSampler, Sample, SampleKey, Sampler
from gnnsys.sampling.labor_importance import importance
from tests.sampling.machines import assert_same_sample, copies, homogeneous, machines, to_global, typed

KEY = SampleKey(seed=3, epoch=1, batch=4)
SEEDS: dict[NodeType, Tensor] = {NODE: torch.tensor([7, 11, 80, 3, 80, 119])}
KINDS = {
    "plain": ([4, 3], {}),
    "all neighbours": ([-1, 2], {}),
    "a hop of none": ([3, 0, 2], {}),
    "one number for all hops": ([4, 3], {"layer_dependency": True}),
    "normalized": ([4, 3], {"normalize": True}),
    "disjoint": ([4, 3], {"disjoint": True}),
    "blocks": ([4, 3], {"expand": "frontier"}),
    "normalized blocks": ([4, 3], {"expand": "frontier", "normalize": True}),
}


LONG = [pytest.param(number, marks=pytest.mark.long) for number in (2, 3)]  # of parts


@pytest.fixture(scope="module", params=[1, *LONG, 4])
def parted(request, tmp_path_factory):
    graph = homogeneous()
    with machines(graph, tmp_path_factory.mktemp("parts") / "p", request.param) as graphs:
        yield graph, graphs


@pytest.mark.parametrize("kind", KINDS)
def test_every_machine_samples_what_one_process_samples(parted, kind: str) -> None:
    graph, graphs = parted
    fanouts, options = KINDS[kind]
    expected = LaborSampler(graph, fanouts, **options).sample(SEEDS, key=KEY)
    for mine in graphs:
        sampler = LaborSampler(mine, fanouts, **options)
        assert_same_sample(sampler.sample(to_global(mine, SEEDS), key=KEY), expected, mine)


@pytest.mark.parametrize("kind", KINDS)
def test_typed_samples_are_those_of_one_process(tmp_path: Path, kind: str) -> None:
    graph = typed()
    fanouts, options = KINDS[kind]
    seeds = {"paper": torch.tensor([5, 60, 2, 5]), "author": torch.tensor([39, 0])}
    tree = {"paper": torch.tensor([0, 1, 2, 3]), "author": torch.tensor([4, 5])} if "disjoint" in options else None
    with machines(graph, tmp_path / "p", 2) as graphs:
        expected = LaborSampler(graph, fanouts, **options).sample(seeds, key=KEY, tree=tree)
        for mine in graphs:
            ours = LaborSampler(mine, fanouts, **options).sample(to_global(mine, seeds), key=KEY, tree=tree)
            assert_same_sample(ours, expected, mine)


def test_all_parts_in_one_process_wide_ids_and_a_deeper_halo_change_nothing(tmp_path: Path, monkeypatch) -> None:
    graph = homogeneous()
    expected = LaborSampler(graph, [4, 3]).sample(SEEDS, key=KEY)
    with machines(graph, tmp_path / "one", 4, machine_of_part=[0, 0, 0, 0], halo_hops=2) as graphs:
        ours = LaborSampler(graphs[0], [4, 3]).sample(to_global(graphs[0], SEEDS), key=KEY)
        assert_same_sample(ours, expected, graphs[0])
    monkeypatch.setattr(relabel, "INT32_END", 50)  # as if no more than 50 numbers fitted
    with machines(graph, tmp_path / "wide", 3) as graphs:
        assert graphs[0].parts.part(0).original_ids().dtype == torch.int64
        ours = LaborSampler(graphs[0], [4, 3]).sample(to_global(graphs[0], SEEDS), key=KEY)
        assert_same_sample(ours, expected, graphs[0])


def test_excluded_edges_are_the_same_ones(parted) -> None:
    graph, graphs = parted
    edges = graph.edge_index()
    src, dst = edges[:, torch.isin(edges[1], SEEDS[NODE])][:, ::2]
    whole = LaborSampler(graph, [4, 3])
    exclude = {EDGE: whole.find_edges(EDGE, src, dst)}
    expected = whole.sample(SEEDS, key=KEY, exclude=exclude)
    assert not torch.isin(expected.edge[EDGE], graph.csc().edge_ids[exclude[EDGE]].long()).any()
    for mine in graphs:
        ours = LaborSampler(mine, [4, 3])
        found = {EDGE: ours.find_edges(EDGE, mine.global_ids(src), mine.global_ids(dst))}
        assert_same_sample(ours.sample(to_global(mine, SEEDS), key=KEY, exclude=found), expected, mine)


def test_batches_sampled_by_several_threads_at_once_do_not_mix(parted) -> None:
    graph, graphs = parted
    keys = [SampleKey(1, 0, b) for b in range(10)]
    whole, ours = LaborSampler(graph, [5, 4]), LaborSampler(graphs[-1], [5, 4])
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda key: ours.sample(to_global(graphs[-1], SEEDS), key=key), keys))
    for key, sample in zip(keys, taken, strict=True):
        assert_same_sample(sample, whole.sample(SEEDS, key=key), graphs[-1])


def test_original_ids_of_halo_nodes_travel_once(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        mine = graphs[0]
        for batch in range(3):
            LaborSampler(mine, [4, 3]).sample(to_global(mine, SEEDS), key=SampleKey(0, 0, batch))
        assert mine.client.counters()["kinds"]["PREPARE"]["messages_out"] == 2  # what is needed, and here it is


def test_edge_types_and_hops_share_the_number_of_a_source_where_they_should() -> None:
    """A star of each kind: what one takes of the sources, the other takes too."""
    ends = torch.stack([torch.arange(1, 60), torch.zeros(59, dtype=torch.int64)])
    graph = Graph.from_edge_indices({("a", "x", "b"): ends, ("a", "y", "c"): ends}, {"a": 60, "b": 1, "c": 1})
    sample = LaborSampler(graph, [8]).sample({"b": torch.tensor([0]), "c": torch.tensor([0])}, key=KEY)
    assert torch.equal(sample.row["a", "x", "b"], sample.row["a", "y", "c"]) and sample.row["a", "x", "b"].numel() > 1
    loops = Graph.from_edge_index(torch.stack([torch.arange(60), torch.zeros(60, dtype=torch.int64)]), 60)
    seeds = {NODE: torch.tensor([0])}
    for shared in (True, False):
        blocks = LaborSampler(loops, [8, 8], layer_dependency=shared, expand="frontier").sample(seeds, key=KEY).blocks
        inner, outer = ({int(e) for e in block.csc[EDGE].edge_ids} for block in reversed(blocks))
        assert (inner == outer) == shared


def output(sample: Sample, rows: Tensor) -> Tensor:
    """A linear model, layer by layer: the weighted sum over sampled in-edges, or their mean without weights."""
    x = rows[sample.node[NODE]]
    for block in sample.blocks:
        csc = block.csc[EDGE]
        dst = csc.dst()
        if block.edge_weight is None:
            weight = 1 / torch.bincount(dst, minlength=csc.num_dst)[dst].double()
        else:
            weight = block.edge_weight[EDGE].double()
        out = torch.zeros(block.num_dst[NODE], rows.shape[1], dtype=torch.float64)
        x = out.index_add_(0, dst, weight[:, None] * x[csc.indices.long()])
    return x


def exact_output(graph: Graph, rows: Tensor) -> Tensor:
    """The same with two layers over all in-edges."""
    csc = graph.csc()
    degree = csc.in_degrees().clamp(min=1).double()[:, None]
    for _ in range(2):
        rows = torch.zeros_like(rows).index_add_(0, csc.dst(), rows[csc.indices.long()]) / degree
    return rows


NUM_COPIES, NUM_KEYS = 50, 40  # together 2000 samples


def many_outputs(
    make: Callable[[Graph], Sampler], graph: Graph, rows: Tensor, num_seeds: int, num_keys: int = NUM_KEYS
) -> tuple[Tensor, float]:
    """Outputs at the first nodes in many samples, [samples, num_seeds, 1], and how many nodes a sample had."""
    sampler = make(copies(graph, NUM_COPIES))
    shifts = torch.arange(NUM_COPIES)[:, None] * graph.num_nodes()
    seeds = {NODE: (torch.arange(num_seeds) + shifts).view(-1)}
    samples = [sampler.sample(seeds, key=SampleKey(0, 0, batch)) for batch in range(num_keys)]
    found = torch.cat([output(s, rows.repeat(NUM_COPIES, 1)).view(NUM_COPIES, num_seeds, 1) for s in samples])
    return found, sum(s.node[NODE].numel() for s in samples) / found.shape[0]


def assert_exact_in_expectation(found: Tensor, exact: Tensor) -> None:
    error = (found.mean(0) - exact).abs() / (found.std(0) / found.shape[0] ** 0.5).clamp(min=1e-9)
    assert found.shape[0] == 2000 and float(error.max()) < 4


def test_two_layers_are_exact_in_expectation() -> None:
    graph = homogeneous(60, 900)
    rows = torch.randn(60, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    found, _ = many_outputs(lambda all_copies: LaborSampler(all_copies, [6, 6], expand="frontier"), graph, rows, 20)
    assert_exact_in_expectation(found, exact_output(graph, rows)[:20])


def test_fewer_nodes_than_uniform_at_the_same_variance_of_two_layers() -> None:
    """LABOR's nodes err together where they are shared: at equal fanouts it has half the nodes and some variance more.
    So its fanout is raised until the variance is uniform sampling's."""
    src, dst = rmat(20_000, 2_000_000, seed=3).edge_index()
    once = (src * 20_000 + dst).unique()  # parallel edges are taken together, which is another variance
    graph = Graph.from_edge_index(torch.stack([once // 20_000, once % 20_000]), 20_000)
    some = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))
    seeds = {NODE: some[graph.csc().in_degrees()[some] > 0][:256]}
    rows = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    exact = exact_output(graph, rows)[seeds[NODE]]
    nodes, errors = {}, {}
    for name, sampler in {
        "labor": LaborSampler(graph, [15, 15], expand="frontier", normalize=True),
        "uniform": NeighborSampler(graph, [10, 10], expand="frontier"),
    }.items():
        found = [sampler.sample(seeds, key=SampleKey(0, 0, batch)) for batch in range(8)]
        nodes[name] = sum(s.node[NODE].numel() for s in found) / 8
        errors[name] = sum(float((output(s, rows) - exact).square().mean()) for s in found) / 8
    assert nodes["labor"] <= 0.8 * nodes["uniform"], nodes
    assert errors["labor"] <= errors["uniform"], errors


def test_importance_gives_each_node_the_variance_of_its_fanout_and_rounds_lower_the_nodes() -> None:
    """The sum that fixes c, by brute force, and the expected number of sources: edges of one share r_u."""
    graph = homogeneous(80, 3000)
    csc = graph.csc()
    source, degree = csc.indices.long(), csc.in_degrees()
    expected = []
    for rounds in range(4):
        p = importance(csc.indptr, source, 6, rounds)
        assert float(p.max()) <= 1 and float(p.min()) > 0
        sums = torch.zeros(80, dtype=torch.float64).index_add_(0, csc.dst(), 1 / p)
        big = degree > 6
        assert torch.allclose(sums[big], degree[big].double().square() / 6)
        assert bool((p[(degree <= 6)[csc.dst()]] == 1).all())
        expected.append(float(torch.zeros(80, dtype=torch.float64).scatter_reduce_(0, source, p, "amax").sum()))
    assert expected[0] > expected[1] > expected[2] >= expected[3] - 1e-9, expected
    uniform = importance(csc.indptr, source, 6, 0)
    assert torch.allclose(uniform, (6 / degree.double()).clamp(max=1)[csc.dst()])


def test_labor_i_is_exact_in_expectation_and_has_fewer_nodes() -> None:
    graph = homogeneous(60, 900)
    rows = torch.randn(60, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    exact, nodes = exact_output(graph, rows)[:20], []
    for rounds in (0, 1, 3):
        options = {"expand": "frontier", "importance_sampling": rounds}
        make, num_keys = partial(LaborSampler, num_neighbors=[6, 6], **options), NUM_KEYS if rounds == 1 else 6
        found, num_nodes = many_outputs(make, graph, rows, 20, num_keys)
        if rounds == 1:
            assert_exact_in_expectation(found, exact)
        nodes.append(num_nodes)
    assert nodes[0] > nodes[1] > nodes[2], nodes


def test_labor_i_excludes_edges_and_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    graph = homogeneous()
    edges = graph.edge_index()
    src, dst = edges[:, torch.isin(edges[1], SEEDS[NODE])][:, ::2]
    sampler = LaborSampler(graph, [4, 0, 3], importance_sampling=2)
    exclude = {EDGE: sampler.find_edges(EDGE, src, dst)}
    sample = sampler.sample(SEEDS, key=KEY, exclude=exclude)
    assert not torch.isin(sample.edge[EDGE], graph.csc().edge_ids[exclude[EDGE]].long()).any()
    for options, message in (({"disjoint": True}, "leave one away"), ({"importance_sampling": -1}, "0 to 10 rounds")):
        with pytest.raises(ValueError, match=message):
            LaborSampler(graph, [4], **{"importance_sampling": 1, **options})
    with machines(graph, tmp_path / "p", 2) as graphs, pytest.raises(ValueError, match="whole graph in one process"):
        LaborSampler(graphs[0], [4], importance_sampling=1)


def test_loaders_hand_out_the_weights() -> None:
    graph = homogeneous()
    batch = next(iter(NeighborLoader(graph, sampler=LaborSampler(graph, [4, 3]), batch_size=16)))
    assert batch.edge_weight.shape == batch.edge_index[0].shape and bool((batch.edge_weight > 0).all())
    links = LinkNeighborLoader(graph, sampler=LaborSampler(graph, [4, 3]), batch_size=16)
    assert next(iter(links)).edge_weight.numel() > 0


def test_times_are_refused() -> None:
    with pytest.raises(ValueError, match="takes no seed_time"):
        LaborSampler(homogeneous(), [2]).sample(SEEDS, key=KEY, seed_time=SEEDS)
