"""PyG-style loaders of ranks that become fewer or more within an epoch: every seed once, equal steps, deterministic."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric")

from gnnsys.comm import current_context
from gnnsys.graph import EDGE, NODE
from gnnsys.graph.convert import to_pyg
from gnnsys.partition import Placement
from gnnsys.pyg import LinkNeighborLoader, NeighborLoader
from gnnsys.seeds import split
from tests.sampling.machines import homogeneous, machines

GRAPH = homogeneous()
DATA = to_pyg(GRAPH)
Make = Callable[[int, int], Any]


def share(rank: int, world_size: int, what: Any = None, type: Any = NODE) -> Any:
    return split(GRAPH, what, type=type, placement=Placement(rank, (0,) * world_size, ()))


def through_a_file(states: Sequence[Any]) -> Any:
    """As a checkpoint keeps them."""
    file = io.BytesIO()
    torch.save(list(states), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(
    make: Make, worlds: Sequence[int], steps: Sequence[int], check: Callable[[Any, Any], None] | None = None
) -> tuple[list[Any], list[Any]]:
    """Stage by stage `worlds[i]` ranks take `steps[i]` batches each, the last ones all that the epoch has."""
    states, seen = None, []
    for number, world_size in enumerate(worlds):
        loaders = []
        seen.append([])
        for rank in range(world_size):
            torch.manual_seed(1000 * number + rank)  # ranks of a job are seeded apart
            loaders.append(make(rank, world_size))
            if states is not None:
                loaders[-1].load_state_dicts(states)
            last = number == len(worlds) - 1
            batches = list(loaders[-1]) if last else list(islice(loaders[-1], steps[number]))
            seen[-1].append([loaders[-1].input_ids(batch.input_id) for batch in batches])
            for batch, ids in zip(batches, seen[-1][-1], strict=True):
                assert "edge_label_index" in batch or torch.equal(batch.n_id[: batch.batch_size], ids)
                if check is not None:
                    check(batch, ids)
        states = through_a_file([loader.state_dict() for loader in loaders])
    return seen, loaders


def flat(seen: Any) -> list[int]:
    return [i for stage in seen for rank in stage for batch in rank for i in batch.tolist()]


@pytest.mark.parametrize("case", [*range(8), *(pytest.param(case, marks=pytest.mark.long) for case in range(8, 16))])
def test_however_the_ranks_change_an_epoch_has_every_seed_once(case: int) -> None:
    draw = random.Random(case)
    links, shuffle, seed, own = (draw.random() < 0.4, draw.random() < 0.7, draw.choice([None, 5]), draw.random() < 0.5)
    worlds = [draw.randint(1, 4) for _ in range(draw.randint(2, 4))]
    what = None if draw.random() < 0.5 else draw.sample(range(120), 90)

    def make(rank: int, world_size: int) -> Any:
        generator = torch.Generator().manual_seed(rank) if own else None
        options: Any = {"batch_size": 8, "shuffle": shuffle, "seed": seed, "generator": generator}
        if not links:
            return NeighborLoader(DATA, [3], input_nodes=share(rank, world_size, what), **options)
        edges = share(rank, world_size, range(0, 900, 7), EDGE)
        return LinkNeighborLoader(DATA, [2], edge_label_index=edges, neg_sampling="binary", **options)

    total = share(0, 1, range(0, 900, 7), EDGE).total if links else share(0, 1, what).total
    steps = [draw.randint(0, max(1, total // 8 // world_size // len(worlds))) for world_size in worlds]
    seen, loaders = go_on(make, worlds, steps)
    chosen = list(range(0, 900, 7)) if links else sorted(range(120) if what is None else what)
    assert sorted(flat(seen)) == chosen
    for stage in seen:
        assert len({len(rank) for rank in stage}) == 1
        assert all(batch.numel() <= 8 for rank in stage for batch in rank)
    sizes = [sum(batch.numel() for batch in rank) for rank in seen[-1]]
    assert max(sizes) - min(sizes) <= 1
    again, _ = go_on(make, worlds, steps)
    assert flat(again) == flat(seen)
    counts = set()
    for loader in loaders:  # the next epoch is an ordinary one of these ranks
        assert loader.epoch == 1
        ids = [loader.input_ids(batch.input_id) for batch in loader]
        counts.add(len(ids))
        assert torch.equal(torch.cat(ids).sort().values, loader.ranks.inputs.own[:])
        assert loader.state_dict()["leftover"] is None and loader.epoch == 2
    assert counts == {len(loaders[0])}


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_as_many_ranks_as_before_go_on_bit_for_bit_also_in_what_was_left(own_generator: bool, workers: int) -> None:
    def make(rank: int, world_size: int) -> NeighborLoader:
        generator = torch.Generator().manual_seed(rank) if own_generator else None
        nodes, persistent = share(rank, world_size), workers > 0
        options: Any = {"batch_size": 5, "shuffle": True, "num_workers": workers, "persistent_workers": persistent}
        return NeighborLoader(DATA, [4, 3], input_nodes=nodes, generator=generator, **options)

    states: Any = None
    for world_size in (3, 2):  # an ordinary epoch, then one of leftovers
        tails, loaders = [], [make(rank, world_size) for rank in range(world_size)]
        now: list[Any] = []
        for loader in loaders:
            if states is not None:
                loader.load_state_dicts(states)
            iterator = iter(loader)
            next(iterator), next(iterator)
            now.append(through_a_file([loader.state_dict()])[0])
            tails.append(list(iterator))
        states = now
        for rank in range(world_size):
            resumed, alone = make(rank, world_size), make(rank, world_size)
            resumed.load_state_dicts(states)
            alone.load_state_dict(states[rank])
            torch.manual_seed(12345)
            for a, b, c in zip(list(resumed), list(alone), tails[rank], strict=True):
                assert torch.equal(a.n_id, b.n_id) and torch.equal(b.n_id, c.n_id)
                assert torch.equal(a.edge_index, b.edge_index) and torch.equal(b.edge_index, c.edge_index)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 3)])
def test_batches_are_numbered_on_behind_an_epoch_that_was_dealt_anew(before: int, after: int) -> None:
    """It has more batches than others where ranks became fewer, and fewer where they became more."""

    def make(rank: int, world_size: int) -> NeighborLoader:
        return NeighborLoader(DATA, [3], input_nodes=share(rank, world_size), batch_size=5, shuffle=True)

    old = [make(rank, before) for rank in range(before)]
    for loader in old:
        list(islice(loader, 2))
    states = through_a_file([loader.state_dict() for loader in old])
    for rank in range(after):
        loader = make(rank, after)
        loader.load_state_dicts(states)
        numbers = [[current_context().batch for _ in loader] for _ in range(3)]
        assert len(numbers[0]) != len(loader) - 2 and len(numbers[1]) == len(numbers[2]) == len(loader)
        assert numbers[0][0] == 2  # behind what the old ranks had seen
        assert list(chain(*numbers)) == list(range(2, 2 + sum(map(len, numbers))))


def test_parts_are_taken_over_too_rows_and_links_and_all(tmp_path) -> None:
    with machines(homogeneous(), tmp_path / "parts", 2) as graphs:
        for links in (False, True):

            def make(rank: int, world_size: int, links: bool = links) -> Any:
                where = {3: (0, 0, 1), 2: (0, 1)}[world_size]
                mine, placement = graphs[where[rank]], Placement(rank, where, (0, 1))
                if links:
                    edges = split(mine, None, type=EDGE, placement=placement)
                    return LinkNeighborLoader(mine, [2], edge_label_index=edges, batch_size=60, shuffle=True)
                return NeighborLoader(mine, [3], split(mine, None, placement=placement), batch_size=8, shuffle=True)

            def check(batch: Any, ids: torch.Tensor, links: bool = links) -> None:
                assert torch.equal(batch.x, graphs[0].node_data[NODE]["x"][batch.n_id])
                if links:
                    ends = torch.stack(graphs[0].edge_ends(ids, EDGE))
                    assert torch.equal(batch.n_id[batch.edge_label_index], ends)

            seen, _ = go_on(make, [3, 2], [2, 2], check)
            assert sorted(flat(seen)) == list(range(900 if links else 120))
            assert all(len(rank) > 2 for rank in seen[-1])


@pytest.mark.parametrize("drop_last", [False, True])
def test_behind_the_last_batch_of_an_epoch_nothing_is_left(drop_last: bool) -> None:
    def make(rank: int, world_size: int) -> NeighborLoader:
        nodes = share(rank, world_size)
        return NeighborLoader(DATA, [2], input_nodes=nodes, batch_size=9, shuffle=True, drop_last=drop_last)

    olds = [make(rank, 2) for rank in range(2)]
    for loader in olds:
        iterator = iter(loader)
        for _ in range(len(loader)):
            next(iterator)
    states = [loader.state_dict() for loader in olds]
    assert {(state["epoch"], state["batch"]) for state in states} == {(0, 6 if drop_last else 7)}
    for rank in range(3):
        loader = make(rank, 3)
        loader.load_state_dicts(states)
        assert loader.epoch == 0 and list(loader) == [] and loader.epoch == 1
        assert len(list(loader)) == len(loader) == (4 if drop_last else 5)


def test_what_cannot_be_dealt_is_refused_with_the_reason() -> None:
    def make(rank: int, world_size: int, **more: Any) -> NeighborLoader:
        return NeighborLoader(DATA, [2], input_nodes=share(rank, world_size), batch_size=10, **more)

    olds = [make(rank, 2, shuffle=True) for rank in range(2)]
    for loader in olds:
        next(iter(loader))
    states = [loader.state_dict() for loader in olds]
    plain = NeighborLoader(DATA, [2], input_nodes=torch.arange(30), batch_size=10)
    timed = make(0, 1, shuffle=True, time_attr="t", input_time=torch.arange(120))
    for loader, message in (
        (plain, "its inputs are not a share: give it what gnnsys.split returns"),
        (make(0, 1), "with shuffle=True, here it is False"),
        (make(0, 1, shuffle=True, seed=1), "with seed=None, here it is 1"),
        (make(0, 1, shuffle=True, generator=torch.Generator()), "with own_generator=False, here it is True"),
        (timed, "input_time was given for this rank's seeds alone"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.load_state_dicts(states)
        assert len(list(loader)) == len(loader)
    with pytest.raises(ValueError, match=r"share=.*give load_state_dicts those of all ranks"):
        make(0, 1, shuffle=True).load_state_dict(states[0])
    with pytest.raises(ValueError, match="with batch_size=10, here it is 5"):
        NeighborLoader(DATA, [2], input_nodes=share(0, 2), batch_size=5, shuffle=True).load_state_dict(states[0])
    for loader in olds:
        list(loader)
    after = [loader.state_dict() for loader in olds]
    plain.load_state_dicts(after)
    assert plain.epoch == 2 and len(list(plain)) == 3
