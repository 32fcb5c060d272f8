"""Who fills the cache of an opened graph, with what, and when again. The host is the device."""

from __future__ import annotations

from pathlib import Path

import torch

from gnnsys.loader.row_cache import CacheKeeper, fill_caches, keeper_of
from gnnsys.sampling import DistGraph
from gnnsys.sampling.place import own_rows
from gnnsys.store import DeviceTable, copied_pieces
from tests.sampling.machines import homogeneous, machines, typed

HOST = torch.device("cpu")
NODES, ROW, ROOM = 120, 16, 12  # bytes of a row of x, and rows that are to fit


class Loader:
    """Batches of ids, read as a fetch stage does; an epoch's end as a loader tells it."""

    def __init__(self, graph: DistGraph) -> None:
        self.graph, self.table = graph, graph.read_by(HOST, graph.node_data["node"]["x"])
        self.keeper = keeper_of(graph, HOST, ["x"])
        assert isinstance(self.keeper, CacheKeeper) and isinstance(self.table, DeviceTable)
        self.keeper.join(graph, self)

    def epoch(self, ids: torch.Tensor, num_batches: int = 40) -> None:
        """Batches of 30 of the ids, which ask for each as often as they name it."""
        generator = torch.Generator().manual_seed(len(ids))
        expected = self.graph.store.tensor("node/node/x")
        for _ in range(num_batches):
            some = ids[torch.randint(0, len(ids), (30,), generator=generator)].unique()
            assert torch.equal(self.table.read(some), expected[some])
        self.keeper.end_epoch(self.graph, self)

    @property
    def cached(self) -> set[int]:
        return set(self.table.cached_rows().tolist())


def opened(graph: DistGraph) -> DistGraph:
    """With `x` in the device's memory as far as it is here, and a cache for some rows."""
    rows = {name: of for name, of in own_rows(graph).items() if name.startswith("node/")}
    tables = {name: DeviceTable(graph.store.tensor(name), copied_pieces(of, HOST), HOST) for name, of in rows.items()}
    graph.use_device(HOST, None, tables)
    graph.cache = 4 * NODES + ROOM * ROW
    return graph


def remote(graph: DistGraph) -> torch.Tensor:
    own = graph.book.part_range(0)
    return torch.tensor([i for i in range(NODES) if i not in own])


def test_what_cannot_be_computed_is_counted_for_an_epoch_and_cached_then(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        loader, away = Loader(graph), remote(graph)
        often = away[:ROOM]
        loader.epoch(torch.cat([away, *[often] * 40]))
        assert loader.cached == set(often.tolist()) and loader.table.visits is None
        assert graph.cache_plan is not None and 0.5 < graph.cache_plan["node"].hit_rate < 1
        loader.epoch(torch.cat([away, *[often] * 40]))
        assert loader.cached == set(often.tolist()) and loader.table.visits is None  # as expected: nobody counts


def test_own_rows_on_the_device_are_never_cached_however_often_they_are_read(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        own = graph.book.part_range(0)
        loader = Loader(graph)
        loader.epoch(torch.cat([torch.arange(own.start, own.stop).repeat(20), remote(graph)]))
        assert loader.cached and not any(i in own for i in loader.cached)


def test_a_cache_is_filled_anew_where_visits_have_moved_and_left_alone_where_not(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        away = remote(graph)
        early, late = away[:ROOM], away[-ROOM:]
        named = torch.cat([away, *[early] * 40])
        share = torch.bincount(named, minlength=NODES).double() / len(named)
        visits = 1 - (1 - share) ** 30  # of a batch of 30
        fill_caches(graph, HOST, lambda: {"node": visits}, ["x"])
        loader = Loader(graph)
        assert loader.cached == set(early.tolist()) and loader.table.visits is None
        for ids, cached, is_counted in (
            (early, early, False),  # as was expected
            (late, early, True),  # fewer hits: counted from here on
            (late, late, False),
            (late, late, False),
        ):
            loader.epoch(torch.cat([away, *[ids] * 40]))
            assert loader.cached == set(cached.tolist())
            assert (loader.table.visits is not None) == is_counted


def test_a_type_that_no_batch_reads_keeps_no_other_waiting(tmp_path: Path) -> None:
    with machines(typed(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        graph.cache = 1 << 20
        keeper = keeper_of(graph, HOST, None)
        assert keeper is not None
        keeper.join(graph, graph)
        tables = {t: of[0] for t, of in keeper._tables(graph).items()}
        assert len(tables) > 1 and all(table.visits is not None for table in tables.values())
        own, ids = graph.book.ranges("paper")[0].tolist(), torch.arange(graph.num_nodes("paper"))
        for _ in range(4):
            tables["paper"].read(ids)
        keeper.end_epoch(graph, graph)
        away = {i for i in ids.tolist() if not own[0] <= i < own[1]}
        assert set(tables["paper"].cached_rows().tolist()) == away
        assert all(table.visits is None for table in tables.values())
        assert graph.cache_plan is not None and graph.cache_plan.keys() == tables.keys()
        keeper._count(graph, True)  # and so when it is filled anew
        for _ in range(4):
            tables["paper"].read(ids)
        keeper.end_epoch(graph, graph)
        assert set(tables["paper"].cached_rows().tolist()) == away
        assert all(table.visits is None for table in tables.values())


def test_visits_that_move_in_the_epoch_after_a_refill_are_noticed(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        away = remote(graph)
        early, late = away[:ROOM], away[-ROOM:]
        likely = torch.where(torch.isin(torch.arange(NODES), early), 0.9, 0.01).double()
        fill_caches(graph, HOST, lambda: {"node": likely}, ["x"])
        loader = Loader(graph)
        for ids, num_batches, is_counted in (
            (late, 40, True),  # no hits
            (late, 40, False),  # filled anew
            (early, 40, True),  # as many rows and hits as when it was looked last, before it was filled
        ):
            for _ in range(num_batches):
                loader.table.read(ids)
            loader.keeper.end_epoch(graph, loader)
            assert (loader.table.visits is not None) == is_counted


def test_chance_moves_nothing(tmp_path: Path) -> None:
    """All rows are read alike: those that were luckiest in an epoch are no better than those that are cached."""
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        loader, away = Loader(graph), remote(graph)
        loader.epoch(away)
        first = loader.cached
        assert len(first) == ROOM
        for _ in range(3):
            loader.keeper._count(graph, True)  # as if fewer had been found
            loader.epoch(away, num_batches=100)
            assert loader.cached == first


def test_the_first_loader_leads_while_it_lives(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        away = remote(graph)
        train, validate = Loader(graph), Loader(graph)
        validate.epoch(away)
        assert not train.cached and graph.cache_plan is None
        train.epoch(away)
        assert train.cached == validate.cached != set()
        assert train.keeper is validate.keeper


def test_an_epoch_of_one_batch_is_counted_with_the_next(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        graph = opened(graphs[0])
        loader = Loader(graph)
        for is_filled in (False, True):
            loader.epoch(remote(graph), num_batches=1)
            assert bool(loader.cached) == is_filled


def test_a_graph_without_a_cache_has_nobody_who_keeps_it(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 2) as graphs:
        assert keeper_of(graphs[0], HOST, None) is None and keeper_of(homogeneous(), HOST, None) is None
        graph = opened(graphs[0])
        assert keeper_of(graph, None, None) is None and isinstance(keeper_of(graph, HOST, None), CacheKeeper)
