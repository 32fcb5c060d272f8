"""Loaders on a graph in parts over several machines: every batch is the single-process one, row for row."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import Batch, LinkNeighborLoader, NeighborLoader, PipelineOptions, Sampled
from gnnsys.loader.fetch import Fetch
from gnnsys.ops import BufferPool
from gnnsys.partition import Placement
from gnnsys.sampling import DistGraph, NeighborSampler, SampleKey
from gnnsys.seeds import split
from gnnsys.store import RowBuffers
from tests.sampling.machines import homogeneous, machines, typed
from tests.seeds.test_shares import Seeds
from tests.support.grid import every_value


def seeds_of(graph: DistGraph, node_type: str, original: Tensor) -> Any:
    return graph.from_original(original, node_type)


def assert_same_batch(ours: Batch, theirs: Batch, graph: DistGraph) -> None:
    """Structure and rows are equal; ids are global in ours, original in theirs."""
    assert ours.node_types == theirs.node_types and ours.edge_types == theirs.edge_types
    for t in theirs.node_types:
        mine, other = ours.nodes[t], theirs.nodes[t]
        assert list(mine) == list(other)
        assert torch.equal(graph.original_ids(mine["n_id"], t), other["n_id"])
        for name in set(other) - {"n_id"}:
            assert (
                torch.equal(mine[name], other[name]) if isinstance(other[name], Tensor) else mine[name] == other[name]
            )
    for e in theirs.edge_types:
        mine, other = ours.edges[e], theirs.edges[e]
        assert list(mine) == list(other)
        for name in set(other) - {"e_id"}:
            assert (
                torch.equal(mine[name], other[name]) if isinstance(other[name], Tensor) else mine[name] == other[name]
            )


@pytest.fixture(scope="module", params=["homogeneous", "typed"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    graph = homogeneous() if request.param == "homogeneous" else typed()
    folder: Path = tmp_path_factory.mktemp("parts")
    with machines(graph, folder / "parts", 3, machine_of_part=[0, 1, 1]) as graphs:
        yield graph, graphs


OPTIONS = {"batch_size": 8, "shuffle": True, "seed": 5}


def test_batches_that_are_sampled_in_groups_equal_those_of_one_process(case: Any) -> None:
    graph, graphs = case
    node_type = graph.node_types[0]
    original = torch.arange(min(40, graph.num_nodes(node_type)))
    expected = list(NeighborLoader(graph, [4, 3], input_nodes=(node_type, original), num_threads=0, **OPTIONS))
    for there in graphs:
        loader = NeighborLoader(
            there, [4, 3], input_nodes=seeds_of(there, node_type, original), pipeline=PipelineOptions(group=3),
            across_epochs=False, **OPTIONS,
        )  # fmt: skip
        for ours, theirs in zip(loader, expected, strict=True):
            assert_same_batch(ours, theirs, there)
        loader.close()


@pytest.mark.usefixtures("one_epoch")
def test_padded_batches_equal_those_of_one_process(case: Any) -> None:
    graph, graphs = case
    node_type = graph.node_types[0]
    original = torch.randperm(graph.num_nodes(node_type), generator=torch.Generator().manual_seed(2))[:60]
    options: dict[str, Any] = {**OPTIONS, "batch_size": 16, "pad": True}
    expected = list(NeighborLoader(graph, [4, 3], input_nodes=(node_type, original), num_threads=0, **options))
    for there in graphs:
        loader = NeighborLoader(there, [4, 3], input_nodes=seeds_of(there, node_type, original), **options)
        for ours, theirs in zip(loader, expected, strict=True):
            assert_same_batch(ours, theirs, there)
        loader.close()


@pytest.mark.usefixtures("one_epoch")
@every_value(num_threads=[0, 1, None], share=[False, True])
def test_batches_equal_those_of_one_process(case: Any, num_threads: int | None, share: bool) -> None:
    graph, graphs = case
    node_type = graph.node_types[0]
    original = torch.randperm(graph.num_nodes(node_type), generator=torch.Generator().manual_seed(2))[:60]
    expected = list(NeighborLoader(graph, [4, 3], input_nodes=(node_type, original), num_threads=0, **OPTIONS))
    for machine, there in enumerate(graphs):
        options = {"num_threads": num_threads, "pipeline": PipelineOptions(share=share), **OPTIONS}
        loader = NeighborLoader(there, [4, 3], input_nodes=seeds_of(there, node_type, original), **options)
        batches = list(loader)
        assert len(batches) == len(expected) == 8
        for ours, theirs in zip(batches, expected, strict=True):
            assert_same_batch(ours, theirs, there)
        loader.close()
        counts = loader.counters()["fetch"].counts
        assert counts["bytes_local"] > 0 and counts["bytes_remote"] > 0, machine
        assert (counts["rows_shared"] > 0) == share


def test_batches_in_flight_ask_a_store_for_a_row_once(case: Any) -> None:
    graph, graphs = case
    there, node_type = graphs[0], graph.node_types[0]
    sampler = NeighborSampler(there, [4, 3])
    fetch = Fetch(there, names=None, wire_dtype=None)
    fetch.prepare(RowBuffers(BufferPool(max_free=4)), num_in_flight=5)
    samples = [sampler.sample({node_type: torch.arange(8 * k, 8 * k + 20)}, key=SampleKey(0, 0, k)) for k in range(5)]
    begun = [fetch.begin(Sampled(sample, node_type)) for sample in samples]
    remote = [
        ids[there.node_data[node_type]["x"].remote_positions(ids)] for ids in (s.node[node_type] for s in samples)
    ]
    for number in (1, 0, 4, 3, 2):  # in any order
        done = fetch.finish(begun[number])
        for t, arrays in done.rows.items():
            for name, rows in arrays.items():
                ids = done.sample.edge[t] if isinstance(t, tuple) else done.sample.node[t]
                table = there.edge_data[t][name] if isinstance(t, tuple) else there.node_data[t][name]
                assert torch.equal(rows, table[ids]), (number, t, name)
                rows.zero_()
    counts = fetch.counts()
    num_arrays = len(there.node_data[node_type])
    repeated = torch.cat(remote).numel() - torch.cat(remote).unique().numel()
    assert counts["rows_shared"] >= repeated * num_arrays > 0


def test_rows_are_narrowed_on_the_wire_when_asked(case: Any) -> None:
    graph, graphs = case
    there, node_type = graphs[0], graph.node_types[0]
    seeds = seeds_of(there, node_type, torch.arange(40))
    options = {"input_nodes": seeds, "pipeline": PipelineOptions(share=False), **OPTIONS}
    wide = NeighborLoader(there, [3], num_threads=0, fetch={node_type: ["x"]}, **options)
    narrow = NeighborLoader(there, [3], num_threads=0, fetch={node_type: ["x"]}, wire_dtype=torch.bfloat16, **options)
    for a, b in zip(wide, narrow, strict=True):
        a, b = a.nodes[node_type]["x"], b.nodes[node_type]["x"]
        assert a.dtype == b.dtype and torch.equal(a.bfloat16(), b.bfloat16())
    half, whole = (loader.counters()["fetch"].counts["bytes_remote"] for loader in (narrow, wide))
    assert 2 * half == whole > 0


@pytest.mark.usefixtures("one_epoch")
def test_all_ranks_step_together_and_cover_every_seed(case: Any) -> None:
    graph, graphs = case
    node_type = graph.node_types[0]
    num_nodes = graph.num_nodes(node_type)
    cuts, seen = [0, 31, num_nodes], []
    largest = max(cuts[1], num_nodes - cuts[1])
    for rank, there in enumerate(graphs):
        share = Seeds(torch.arange(cuts[rank], cuts[rank + 1]), node_type, largest)
        batches = list(NeighborLoader(there, [3, 2], input_nodes=share, batch_size=16, shuffle=True))
        assert len(batches) == -(-largest // 16)
        seen += [there.original_ids(b.nodes[node_type]["n_id"][: b.batch_size], node_type) for b in batches]
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(num_nodes))


@pytest.mark.usefixtures("one_epoch")
def test_a_mask_of_the_graph_selects_seeds_by_global_id(tmp_path: Path) -> None:
    graph = homogeneous()
    graph.set_node_data("train_mask", torch.arange(graph.num_nodes()) % 3 == 0)
    with machines(graph, tmp_path / "parts", 2) as graphs:
        for there in graphs:
            mask = there.node_data[NODE]["train_mask"][torch.arange(graph.num_nodes())]
            for nodes in ("train", there.from_global(mask)):
                batch = next(iter(NeighborLoader(there, [2], input_nodes=nodes, batch_size=500)))
                original = there.original_ids(batch.n_id[: batch.batch_size], NODE)
                assert torch.equal(original.sort().values, torch.arange(0, graph.num_nodes(), 3))


def test_all_of_a_mask_or_of_everything_is_refused_among_several_ranks(tmp_path: Path) -> None:
    graph = homogeneous()
    graph.set_node_data("train_mask", torch.arange(graph.num_nodes()) % 3 == 0)
    with machines(graph, tmp_path / "parts", 2) as (mine, _):
        mine.placement = Placement(0, (0, 1), (0, 1))
        for nodes in ("train", "train_mask"):
            with pytest.raises(ValueError, match=r'with 2 ranks.* write gnnsys.split\(graph, "train"\) for this rank'):
                NeighborLoader(mine, [2], input_nodes=nodes)
        for links in (None, EDGE):
            with pytest.raises(ValueError, match=r"2 ranks.* write gnnsys.split\(graph, None, type="):
                LinkNeighborLoader(mine, [2], edge_label_index=links)
        with pytest.raises(ValueError, match=r"2 ranks.* write gnnsys.split\(graph, None\)"):
            NeighborLoader(mine, [2])
        next(iter(NeighborLoader(mine, [2], input_nodes=split(mine, None))))
        next(iter(LinkNeighborLoader(mine, [2], edge_label_index=split(mine, None, type=EDGE))))
        next(
            iter(NeighborLoader(mine, [2], input_nodes=mine.from_global(range(20))))
        )  # every rank all of them, on purpose


@pytest.mark.usefixtures("one_epoch")
def test_seeds_have_their_own_time_on_any_machine(tmp_path: Path) -> None:
    graph: Graph = homogeneous()
    options = {"time_attr": "t", "num_threads": 0, **OPTIONS}
    expected = NeighborLoader(graph, [3, 3], input_nodes=torch.arange(50), **options)
    with machines(graph, tmp_path / "parts", 2) as graphs:
        seeds = seeds_of(graphs[1], NODE, torch.arange(50))
        for ours, theirs in zip(NeighborLoader(graphs[1], [3, 3], input_nodes=seeds, **options), expected, strict=True):
            assert_same_batch(ours, theirs, graphs[1])


def test_a_table_of_the_store_that_trains_is_left_to_the_forward_pass(tmp_path: Path) -> None:
    graph = homogeneous()
    with machines(graph, tmp_path / "parts", 2) as graphs:
        there = graphs[0]
        table = there.store.create("scores", there.num_nodes(), (3,), init=1.5)
        there.set_node_data("scores", table)
        assert "scores" not in next(iter(NeighborLoader(there, [2], batch_size=10)))
        loader = NeighborLoader(there, [2], batch_size=10, fetch=["scores", "x"], across_epochs=False)
        for batch in islice(loader, 3):
            assert torch.equal(batch.scores, torch.full((batch.num_nodes, 3), 1.5))
        assert loader.counters()["fetch"].counts["bytes_remote"] > 0
        loader.close()
        ids = torch.arange(there.num_nodes())
        table[ids] = ids[:, None].float().expand(-1, 3).contiguous()
        batch = next(iter(loader))
        assert torch.equal(batch.scores[:, 0], batch.n_id.float())
