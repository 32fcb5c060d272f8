"""Ranks that become fewer or more in the middle of an epoch: every seed once, equal steps, then as ever."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Any

import pytest
import torch

from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.loader.schedule import Schedule
from gnnsys.partition import Placement
from gnnsys.seeds import IdRange, split
from gnnsys.seeds.elastic import is_over
from gnnsys.seeds.leftover import InputIds, Leftover, cut, deal
from tests.sampling.machines import homogeneous, machines

Make = Callable[[int, int], Any]  # a rank and how many there are -> its loader


@pytest.fixture(scope="module")
def graph() -> Graph:
    return homogeneous()


def share(graph: Graph, what: Any, rank: int, world_size: int, type: Any = NODE) -> Any:
    return split(graph, what, type=type, placement=Placement(rank, (0,) * world_size, ()))


def through_a_file(states: Sequence[Any]) -> Any:
    """As a checkpoint would keep them: nothing in a state but numbers, names and lists."""
    return json.loads(json.dumps(states))


def go_on(make: Make, worlds: Sequence[int], steps: Sequence[int], states: Any = None) -> tuple[list[Any], list[Any]]:
    """Stage by stage `worlds[i]` ranks take `steps[i]` batches each, the last ones all that the epoch has.

    Returns the ids by stage, rank and batch, and the loaders of the last stage, which may come early.
    """
    seen: list[Any] = []
    for number, world_size in enumerate(worlds):
        loaders = [make(rank, world_size) for rank in range(world_size)]
        for loader in loaders if states is not None else []:
            loader.load_state_dicts(states)
        last = number == len(worlds) - 1
        seen.append([])
        for loader in loaders:
            batches = list(loader) if last else list(islice(loader, steps[number]))
            seen[-1].append([loader.input_ids(batch.input_id) for batch in batches])
        states = through_a_file([loader.state_dict() for loader in loaders])
        if all(map(is_over, states)):
            for loader in loaders:
                loader.load_state_dicts(states)
                assert loader.epoch == 0 and list(loader) == []
        if loaders[0].epoch > 0:
            break
    return seen, loaders


def all_ids(seen: Any) -> list[int]:
    return [i for stage in seen for rank in stage for batch in rank for i in batch.tolist()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shared_out", [True, False])
def test_behind_its_last_batch_an_epoch_is_entered_once_more_whatever_the_ranks(graph: Graph, shared_out: bool) -> None:
    def make(rank: int, world_size: int) -> NeighborLoader:
        nodes = share(graph, None, rank, world_size) if shared_out else torch.arange(rank * 30, rank * 30 + 50)
        loader = NeighborLoader(graph, [2], input_nodes=nodes, batch_size=10, num_threads=0)
        loader._ranks.rank, loader._ranks.world_size = rank, world_size
        return loader

    states = []
    for loader in [make(rank, 2) for rank in range(2)]:
        for number, _ in enumerate(loader, start=1):
            if number == len(loader):
                assert (loader.epoch, loader.state_dict()["batch"]) == (0, number), "its end was not seen"
                states.append(loader.state_dict())
        assert (loader.epoch, loader.state_dict()["batch"]) == (1, 0)
    for world_size in (1, 2, 3):
        loader = make(0, world_size)
        loader.load_state_dicts(through_a_file(states))
        again = make(0, world_size)
        again.load_state_dict(through_a_file(loader.state_dict()))
        for resumed in (loader, again):
            assert resumed.epoch == 0 and list(resumed) == [] and resumed.epoch == 1
            assert len(list(resumed)) == len(resumed)


# links and nodes, shuffled or not, with the last batch and without: the others are like these, 1 and 7 of many batches
SHORT = (0, 2, 3, 4, 5, 6, 8, 9)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in SHORT else [pytest.mark.long]) for case in range(30)]
)
def test_however_the_ranks_change_an_epoch_has_every_seed_once_and_the_next_is_ordinary(
    graph: Graph, case: int
) -> None:
    draw = random.Random(case)
    links, shuffle, drop_last = draw.random() < 0.4, draw.random() < 0.6, draw.random() < 0.25
    what: Any = draw.choice([None, draw.sample(range(120), draw.choice([3, 40, 97])), torch.arange(120) % 3 == 0])
    if links:
        what = draw.choice([None, draw.sample(range(900), draw.choice([3, 150]))])
    worlds = [draw.randint(1, 5) for _ in range(draw.randint(2, 5))]
    batch_sizes = {world_size: draw.choice([5, 7, 16] if links else [1, 7, 16]) for world_size in worlds}
    first = share(graph, what, 0, worlds[0], EDGE if links else NODE)

    def make(rank: int, world_size: int) -> Any:
        options: Any = {"batch_size": batch_sizes[world_size], "shuffle": shuffle, "drop_last": drop_last}
        options |= {"seed": case, "num_threads": 0}
        if not links:
            return NeighborLoader(graph, [3, 2], input_nodes=share(graph, what, rank, world_size), **options)
        edges = share(graph, what, rank, world_size, EDGE)
        return LinkNeighborLoader(graph, [2], edge_label_index=edges, neg_sampling="binary", **options)

    most = max(1, len(make(0, worlds[0])) // len(worlds))
    steps = [draw.randint(0, most) for _ in worlds]
    seen, loaders = go_on(make, worlds, steps)
    worlds = worlds[: len(seen)]
    for stage, world_size in zip(seen, worlds, strict=True):
        assert len({len(rank) for rank in stage}) == 1, "equal steps"
        sizes = [sum(batch.numel() for batch in rank) for rank in stage]
        at_most = [batch.numel() for rank in stage for batch in rank]
        assert max(sizes) - min(sizes) <= max(1, len(stage[0])) and max([0, *at_most]) <= batch_sizes[world_size]
    sizes = [sum(batch.numel() for batch in rank) for rank in seen[-1]]
    ids, chosen = all_ids(seen), sorted(first.recipe.chosen().ids(0, first.total)[:].tolist())
    if drop_last:
        assert len(set(ids)) == len(ids) and set(ids) <= set(chosen)
        assert len(chosen) - len(ids) < worlds[-1] * (batch_sizes[worlds[-1]] + 1)
    else:
        assert sorted(ids) == chosen and max(sizes) - min(sizes) <= 1
    again, _ = go_on(make, worlds, steps)
    assert same(seen, again), "the same states, the same batches"
    for rank, loader in enumerate(loaders):
        ordinary = make(rank, worlds[-1])
        assert loader.epoch == 1 or len(ordinary) == 0
        ordinary.load_state_dict({**ordinary.state_dict(), "epoch": 1})
        for mine, theirs in zip(loader, ordinary, strict=True):
            assert torch.equal(mine.n_id, theirs.n_id) and torch.equal(mine.edge_index, theirs.edge_index)
            assert torch.equal(mine.input_id, theirs.input_id)


def test_as_many_ranks_as_before_go_on_bit_for_bit_also_in_what_was_left(graph: Graph) -> None:
    def make(rank: int, world_size: int) -> NeighborLoader:
        nodes = share(graph, None, rank, world_size)
        return NeighborLoader(graph, [4, 3], input_nodes=nodes, batch_size=5, shuffle=True)

    states: Any = None
    for world_size in (3, 2):  # an ordinary epoch, then one of leftovers
        unbroken = [make(rank, world_size) for rank in range(world_size)]
        for loader in unbroken if states is not None else []:
            loader.load_state_dicts(states)
        heads = [list(islice(loader, 2)) for loader in unbroken]
        assert all(len(head) == 2 for head in heads)
        states = through_a_file([loader.state_dict() for loader in unbroken])
        for rank, loader in enumerate(unbroken):
            resumed, alone = make(rank, world_size), make(rank, world_size)
            resumed.load_state_dicts(states)
            alone.load_state_dict(states[rank])
            assert resumed.state_dict() == alone.state_dict() == loader.state_dict() == states[rank]
            loader.load_state_dict(states[rank])  # or the next `for` would be the next epoch
            batches = list(zip(resumed, alone, loader, strict=True))
            assert len(batches) == (6 if world_size == 3 else 7)
            for a, b, c in batches:
                assert torch.equal(a.n_id, b.n_id) and torch.equal(b.n_id, c.n_id)
                assert torch.equal(a.edge_index, b.edge_index) and torch.equal(b.edge_index, c.edge_index)


def test_threads_run_on_from_what_was_left_into_the_next_epoch(graph: Graph) -> None:
    def make(rank: int, world_size: int, threads: int) -> NeighborLoader:
        nodes = share(graph, None, rank, world_size)
        return NeighborLoader(
            graph, [4, 3], input_nodes=nodes, batch_size=6, shuffle=True, num_threads=threads, prefetch=3
        )

    olds = [make(rank, 3, 1) for rank in range(3)]
    for loader in olds:
        iterator = iter(loader)
        next(iterator), next(iterator)
    states = [loader.state_dict() for loader in olds]
    for rank in range(2):
        ahead, alone = make(rank, 2, 2), make(rank, 2, 0)
        next(iter(ahead))  # it was under way elsewhere
        for loader in (ahead, alone):
            loader.load_state_dicts(states)
        left, number = list(zip(ahead, alone, strict=True)), len(ahead)
        assert len(left) == 8 and ahead.epoch == alone.epoch == 1
        ordinary = list(zip(ahead, alone, strict=True))
        assert len(ordinary) == number == 10
        for mine, theirs in left + ordinary:
            assert torch.equal(mine.n_id, theirs.n_id) and torch.equal(mine.edge_index, theirs.edge_index)
        assert ahead.counters()["consumer"].batches == 18, "one pipeline for both"
        for loader in (ahead, alone):
            loader.close()
    for loader in olds:
        loader.close()


def test_batches_of_what_was_left_are_numbered_on_so_that_no_draw_repeats(graph: Graph) -> None:
    def make(rank: int, world_size: int) -> NeighborLoader:
        return NeighborLoader(graph, [2], input_nodes=share(graph, None, rank, world_size), batch_size=10)

    olds = [make(rank, 2) for rank in range(2)]
    for loader in olds:
        iterator = iter(loader)
        next(iterator), next(iterator)
    (loader,) = [make(0, 1)]
    loader.load_state_dicts([old.state_dict() for old in olds])
    iterator = iter(loader)
    numbers = []
    for _ in range(8):
        numbers.append(loader.state_dict()["batch"])
        next(iterator)
    assert numbers == list(range(2, 10)) and next(iterator, None) is None
    assert (loader.state_dict()["epoch"], loader.state_dict()["batch"], loader.state_dict()["leftover"]) == (1, 0, None)


def test_an_epoch_that_is_left_early_is_over_also_where_it_was_a_remainder(graph: Graph) -> None:
    def make(rank: int, world_size: int) -> NeighborLoader:
        return NeighborLoader(graph, [2], input_nodes=share(graph, None, rank, world_size), batch_size=10)

    old = make(0, 1)
    next(iter(old))
    loader = make(1, 2)
    loader.load_state_dicts([old.state_dict()])
    next(iter(loader))
    assert loader.epoch == 0
    assert len(list(loader)) == len(loader) == 6 and loader.epoch == 2


def test_a_group_that_changes_between_two_epochs_needs_no_share(graph: Graph) -> None:
    old = NeighborLoader(graph, [2], input_nodes=torch.arange(50), batch_size=10)
    assert len(list(old)) == 5
    states = [{**old.state_dict(), "rank": rank, "world_size": 2} for rank in range(2)]
    loader = NeighborLoader(graph, [2], input_nodes=torch.arange(30), batch_size=7)
    loader.load_state_dicts(states)
    assert loader.epoch == 1 and len(list(loader)) == 5
    next(iter(old))
    states = [{**old.state_dict(), "rank": rank, "world_size": 2} for rank in range(2)]
    with pytest.raises(ValueError, match=r"2 ranks were in the middle.*not a share: give it what gnnsys.split returns"):
        loader.load_state_dicts(states)
    with pytest.raises(ValueError, match="2 loaders that did not know of each other"):
        loader.load_state_dicts([old.state_dict(), old.state_dict()])


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_states_that_cannot_be_dealt_are_refused_with_the_reason(graph: Graph) -> None:
    def make(rank: int, world_size: int, what: Any = None, **more: Any) -> NeighborLoader:
        return NeighborLoader(graph, [2], input_nodes=share(graph, what, rank, world_size), batch_size=10, **more)

    olds = [make(rank, 2) for rank in range(2)]
    for loader in olds:
        next(iter(loader))
    states = [loader.state_dict() for loader in olds]
    later = {**states[1], "epoch": 1}
    for given, loader, message in (
        ([], make(0, 1), "got none"),
        (states[::-1], make(0, 1), "number 0 is that of rank 1 of 2"),
        (states[:1], make(0, 1), "number 0 is that of rank 0 of 2"),
        ([states[0], later], make(0, 1), "rank 0 was in epoch 0, rank 1 in 1"),
        (states, make(0, 1, shuffle=True), "rank 0 is of a loader with shuffle=False, here it is True"),
        (states, make(0, 1, seed=3), "rank 0 is of a loader with seed=0, here it is 3"),
        (states, make(0, 3, torch.arange(120) >= 0), "other seeds, or of seeds in other parts"),
        (states, make(0, 3, list(range(70))), "other seeds, or of seeds in other parts"),
        ([{**s, "batch": 9} for s in states], make(0, 1), "at batch 9 of 6"),
        ([{**s, "leftover": {"first": 1}} for s in states], make(0, 1), "not the state of a loader"),
        (states, make(0, 1, time_attr="t", input_time=torch.arange(120)), "input_time was given for this rank's seeds"),
    ):
        before = loader.state_dict()
        with pytest.raises(ValueError, match=message):
            loader.load_state_dicts(given)
        assert loader.state_dict() == before
    with pytest.raises(ValueError, match=r"rank 1 of 2 with share=\[60, 120\].*rank 0 of 1: give load_state_dicts"):
        make(0, 1).load_state_dict(states[1])
    edges = share(graph, None, 0, 1, EDGE)
    labelled = LinkNeighborLoader(graph, [2], edge_label_index=edges, edge_label=torch.zeros(900))
    links = [{**s, "batch": 1} for s in through_a_file([labelled.state_dict()])]
    with pytest.raises(ValueError, match="edge_label was given for this rank's seeds alone"):
        LinkNeighborLoader(
            graph, [2], edge_label_index=share(graph, None, 0, 2, EDGE), edge_label=torch.zeros(450)
        ).load_state_dicts(links)


# -- parts and size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_on_other_machines_take_over_what_is_theirs_first(tmp_path, shuffle: bool) -> None:
    chosen = torch.arange(0, 120, 2)
    with machines(homogeneous(), tmp_path / "parts", 3) as graphs:

        def make(rank: int, world_size: int) -> NeighborLoader:
            where = {6: (0, 0, 1, 1, 2, 2), 3: (0, 1, 2), 4: (0, 1, 1, 2)}[world_size]
            mine = graphs[where[rank]]
            seeds = split(mine, mine.from_original(chosen), placement=Placement(rank, where, (0, 1, 2)))
            return NeighborLoader(mine, [3], input_nodes=seeds, batch_size=3, shuffle=shuffle, num_threads=0)

        def local(by_rank: Any) -> float:
            """Of what ranks on three machines take, how much lies on their own."""
            here = total = 0
            for machine, taken in enumerate(map(torch.cat, by_rank)):
                own = graphs[0].book.part_range(machine, NODE)
                here, total = here + int(((taken >= own.start) & (taken < own.stop)).sum()), total + taken.numel()
            return here / total

        ordinary = local(go_on(make, [3], [0])[0][0])
        for worlds in ((6, 3), (4, 3), (6, 4, 3)):
            seen, _ = go_on(make, worlds, [1, 1, 1])
            assert torch.equal(graphs[0].original_ids(torch.tensor(all_ids(seen))).sort().values, chosen)
            assert local(seen[-1]) > ordinary - 0.1 > 0.5, (worlds, local(seen[-1]), ordinary)


def test_a_restart_that_numbers_the_machines_anew_goes_on_with_the_same_batches(tmp_path) -> None:
    with machines(homogeneous(), tmp_path / "parts", 2) as graphs:

        def make(rank: int, where: Sequence[int]) -> NeighborLoader:
            mine = graphs[where[rank]]
            seeds = split(mine, None, placement=Placement(rank, tuple(where), (0, 1)))
            return NeighborLoader(mine, [3], input_nodes=seeds, batch_size=7, shuffle=True, num_threads=0)

        olds = [make(rank, (0, 1)) for rank in range(2)]
        for loader in olds:
            next(iter(loader))
        states = through_a_file([loader.state_dict() for loader in olds])
        for rank, where in ((0, (1, 0)), (1, (1, 0))):
            old, new = olds[1 - rank], make(rank, where)
            old.load_state_dict(states[1 - rank])
            new.load_state_dicts(states)
            for _ in range(2):  # and the epoch after it
                for mine, theirs in zip(new, old, strict=True):
                    assert torch.equal(mine.n_id, theirs.n_id) and torch.equal(mine.edge_index, theirs.edge_index)


class Trillion:
    """What `split` knows of 10^12 edges among ranks on one machine, as far as loaders ask."""

    digest = "all of them"

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.machine_of_rank = rank, (0,) * world_size
        cuts = [10**12 * i // world_size for i in range(world_size + 1)]
        self.shares = [range(first, end) for first, end in pairwise(cuts)]

    def owners(self, numbers: range) -> list[tuple[int, range]]:
        return [(0, numbers)]

    def chosen(self) -> Trillion:
        return self

    def ids(self, first: int, end: int) -> IdRange:
        return IdRange(first, end)


def test_without_shuffling_a_trillion_seeds_are_dealt_again_and_none_is_written_down() -> None:
    states = []
    for rank in range(3):
        recipe = Trillion(rank, 3)
        mine = recipe.shares[rank]
        schedule = Schedule(len(mine), 1024, False, False, 0, max(map(len, recipe.shares)))
        state = {"epoch": 4, "batch": 10**8 + 7, "share": [mine.start, mine.stop], **schedule.state()}
        states.append(state)
    taken = []
    for rank in range(5):
        recipe = Trillion(rank, 5)
        left = deal(states, recipe, shuffle=False)
        schedule = Schedule(len(recipe.shares[rank]), 1024, False, False, 0, max(map(len, recipe.shares)))
        schedule.leftover = left
        inputs = InputIds(IdRange(recipe.shares[rank].start, recipe.shares[rank].stop))
        inputs.take_over(left, recipe, lambda origin: None)
        position = schedule.first(5) - 1  # the last of what was left
        last = inputs[schedule.inputs(schedule.ticket(position))]
        assert 1023 <= last.numel() <= 1024 and schedule.ticket(position + 1) == (5, 0)
        assert int(last[-1]) == left.origins[left.segments[-1].origin].start + left.segments[-1].end - 1
        taken += [left.origins[origin][begin:end] for origin, begin, end in left.segments]
    assert len(taken) <= 8 and all(a.stop <= b.start for a, b in pairwise(taken))
    consumed = sum(range(*s["share"]).stop - range(*s["share"]).start for s in states) - sum(map(len, taken))
    assert consumed == sum(int(s["batch"]) * s["num_inputs"] // -(-s["largest"] // 1024) for s in states)


def test_cutting_segments_is_slicing_what_they_stand_for() -> None:
    draw = random.Random(0)
    for _ in range(100):
        segments = [(o, b := draw.randint(0, 5), b + draw.randint(0, 6)) for o in range(draw.randint(0, 4))]
        written = [(o, i) for o, begin, end in segments for i in range(begin, end)]
        first = draw.randint(0, len(written))
        end = draw.randint(first, len(written))
        left = Leftover(0, 0, 99, (range(20),) * 4, tuple(cut(segments, first, end)))  # type: ignore[arg-type]
        assert [(o, i) for o, begin, end in left.segments for i in range(begin, end)] == written[first:end]
        assert Leftover.from_state(0, through_a_file(left.state())) == left and left.num_inputs == end - first
