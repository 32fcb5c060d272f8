"""Seeds of several node types in one NeighborLoader: each seed once, the same on parts, with the labels of its type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gnnsys
from gnnsys.graph import Graph
from gnnsys.loader import NeighborLoader
from gnnsys.partition import Placement
from gnnsys.sampling import LaborSampler, NeighborSampler, Sample, SampleKey, ShadowSampler
from tests.loader.test_dist_links import assert_same_batches
from tests.sampling.machines import machines, typed

PAPERS, AUTHORS = torch.arange(3, 90, 4), torch.arange(0, 40, 3)
GIVEN = {"paper": PAPERS, "author": AUTHORS}


@pytest.fixture(scope="module")
def graph() -> Graph:
    graph = typed()
    graph.set_node_data("y", torch.arange(90) % 7, "paper")
    graph.set_node_data("y", torch.arange(40) % 3, "author")
    graph.set_node_data("train_mask", torch.arange(90) % 2 == 0, "paper")
    return graph


def test_every_seed_is_in_one_batch_with_the_label_of_its_type(graph: Graph) -> None:
    loader = NeighborLoader(graph, [3, 2], input_nodes=GIVEN, batch_size=10, shuffle=True)
    seen: dict[str, list[torch.Tensor]] = {"paper": [], "author": []}
    for batch in loader:
        sizes = {t: batch[t].batch_size for t in GIVEN}
        assert 0 < sum(sizes.values()) <= 10
        for t, ids in GIVEN.items():
            seeds = batch[t].n_id[: sizes[t]]
            assert torch.equal(seeds, ids[batch[t].input_id])
            assert torch.equal(batch[t].y[: sizes[t]], graph.node_data[t]["y"][seeds])
            seen[t].append(seeds)
        assert all(batch[t].num_sampled_nodes[0] == sizes[t] for t in GIVEN)
    assert len(loader) == -(-(len(PAPERS) + len(AUTHORS)) // 10)
    assert all(torch.equal(torch.cat(seen[t]).sort().values, ids) for t, ids in GIVEN.items())


def test_a_batch_is_the_sample_of_its_seeds(graph: Graph) -> None:
    batches = list(NeighborLoader(graph, [3, 2], input_nodes=GIVEN, batch_size=16, seed=4))
    for number, batch in enumerate(batches):
        seeds = {t: ids[batch[t].input_id] for t, ids in GIVEN.items()}
        sample = NeighborSampler(graph, [3, 2]).sample(seeds, key=SampleKey(4, 0, number))
        for t in graph.edge_types:
            assert torch.equal(batch[t].e_id, sample.edge[t])
    one = list(NeighborLoader(graph, [3, 2], input_nodes={"paper": PAPERS}, batch_size=16, seed=4))
    other = list(NeighborLoader(graph, [3, 2], input_nodes=("paper", PAPERS), batch_size=16, seed=4))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a["paper"].n_id, b["paper"].n_id) and a["paper"].batch_size == b.batch_size


def test_batches_on_parts_are_those_of_one_process(graph: Graph, tmp_path: Path) -> None:
    times = {t: 5 + torch.arange(len(ids)) % 15 for t, ids in GIVEN.items()}
    with machines(graph, tmp_path / "p", 3, machine_of_part=[0, 1, 1]) as (mine, _):
        names = mine.from_original(GIVEN)
        for options in ({}, {"disjoint": True}, {"time_attr": "t"}, {"time_attr": "t", "input_time": times}):
            options = {"batch_size": 9, "shuffle": True, "num_threads": 0, **options}
            theirs = NeighborLoader(graph, [3, 2], input_nodes=GIVEN, **options)
            assert_same_batches(NeighborLoader(mine, [3, 2], input_nodes=names, **options), theirs, mine)


def test_shares_of_several_types_have_as_many_batches_on_every_rank(graph: Graph) -> None:
    given = {"paper": "train", "author": None}
    loaders = []
    for rank in range(3):
        shares = gnnsys.split(graph, given, placement=Placement(rank, (0, 0, 0), ()))
        assert {t: share.type for t, share in shares.items()} == {"paper": "paper", "author": "author"}
        loaders.append(NeighborLoader(graph, [2], input_nodes=shares, batch_size=8, shuffle=True))
    assert len({len(loader) for loader in loaders}) == 1
    batches = [batch for loader in loaders for batch in loader]
    for t, expected in (("paper", torch.arange(0, 90, 2)), ("author", torch.arange(40))):
        seen = torch.cat([batch[t].n_id[: batch[t].batch_size] for batch in batches])
        assert torch.equal(seen.sort().values, expected)


def test_a_state_is_gone_on_with_and_that_of_other_seeds_is_refused(graph: Graph) -> None:
    def make(given: dict) -> NeighborLoader:
        return NeighborLoader(graph, [2], input_nodes=given, batch_size=8, shuffle=True)

    whole, first, second = list(make(GIVEN)), make(GIVEN), make(GIVEN)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(a["paper"].n_id, b["paper"].n_id) for a, b in zip(rest, whole[1:], strict=True))
    with pytest.raises(ValueError):
        make({"paper": PAPERS + 1, "author": AUTHORS}).load_state_dict(first.state_dict())


def test_samplers_and_functions_are_given_seeds_of_several_types(graph: Graph) -> None:
    def sampled(graph: Graph, seeds: dict[str, torch.Tensor], key: SampleKey) -> Sample:
        return NeighborSampler(graph, [3, 2]).sample(seeds, key=key)

    options: dict = {"input_nodes": GIVEN, "batch_size": 16, "seed": 4, "shuffle": True}
    wanted = list(NeighborLoader(graph, [3, 2], **options))
    for sampler in (sampled, NeighborSampler(graph, [3, 2])):
        for a, b in zip(NeighborLoader(graph, sampler=sampler, **options), wanted, strict=True):
            for t in GIVEN:
                assert torch.equal(a[t].n_id, b[t].n_id) and a[t].batch_size == b[t].batch_size
                assert torch.equal(a[t].input_id, b[t].input_id) and torch.equal(a[t].y, b[t].y)
    whole = {t: -1 for t in graph.edge_types}
    labor = LaborSampler(graph, {t: [n, n] for t, n in whole.items()})
    every = NeighborLoader(graph, {t: [n, n] for t, n in whole.items()}, **options)
    for a, b in zip(NeighborLoader(graph, sampler=labor, **options), every, strict=True):
        assert all(torch.equal(a[t].n_id.sort().values, b[t].n_id.sort().values) for t in GIVEN)
    with pytest.raises(ValueError, match="leave another sampler, guide and pad away"):
        NeighborLoader(graph, sampler=ShadowSampler(graph, [2]), **options)


def test_bad_use_is_refused_in_one_line(graph: Graph) -> None:
    shares = gnnsys.split(graph, {"paper": "train", "author": None})
    for given, options, message in (
        ({}, {}, "no node types"),
        ({"papr": PAPERS}, {}, "did you mean 'paper'"),
        ({"paper": torch.tensor([90])}, {}, "input_nodes"),
        ({"paper": shares["author"]}, {}, "are a share of 'author'"),
        ({"paper": shares["paper"], "author": AUTHORS}, {}, "gnnsys.split all of them"),
        (GIVEN, {"pad": True}, "leave another sampler, guide and pad away"),
        (GIVEN, {"time_attr": "t", "input_time": torch.zeros(3, dtype=torch.int64)}, "must be a dict by node type"),
        (("paper", PAPERS), {"time_attr": "t", "input_time": {"paper": PAPERS}}, "input_nodes is not"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            NeighborLoader(graph, [2], input_nodes=given, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="leave type away"):
        gnnsys.split(graph, {"paper": "train"}, type="paper")
