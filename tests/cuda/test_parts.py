"""Parts that the GPU samples and reads by itself: the same batches as the host's, and nothing left when it is over."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnsys
from gnnsys.graph import Graph, typed_graph
from gnnsys.loader import LinkNeighborLoader, NeighborLoader
from gnnsys.ops import PageLock, read_table
from gnnsys.partition import write_parts
from gnnsys.sampling import DistGraph, LaborSampler, NeighborSampler, SampleKey
from gnnsys.sampling.place import PartBytes, choose_place, own_rows, place_parts_on
from gnnsys.session import init
from gnnsys.store import DeviceTable, MemoryBudget, RegisteredFiles, copied_pieces
from tests.cuda.places import same_batch
from tests.cuda.test_loader import OPTIONS
from tests.sampling.device_parts import LAYOUTS, check_deep_halos, check_every_kind, check_exclusions, check_typed_kinds
from tests.sampling.machines import assign, homogeneous, machines, typed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = torch.device("cuda", 0)
PLACES = ("device", "structure", "registered")


def placing(place: str) -> Callable[[DistGraph], None]:
    def put(graph: DistGraph) -> None:
        placed = place_parts_on(graph, CUDA, place)
        if graph.parts_here:
            assert placed.place == place and graph.sampled_on == CUDA
        else:  # nothing is here: the host asks others
            from gnnsys.sampling.device_structure import DeviceStructure

            graph.use_device(CUDA, DeviceStructure(graph.parts, [], CUDA), {})

    return put


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gpu_samples_what_one_process_samples_wherever_parts_lie(tmp_path: Path, layout: str, place: str) -> None:
    check_every_kind(tmp_path / "p", layout, placing(place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("num_parts", "owner"), [(1, [0]), (3, [0, 0, 0]), (3, [0, 1, 0])])
def test_the_gpu_samples_typed_parts_as_one_process_does(tmp_path: Path, num_parts: int, owner, place: str) -> None:
    check_typed_kinds(tmp_path / "p", num_parts, owner, placing(place))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["a machine each", "all on one machine", "not neighbours"])
def test_the_gpu_excludes_the_same_edges(tmp_path: Path, layout: str, place: str) -> None:
    check_exclusions(tmp_path / "p", layout, placing(place))


@pytest.mark.parametrize("place", PLACES)
def test_a_deeper_halo_changes_no_sample_of_the_gpu(tmp_path: Path, place: str) -> None:
    check_deep_halos(tmp_path, placing(place))


def large(seed: int = 3) -> Graph:
    """More seeds than a block has threads, and hubs with more in-edges than any fanout."""
    g = torch.Generator().manual_seed(seed)
    num_nodes, num_edges = 20_000, 300_000
    edges = torch.randint(0, num_nodes, (2, num_edges), generator=g)
    edges[1, : num_edges // 10] = torch.randint(0, 5, (num_edges // 10,), generator=g)
    rows = {"x": torch.randn(num_nodes, 100, generator=g), "y": torch.randint(0, 47, (num_nodes,), generator=g)}
    return Graph.from_edge_index(edges, num_nodes, rows)


@pytest.fixture(scope="module", params=[1, 3])
def large_parts(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "parts"
    write_parts(large(), assign(large(), request.param), folder)
    return folder


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fanouts", [[15, 10, 5], [-1, 3], [40, 2], [3000]])
def test_all_hops_in_one_call_are_the_hosts(large_parts: Path, place: str, fanouts: list[int]) -> None:
    with init(process_group=False) as session:
        graph = session.open(large_parts, device=CUDA, place=place)
        for replace in (False, True):
            here, there = (NeighborSampler(graph, fanouts, replace=replace, device=where) for where in ("cpu", None))
            assert there._plain is not None and here._plain is None
            for batch in range(3):
                seeds = {"node": torch.randint(0, 20_000, (700,), generator=torch.Generator().manual_seed(batch))}
                key = SampleKey(5, 1, batch)
                a, b = here.sample(seeds, key=key), there.sample(seeds, key=key)
                for name in ("node", "row", "col", "edge"):
                    for t, rows in getattr(a, name).items():
                        assert torch.equal(rows, getattr(b, name)[t].cpu()), (name, place, fanouts, replace)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("kind", ["uniform", "replace", "labor"])
def test_typed_hops_in_one_call_are_the_hosts(tmp_path: Path, place: str, num_parts: int, kind: str) -> None:
    graph = typed_graph(2000)
    write_parts(graph, assign(graph, num_parts), tmp_path / "p")
    with init(process_group=False) as session:
        parts = session.open(tmp_path / "p", device=CUDA, place=place)
        for fanouts in ([10, 5, 3], [-1, 3], {t: [i % 3 * 4, 20] for i, t in enumerate(graph.edge_types)}):
            options: dict[str, Any] = {"replace": True} if kind == "replace" else {}
            make = partial(LaborSampler if kind == "labor" else NeighborSampler, parts, fanouts, **options)
            here, there = make(device="cpu"), make()
            assert there._plain is not None and here._plain is None
            for batch in range(3):
                g = torch.Generator().manual_seed(batch)
                types = graph.node_types[: batch + 1]
                seeds = {t: torch.randint(0, graph.num_nodes(t), (150,), generator=g) for t in types}
                key = SampleKey(5, 1, batch)
                a, b = here.sample(seeds, key=key), there.sample(seeds, key=key)
                assert (a.num_sampled_nodes, a.num_sampled_edges) == (b.num_sampled_nodes, b.num_sampled_edges)
                for name in ("node", "row", "col", "edge", *(["edge_weight"] if kind == "labor" else [])):
                    for t, rows in getattr(a, name).items():
                        assert torch.equal(rows, getattr(b, name)[t].cpu()), (name, t, fanouts)


@pytest.mark.parametrize("place", [*PLACES, "host", "auto"])
@pytest.mark.parametrize("num_threads", [None, 0, 2])
def test_a_loader_of_an_opened_graph_gives_the_hosts_batches(large_parts: Path, place: str, num_threads) -> None:
    with init(process_group=False) as session:
        graph = session.open(large_parts, device="cuda", place=place)
        options: dict[str, Any] = {"batch_size": 256, "shuffle": True, "seed": 4}
        options["input_nodes"] = graph.from_global(range(3000))
        there = NeighborLoader(graph, [10, 5], num_threads=num_threads, **options)
        here = NeighborLoader(graph, [10, 5], device="cpu", num_threads=0, **options)
        for _ in range(2):
            for a, b in zip(there, here, strict=True):
                assert a.x.device == CUDA
                same_batch(a, b)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_a_loader_agrees_on_parts(tmp_path: Path, place: str, option: str) -> None:
    from tests.cuda.places import homogeneous as with_kinds

    graph, options = with_kinds(), dict(OPTIONS[option])
    if isinstance(options.get("input_nodes"), str):
        options["input_nodes"] = graph.node_data["node"][options["input_nodes"]].nonzero().view(-1)
    write_parts(graph, assign(graph, 3), tmp_path / "p")
    with init(process_group=False) as session:
        parts = session.open(tmp_path / "p", device="cuda", place=place)
        if "input_nodes" in options:
            options["input_nodes"] = parts.from_original(options["input_nodes"].long())
        make = partial(NeighborLoader, parts, [5, 3], batch_size=32, shuffle=True, **options)
        there, here = list(make()), list(make(device="cpu", num_threads=0))
        assert len(there) == len(here) > 1 and all(batch.x.device == CUDA for batch in there)
        for a, b in zip(there, here, strict=True):
            same_batch(a, b)


@pytest.mark.parametrize("place", PLACES)
def test_links_of_parts_agree(tmp_path: Path, place: str) -> None:
    graph = homogeneous()
    write_parts(graph, assign(graph, 2), tmp_path / "p")
    with init(process_group=False) as session:
        parts = session.open(tmp_path / "p", device="cuda", place=place)
        make = partial(LinkNeighborLoader, parts, [5, 3], batch_size=64, neg_sampling="binary", shuffle=True)
        there, here = list(make()), list(make(device="cpu", num_threads=0))
        assert len(there) == len(here) > 1 and all(batch.x.device == CUDA for batch in there)
        for a, b in zip(there, here, strict=True):
            same_batch(a, b)


@pytest.mark.parametrize("owner", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 2, 3]])
@pytest.mark.parametrize("place", ["device", "structure"])
def test_rows_are_those_of_the_table_cached_or_not(tmp_path: Path, owner: list[int], place: str) -> None:
    ids = torch.randint(0, 120, (5000,), generator=torch.Generator().manual_seed(1))
    with machines(homogeneous(), tmp_path / "p", 4, machine_of_part=owner) as graphs:
        for mine in graphs:
            place_parts_on(mine, CUDA, place)
            for name in ("node/node/x", "node/node/t", "edge/node|to|node/number"):
                if name not in own_rows(mine):
                    continue
                table = mine.store.tensor(name)
                rows = mine.read_by(CUDA, table)
                assert isinstance(rows, DeviceTable)
                for some in (ids, ids[:1], ids[:0]):
                    assert torch.equal(rows.read(some.cuda()).cpu(), table[some])
                rows.fill_cache(torch.arange(0, 120, 3))
                assert torch.equal(rows.read(ids.cuda()).cpu(), table[ids])
                assert rows.counters().hits == int((ids % 3 == 0).sum())
            mine.release_device()


def test_many_rows_of_files_are_read_in_the_order_of_their_ids(large_parts: Path) -> None:
    """Above 8 MB rows are sorted and read by a few blocks: with and without a cache, in one part and in several."""
    ids = torch.randint(0, 20_000, (60_000,), generator=torch.Generator().manual_seed(2))
    with init(process_group=False) as session:
        graph = session.open(large_parts, device=CUDA, place="structure")
        table = graph.store.tensor("node/node/x")
        rows = graph.read_by(CUDA, table)
        assert torch.equal(rows.read(ids.cuda()).cpu(), table[ids])
        rows.fill_cache(torch.arange(0, 20_000, 7))
        assert torch.equal(rows.read(ids.cuda()).cpu(), table[ids])
        assert rows.counters().hits == int((ids % 7 == 0).sum())


def test_rows_in_no_piece_are_left_alone() -> None:
    pieces = copied_pieces([(2, torch.ones(3, 100)), (8, torch.full((4, 100), 2.0))], CUDA)
    out = torch.full((14, 100), -1.0, device=CUDA)
    read_table([p.rows for p in pieces], [p.first for p in pieces], torch.arange(14, device=CUDA), out, num_rows=14)
    assert out[:, 0].tolist() == [-1, -1, 1, 1, 1, -1, -1, -1, 2, 2, 2, 2, -1, -1]


# -- placing and giving back -------------------------------------------------------------------------------------------


def test_files_are_given_back_at_close_and_ten_opens_leave_no_growth(large_parts: Path) -> None:
    allocated = set()
    for number in range(10):
        with init(process_group=False) as session:
            graph = session.open(large_parts, device=CUDA, place="registered")
            files = graph.registered
            assert files is not None and files.nbytes > 0
            view = files.view(graph.parts.part(0).node_data["node"]["x"])
            assert view is not None and view.is_pinned()
            loader = NeighborLoader(graph, [5, 5], input_nodes=graph.from_global(range(500)), batch_size=100)
            next(iter(loader))
        assert not view.is_pinned() and files.nbytes == 0
        del graph, loader, session, files, view
        gc.collect()
        torch.cuda.synchronize()
        if number:
            allocated.add(torch.cuda.memory_allocated())
    assert len(allocated) == 1


def test_more_than_may_be_locked_is_refused_and_auto_then_takes_the_host(large_parts: Path, monkeypatch) -> None:
    few = partial(RegisteredFiles, limit=1 << 16)
    monkeypatch.setattr("gnnsys.sampling.place.RegisteredFiles", few)
    with init(process_group=False) as session, pytest.raises(ValueError, match="place='structure' cannot be had"):
        session.open(large_parts, device=CUDA, place="structure")
    monkeypatch.setattr("gnnsys.sampling.place.choose_place", lambda *_: choose_place(PartBytes(1, 9), 4))
    with init(process_group=False) as session:
        graph = session.open(large_parts, device=CUDA)
        assert graph.placed is not None and graph.placed.place == "host" and "are allowed" in graph.placed.why
        batch = next(iter(NeighborLoader(graph, [5], input_nodes=graph.from_global(range(50)), batch_size=50)))
        assert batch.x.device == CUDA


def test_a_device_that_does_not_exist_is_named(large_parts: Path) -> None:
    with init(process_group=False) as session, pytest.raises(ValueError, match="cuda:99"):
        session.open(large_parts, device="cuda:99")


def test_typed_parts_are_one_import_away(tmp_path: Path) -> None:
    graph = typed()
    write_parts(graph, assign(graph, 2), tmp_path / "p")
    parts = gnnsys.open(tmp_path / "p", device="cuda")
    try:
        batch = next(iter(NeighborLoader(parts, [3, 2], input_nodes="paper", batch_size=8)))
        assert batch["paper"].x.device == CUDA
    finally:
        session = gnnsys.session.current()
        assert session is not None
        session.close()


# -- caches that are filled by what was counted ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["links", "own sampler"])
def test_what_cannot_be_computed_is_cached_by_what_the_first_epoch_asked_for(large_parts: Path, kind: str) -> None:
    with init(process_group=False) as session:
        graph = session.open(large_parts, device=CUDA, place="structure", cache=1 << 20)
        table = graph.read_by(CUDA, graph.store.tensor("node/node/x"))
        assert isinstance(table, DeviceTable)

        def make(device: str | None) -> NeighborLoader | LinkNeighborLoader:
            options: dict[str, Any] = {"batch_size": 256, "shuffle": True, "seed": 4, "device": device}
            if kind == "links":
                links = graph.from_global(torch.arange(2000).view(2, 1000))
                return LinkNeighborLoader(graph, [10, 5], edge_label_index=links, **options)
            ours = NeighborSampler(graph, [10, 5], device=device)
            return NeighborLoader(
                graph,
                sampler=lambda _, seeds, key: ours.sample(seeds, key=key),
                input_nodes=graph.from_global(range(3000)),
                **options,
            )

        there, here = make(None), make("cpu")
        assert table.num_cached == 0 and table.visits is not None
        for _ in range(3):
            for a, b in zip(there, here, strict=True):
                same_batch(a, b)
            assert table.num_cached > 0
        assert graph.cache_plan is not None and table.counters().hits > 0


def test_a_cache_follows_seeds_that_have_moved_while_other_batches_are_loaded(large_parts: Path) -> None:
    """Rows stay those of the table; what is cached are the rows that later epochs ask for."""
    with init(process_group=False) as session:
        graph = session.open(large_parts, device=CUDA, place="structure", cache=1 << 20)
        table = graph.read_by(CUDA, graph.store.tensor("node/node/x"))
        assert isinstance(table, DeviceTable)
        loader = NeighborLoader(graph, [2], input_nodes=graph.from_global(range(20_000)), batch_size=500, num_threads=2)
        before = set(table.cached_rows().tolist())
        assert before
        keeper, rows = graph.cache_keeper, graph.store.tensor("node/node/x")
        few = torch.tensor([i for i in range(20_000) if i not in before][:1000])
        for _ in range(3):
            for _ in range(40):
                assert torch.equal(table.read(few.cuda()).cpu(), rows[few])
            keeper.end_epoch(graph, loader)
        assert set(table.cached_rows().tolist()) != before
        for batch in loader:
            assert torch.equal(batch.x.cpu(), rows[batch.n_id.cpu()])


def test_files_that_cannot_be_locked_are_read_from_a_copy_that_ranks_share(large_parts: Path, monkeypatch) -> None:
    class NotOfFiles(PageLock):
        def __init__(self, address: int, bytes: int, device: torch.device, *, read_only: bool) -> None:
            if read_only:  # as files are
                self.bytes, self.error, self._on = bytes, 801, None
            else:
                super().__init__(address, bytes, device, read_only=read_only)

    monkeypatch.setattr("gnnsys.sampling.place.RegisteredFiles", partial(RegisteredFiles, lock=NotOfFiles))
    for place in ("structure", "registered"):
        with init(process_group=False) as session:
            graph = session.open(large_parts, device=CUDA, place=place)
            assert graph.placed is not None and "from shared memory, as CUDA refuses" in graph.placed.why
            assert graph.registered is not None and 0 < graph.registered.copied_bytes == graph.registered.nbytes
            options: dict[str, Any] = {"input_nodes": graph.from_global(range(1000)), "batch_size": 256}
            for a, b in zip(
                NeighborLoader(graph, [10, 5], **options),
                NeighborLoader(graph, [10, 5], device="cpu", **options),
                strict=True,
            ):
                same_batch(a, b)


def test_a_loader_sets_room_for_its_batches_aside_before_parts_are_placed(large_parts: Path) -> None:
    with init(process_group=False) as session:
        graph = session.open(large_parts)
        budget = MemoryBudget.of(CUDA)
        loader = NeighborLoader(graph, [10, 5], input_nodes=graph.from_global(range(1000)), batch_size=256, device=CUDA)
        promised = [use.bytes for use in budget.uses() if use.what == "batches of a loader"]
        batch = next(iter(loader))
        held = sum(t.nbytes for t in batch.tensors())
        assert promised and promised[0] >= 4 * held
        del loader, batch
        gc.collect()
        assert not [use for use in budget.uses() if use.what == "batches of a loader"]


def test_a_cache_that_is_replaced_keeps_its_memory_until_all_streams_have_read_it(large_parts: Path) -> None:
    """A stream that is far behind reads the old rows while others are put into memory of the same size."""
    with init(process_group=False) as session:
        graph = session.open(large_parts, device=CUDA, place="structure")
        table, rows = graph.read_by(CUDA, graph.store.tensor("node/node/x")), graph.store.tensor("node/node/x")
        assert isinstance(table, DeviceTable)
        behind, ids = torch.cuda.Stream(), torch.arange(4000)
        for turn in range(4):
            wanted = (ids + 1000 * turn).cuda()
            table.fill_cache(ids + 1000 * turn)  # waits for the device
            with torch.cuda.stream(behind):
                torch.cuda._sleep(100_000_000)
                found = table.read(wanted)
            table._kept.cache = None  # as a fill begins, which waits for the device only later
            taken = [torch.full((4000, 100), -1.0, device=CUDA) for _ in range(3)]
            behind.synchronize()
            assert torch.equal(found.cpu(), rows[ids + 1000 * turn]), turn
            del taken
