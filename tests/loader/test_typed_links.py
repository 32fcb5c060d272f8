"""Links of several edge types in one loader: each link once, the same on parts, nothing leaks between the types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gnnsys
from gnnsys.graph import EdgeType, Graph
from gnnsys.loader import LinkNeighborLoader, NegativeSampling
from gnnsys.partition import Placement
from gnnsys.sampling import DistGraph
from tests.loader.test_dist_links import assert_same_batches
from tests.loader.test_negative_kinds import turns_counted
from tests.sampling.machines import CITES, REV_WRITES, WRITES, machines, typed

TYPES = (WRITES, CITES)


@pytest.fixture(scope="module")
def parted(tmp_path_factory) -> Iterator[tuple[Graph, DistGraph]]:
    graph = typed()
    with machines(graph, tmp_path_factory.mktemp("links") / "p", 3, machine_of_part=[0, 1, 1]) as graphs:
        yield graph, graphs[0]


def links_of(graph: Graph) -> dict[EdgeType, Tensor]:
    return {WRITES: graph.edge_index(WRITES)[:, ::5], CITES: graph.edge_index(CITES)[:, ::7]}


def names(graph: DistGraph, links: dict[EdgeType, Tensor]) -> Any:
    return graph.from_original(links)


@pytest.mark.parametrize("in_turn", [False, True])
def test_every_link_is_in_one_batch_with_its_label_and_negatives(parted, in_turn: bool) -> None:
    graph, _ = parted
    links = links_of(graph)
    labels = {t: torch.arange(index.shape[1]) % 4 + 1 for t, index in links.items()}
    loader = LinkNeighborLoader(
        graph, [3, 2], edge_label_index=links, edge_label=labels, neg_sampling=NegativeSampling("binary", 2),
        batch_size=13, shuffle=True, one_type_per_batch=in_turn,
    )  # fmt: skip
    seen: dict[EdgeType, list[Tensor]] = {t: [] for t in TYPES}
    kinds = []
    for batch in loader:
        sizes = [batch[t].input_id.numel() for t in TYPES]
        kinds.append([size > 0 for size in sizes])
        assert 0 < sum(sizes) <= 13
        for t in TYPES:
            chosen, index = batch[t].input_id, batch[t].edge_label_index
            src, dst = batch[t[0]].n_id[index[0]], batch[t[2]].n_id[index[1]]
            assert index.shape[1] == 3 * chosen.numel()
            assert torch.equal(torch.stack([src, dst])[:, : chosen.numel()], links[t][:, chosen])
            assert torch.equal(batch[t].edge_label[: chosen.numel()], labels[t][chosen])
            seen[t].append(chosen)
    assert all(torch.equal(torch.cat(seen[t]).sort().values, torch.arange(links[t].shape[1])) for t in TYPES)
    if in_turn:
        assert all(sum(of) == 1 for of in kinds) and kinds[:4] == [[True, False], [False, True]] * 2
    else:
        assert [True, True] in kinds


def test_batches_on_parts_are_those_of_one_process_with_two_waits_at_most(parted, monkeypatch) -> None:
    graph, mine = parted
    links = links_of(graph)
    by_type = {WRITES: NegativeSampling("triplet", 3, kind="joint"), CITES: "binary"}
    for negatives in (None, "binary", NegativeSampling("triplet", 2, kind="degree"), by_type):
        for in_turn in (False, True):
            options = {"neg_sampling": negatives, "batch_size": 40, "shuffle": True, "one_type_per_batch": in_turn}
            options |= {"num_threads": 0, "fetch": []}
            theirs = LinkNeighborLoader(graph, [3, 2], edge_label_index=links, **options)
            ours = LinkNeighborLoader(mine, [3, 2], edge_label_index=names(mine, links), **options)
            with turns_counted(mine, monkeypatch) as turns:
                batches = list(ours)
            assert 0 < len(turns) <= 2 * len(batches)
            assert_same_batches(batches, theirs, mine)


def test_no_links_of_a_batch_nor_their_reverses_are_messages(parted) -> None:
    graph, _ = parted
    links = {WRITES: graph.edge_index(WRITES), REV_WRITES: graph.edge_index(REV_WRITES), CITES: graph.edge_index(CITES)}
    kept = 0
    for batch in LinkNeighborLoader(graph, [-1], edge_label_index=links, batch_size=60, shuffle=True):

        def pairs(t: EdgeType, name: str) -> set[tuple[int, int]]:
            src, dst = batch[t][name]  # noqa: B023
            return set(zip(batch[t[0]].n_id[src].tolist(), batch[t[2]].n_id[dst].tolist(), strict=True))  # noqa: B023

        held = {t: pairs(t, "edge_label_index") for t in links}
        held[WRITES] |= {(b, a) for a, b in held[REV_WRITES]}
        held[REV_WRITES] |= {(b, a) for a, b in held[WRITES]}
        held[CITES] |= {(b, a) for a, b in held[CITES]}
        messages = {t: pairs(t, "edge_index") for t in links}
        assert all(not messages[t] & held[t] for t in links)
        kept += sum(map(len, messages.values()))
    assert kept > 1000


def test_shares_of_several_types_have_as_many_batches_on_every_rank(parted) -> None:
    graph, _ = parted
    for in_turn in (False, True):
        loaders = []
        for rank in range(3):
            shares = gnnsys.split(graph, {WRITES: None, CITES: None}, placement=Placement(rank, (0, 0, 0), ()))
            options = {"batch_size": 32, "shuffle": True, "one_type_per_batch": in_turn}
            loaders.append(LinkNeighborLoader(graph, [2], edge_label_index=shares, **options))
        assert len({len(loader) for loader in loaders}) == 1
        assert sum(batch[CITES].input_id.numel() for loader in loaders for batch in loader) == 500


def test_a_state_is_gone_on_with(parted) -> None:
    graph, _ = parted

    def make() -> LinkNeighborLoader:
        options = {"neg_sampling": "binary", "batch_size": 30, "shuffle": True, "one_type_per_batch": True}
        return LinkNeighborLoader(graph, [2], edge_label_index=links_of(graph), **options)

    whole, first, second = list(make()), make(), make()
    iterator = iter(first)
    next(iterator)
    next(iterator)
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert len(rest) == len(whole) - 2
    for a, b in zip(rest, whole[2:], strict=True):
        assert all(torch.equal(a[t].edge_label_index, b[t].edge_label_index) for t in TYPES)


def test_bad_use_is_refused_in_one_line(parted) -> None:
    graph, _ = parted
    links = links_of(graph)
    other = ("author", "wrote", "paper")
    for given, options, message in (
        ({}, {}, "no edge types"),
        ({other: None}, {}, "edge_label_index: edge type .* does not exist"),
        (links, {"edge_label": {other: torch.ones(3)}}, "edge_label: edge type .* does not exist"),
        (links, {"edge_label": {REV_WRITES: torch.ones(3)}}, "edge_label: there are no links of type"),
        (links, {"edge_label": torch.ones(3)}, "edge_label must be a dict by edge type"),
        (links, {"edge_label": {WRITES: torch.ones(3)}}, "must have one entry per link, 60, got 3"),
        (links, {"neg_sampling": {REV_WRITES: "binary"}}, "neg_sampling: there are no links of type"),
        (links, {"disjoint": True}, "go with neither guide, disjoint"),
        (CITES, {"one_type_per_batch": True}, "edge_label_index must be a dict by type"),
        (CITES, {"edge_label": {CITES: torch.ones(3)}}, "edge_label_index is not"),
        ({WRITES: gnnsys.split(graph, None, type=CITES)}, {}, "are a share of"),
        ({WRITES: gnnsys.split(graph, None, type=WRITES), CITES: None}, {}, "gnnsys.split all of them"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            LinkNeighborLoader(graph, [2], edge_label_index=given, **options)
        assert "\n" not in str(caught.value)
