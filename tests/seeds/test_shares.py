"""Seeds split among ranks: the same number of batches everywhere, as even as can be, nothing dropped or repeated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.graph import NODE, Graph
from gnnsys.loader import NeighborLoader
from gnnsys.loader.schedule import Schedule, Ticket
from tests.support.grid import grid


@dataclass
class Seeds:
    """What `gnnsys.split` returns, as far as loaders know."""

    ids: Any
    type: str
    largest: int


class LazyRange:
    """Ids that nobody has written down."""

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, index: Tensor) -> Tensor:
        assert index.numel() == 0 or 0 <= int(index.min()) <= int(index.max()) < len(self)
        return index + self._begin


def cut(num_seeds: int, num_ranks: int) -> list[tuple[int, int]]:
    ends = [rank * num_seeds // num_ranks for rank in range(num_ranks + 1)]
    return list(pairwise(ends))


@pytest.fixture(scope="module")
def graph() -> Graph:
    edge_index = torch.randint(300, (2, 2000), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(300) % 3 == 0
    return Graph.from_edge_index(edge_index, 300, {"y": torch.arange(300), "train_mask": mask})


@grid(shuffle=[False, True], num_ranks=[1, 2, 3, 8], num_seeds=[1, 5, 8, 64, 97], batch_size=[1, 4, 32])
def test_all_ranks_have_as_many_batches_and_together_every_seed_once(
    num_seeds: int, num_ranks: int, batch_size: int, shuffle: bool
) -> None:
    shares = cut(num_seeds, num_ranks)
    largest = max(end - begin for begin, end in shares)
    seen = []
    for begin, end in shares:
        schedule = Schedule(end - begin, batch_size, shuffle, drop_last=False, seed=1, largest=largest)
        assert len(schedule) == -(-largest // batch_size)
        batches = [schedule.inputs(Ticket(2, b)) for b in range(len(schedule))]
        sizes = [batch.numel() for batch in batches]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= batch_size
        seen.append(torch.cat(batches) + begin)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(num_seeds))


@pytest.mark.parametrize("num_seeds", [3, 24, 25, 97])
def test_dropping_the_last_batch_drops_it_on_every_rank(num_seeds: int) -> None:
    shares = cut(num_seeds, 3)
    largest = max(end - begin for begin, end in shares)
    for begin, end in shares:
        schedule = Schedule(end - begin, 8, True, drop_last=True, seed=1, largest=largest)
        assert len(schedule) == largest // 8
        batches = [schedule.inputs(Ticket(0, b)) for b in range(len(schedule))]
        assert all(7 <= batch.numel() <= 8 for batch in batches)
        chosen = torch.cat(batches) if batches else torch.empty(0)
        assert chosen.unique().numel() == chosen.numel() == min(end - begin, 8 * len(schedule))


@pytest.mark.parametrize("lazy", [False, True])
def test_loaders_of_all_ranks_yield_every_seed_once_per_epoch(graph: Graph, lazy: bool) -> None:
    shares = cut(97, 4)
    largest = max(end - begin for begin, end in shares)
    for epoch in range(2):
        seen, steps = [], set()
        for begin, end in shares:
            ids = LazyRange(begin, end) if lazy else torch.arange(begin, end)
            loader = NeighborLoader(graph, [3], input_nodes=Seeds(ids, NODE, largest), batch_size=10, shuffle=True)
            batches = [list(loader) for _ in range(epoch + 1)][-1]
            steps.add(len(batches))
            for batch in batches:
                assert torch.equal(batch.y, batch.n_id)
                seen.append(batch.n_id[: batch.batch_size])
        assert steps == {3}
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(97))


@pytest.mark.parametrize("more", [{}, {"disjoint": True}, {"expand": "frontier"}, {"subgraph_type": "induced"}])
def test_a_rank_without_seeds_has_empty_batches_and_as_many(graph: Graph, more: dict) -> None:
    seeds = Seeds(torch.empty(0, dtype=torch.int64), NODE, 25)
    batches = list(NeighborLoader(graph, [3, 2], input_nodes=seeds, batch_size=10, shuffle=True, **more))
    assert [batch.batch_size for batch in batches] == [0, 0, 0]
    assert all(batch.num_nodes == 0 and batch.num_edges == 0 and batch.y.shape == (0,) for batch in batches)


def test_a_share_resumes_in_mid_epoch(graph: Graph) -> None:
    def make(num_seeds: int = 33, largest: int = 34) -> NeighborLoader:
        seeds = Seeds(LazyRange(50, 50 + num_seeds), NODE, largest)
        return NeighborLoader(graph, [3], input_nodes=seeds, batch_size=4, shuffle=True)

    whole = [batch.n_id for batch in make()]
    first = make()
    head = [batch.n_id for batch in islice(first, 5)]
    second = make()
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(head + [batch.n_id for batch in second], whole, strict=True))
    with pytest.raises(ValueError, match="largest=34, here it is 35"):
        make(33, 35).load_state_dict(first.state_dict())


def test_masks_may_be_named(graph: Graph) -> None:
    expected = torch.arange(0, 300, 3)
    for nodes in ("train_mask", "train", (NODE, "train"), graph.node_data[NODE]["train_mask"]):
        batch = next(iter(NeighborLoader(graph, [3], input_nodes=nodes, batch_size=500)))
        assert torch.equal(batch.n_id[: batch.batch_size], expected)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (Seeds(torch.tensor([300]), NODE, 1), "input_nodes"),
        (Seeds(torch.tensor([1]), "paper", 1), "seeds of 'paper'"),
        (Seeds(torch.tensor([1, 2]), NODE, 1), "largest share has 1"),
        (Seeds(torch.tensor([], dtype=torch.int64), NODE, 0), "empty on every rank"),
        ("val", r"no mask 'val', only \['train_mask'\]"),
        ("y", "'y' of 'node' must be a mask, bools or integers of 0 and 1, got torch.int64 with 299"),
    ],
)
def test_seeds_that_do_not_fit_are_refused(graph: Graph, nodes: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborLoader(graph, [3], input_nodes=nodes)  # type: ignore[arg-type]
