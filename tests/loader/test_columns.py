"""Rows of other parts by some of their columns: the same from every place, asked for by no more, by version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.comm import Kind
from gnnsys.graph import NODE, Graph
from gnnsys.loader import NeighborLoader, PipelineOptions
from gnnsys.pipeline import Stage
from gnnsys.sampling import DistGraph, GuidedSampler
from gnnsys.store.message_plan import columns_to_wire
from tests.loader.sources import Source
from tests.sampling.machines import machines
from tests.sampling.test_guided import some_scores
from tests.support.grid import every_value

WIDTH, FANOUTS = 12, [4, 3]
COLUMNS = torch.tensor([1, 2, 5, 7, 8, 11])
OTHERS = torch.tensor([0, 2, 3, 9])


@pytest.fixture(scope="module")
def whole() -> Graph:
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 115, (2, 900), generator=g)
    rows = {"x": torch.randn(120, WIDTH, generator=g), "y": torch.randint(0, 5, (120,), generator=g)}
    return Graph.from_edge_index(edges, 120, rows)


def expected(graph: DistGraph, requester: int, ids: Tensor, columns: Tensor | None, fill: str = "mean") -> Tensor:
    """Rows as they are to be, from whole ones."""
    table = graph.node_data[NODE]["x"]
    rows, own = table[ids].clone(), graph.book.part_range(requester, NODE)
    if columns is None:
        return rows
    mean = table[torch.arange(own.start, own.stop)].double().mean(0).float()
    values = mean if fill == "mean" else torch.zeros(WIDTH)
    is_other = (ids < own.start) | (ids >= own.stop)
    dropped = [column for column in range(WIDTH) if column not in columns.tolist()]
    for column in dropped:
        rows[is_other, column] = values[column]
    assert bool(is_other.any()) and bool((~is_other).any())
    return rows


def make(graph: DistGraph, requester: int, fill: str = "mean", **options):
    sampler = GuidedSampler(graph, FANOUTS, requester=requester, deviation=0.4, fill=fill)
    options = {"batch_size": 16, "shuffle": True, "num_threads": 2, "fetch": ["x", "y"], **options}
    return sampler, NeighborLoader(graph, sampler=sampler, **options)


@pytest.mark.usefixtures("one_epoch")
@every_value(fill=["mean", "zero"], owner={"one": [0, 0, 0, 0], "two": [0, 1, 0, 1], "four": [0, 1, 2, 3]})
def test_rows_are_the_same_on_any_number_of_machines(whole: Graph, tmp_path: Path, owner: list[int], fill: str) -> None:
    with machines(whole, tmp_path / "parts", 4, machine_of_part=owner) as graphs:
        for graph in graphs[:2]:  # part 1 may be elsewhere
            for pipeline in (PipelineOptions(), PipelineOptions(share=False), PipelineOptions(keep=0)):
                sampler, loader = make(graph, 1, fill, pipeline=pipeline, batch_size=40)
                sampler.use(some_scores(graph, 1), at=(0, 0), columns=COLUMNS)
                for batch in loader:
                    assert torch.equal(batch.x, expected(graph, 1, batch.n_id, COLUMNS, fill))
                    assert torch.equal(batch.y, graph.node_data[NODE]["y"][batch.n_id])
                loader.close()


@pytest.fixture
def two(whole: Graph, tmp_path: Path):
    with machines(whole, tmp_path / "parts", 2) as graphs:
        yield graphs


def test_only_the_columns_are_asked_for_and_the_others_counted(whole: Graph, tmp_path: Path) -> None:
    seen: list = []
    with machines(whole, tmp_path / "parts", 2, seen=seen) as graphs:
        counts = []
        for columns in (None, COLUMNS):
            sampler, loader = make(graphs[0], 0, fetch=["x"], num_threads=0)  # nothing is asked ahead of the epoch
            sampler.use(some_scores(graphs[0], 0), at=(0, 0), columns=columns)
            seen.clear()
            list(loader)
            counts.append(loader.counters()["fetch"].counts)
            pulls = [request for request in seen if request.kind == Kind.PULL]
            bits = columns_to_wire(COLUMNS, WIDTH)
            assert bits is not None
            named = [any(torch.equal(array, bits) for array in request.arrays) for request in pulls]
            assert pulls and all(named) == any(named) == (columns is not None)
            loader.close()
    whole_rows, narrow = counts
    assert whole_rows["bytes_left_out"] == 0 and narrow["rows_asked"] == whole_rows["rows_asked"] > 0
    assert narrow["bytes_remote"] == narrow["rows_asked"] * 4 * COLUMNS.numel()
    assert narrow["bytes_left_out"] + narrow["bytes_remote"] == whole_rows["bytes_remote"]
    assert narrow["rows_shared"] == whole_rows["rows_shared"] > 0


def test_a_batch_has_the_columns_of_its_version_whatever_is_in_flight_beside_it(two) -> None:
    graph = two[0]
    sampler, loader = make(graph, 0, pipeline=PipelineOptions(keep=4), batch_size=6)
    versions = {(0, 3): COLUMNS, (0, 5): OTHERS, (0, 9): None, (0, 12): COLUMNS}
    for at, columns in versions.items():
        sampler.use(some_scores(graph, 0), at=at, columns=columns)
    batches = list(loader)
    loader.close()
    assert len(batches) > 13
    for number, batch in enumerate(batches):
        in_force = [columns for at, columns in versions.items() if at <= (0, number)]
        columns = in_force[-1] if in_force else None
        assert torch.equal(batch.x, expected(graph, 0, batch.n_id, columns)), number


def test_narrow_rows_travel_in_two_bytes_where_that_was_asked_for(two) -> None:
    graph = two[0]
    sampler, loader = make(graph, 0, fetch=["x"], wire_dtype=torch.bfloat16)
    sampler.use(some_scores(graph, 0), at=(0, 0), columns=COLUMNS)
    own, dropped = graph.book.part_range(0, NODE), sorted({*range(WIDTH)} - {*COLUMNS.tolist()})
    for batch in loader:
        rows = expected(graph, 0, batch.n_id, COLUMNS)
        others = (batch.n_id < own.start) | (batch.n_id >= own.stop)
        rounded = rows[others].bfloat16().float()
        rounded[:, dropped] = rows[others][:, dropped]  # what stands in for the others did not travel
        assert torch.equal(batch.x[others], rounded) and torch.equal(batch.x[~others], rows[~others])
    counts = loader.counters()["fetch"].counts
    assert counts["bytes_remote"] == counts["rows_asked"] * 2 * COLUMNS.numel()
    assert counts["bytes_left_out"] == counts["rows_asked"] * 2 * (WIDTH - COLUMNS.numel())
    assert sum(record.bytes["left_out"] for record in loader.trace()[: len(loader)]) == counts["bytes_left_out"]
    loader.close()


def test_what_batches_shared_by_columns_of_before_is_forgotten(two) -> None:
    graph = two[0]
    sampler, loader = make(graph, 0, batch_size=4, num_threads=1)
    for number in range(24):
        sampler.use(some_scores(graph, 0), at=(0, number), columns=torch.tensor([number % 12, (number + 5) % 12]))
    list(loader)
    assert loader.counters()["fetch"].counts["rows_asked"] > 0
    in_flight = 8  # more than the threads and depths of this loader
    assert len(loader._fetch._window._places) <= in_flight and len(loader._fetch._narrowed) <= 4
    loader.close()


def test_columns_alone_leave_draws_uniform(two) -> None:
    graph = two[0]
    sampler, loader = make(graph, 0)
    sampler.use(at=(0, 0), columns=COLUMNS)
    uniform = NeighborLoader(graph, FANOUTS, batch_size=16, shuffle=True, num_threads=0)
    for batch, other in zip(loader, uniform, strict=True):
        assert torch.equal(batch.n_id, other.n_id)
        assert torch.equal(batch.x, expected(graph, 0, batch.n_id, COLUMNS))
    assert sampler.version_at((0, 0)) == 0


def test_a_resumed_loader_has_the_columns_it_had(two) -> None:
    graph = two[0]
    sampler, loader = make(graph, 0)
    seen = []
    for number, batch in enumerate(loader):
        if number == 1:
            sampler.use(some_scores(graph, 0), columns=COLUMNS)
            last = sampler.use(some_scores(graph, 0, seed=1), columns=OTHERS)
        if number == 3:
            state = loader.state_dict()
        seen.append(batch.x)
    loader.close()
    again, resumed = make(graph, 0)
    resumed.load_state_dict(state)
    assert again.columns_at(last).key == sampler.columns_at(last).key
    rest = [batch.x for batch in resumed]
    resumed.close()
    assert len(rest) == len(seen) - 4 > 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rest, seen[4:], strict=True))


def test_what_goes_to_a_device_is_narrow_until_it_is_there(two) -> None:
    graph = two[0]
    sampler, loader = make(graph, 0, num_threads=0)
    sampler.use(some_scores(graph, 0), at=(0, 0), columns=COLUMNS)
    loader._fetch.widens = False  # as where batches go to a device
    sizes = []
    fetch = next(stage for stage in loader._stages if stage.name == "fetch")
    compact = next(stage for stage in loader._stages if stage.name == "compact")
    sample = next(stage for stage in loader._stages if stage.name == "sample")
    choose = next(stage for stage in loader._stages if stage.name == "schedule")
    for ticket in loader._schedule.tickets(0, end=len(loader)):
        sampled = fetch.run(fetch.begin(sample.run(choose.run(ticket))))
        rows = sampled.rows[NODE]["x"]
        sizes.append(rows.narrow.shape[1])
        assert rows.whole.shape[0] + rows.narrow.shape[0] == sampled.sample.node[NODE].numel()
        moved = sampled.apply(lambda tensor: tensor.clone())
        assert moved.rows[NODE]["x"].narrow.data_ptr() != rows.narrow.data_ptr()
        assert any(tensor is rows.narrow for tensor in sampled.tensors())
        batch = compact.run(moved)
        assert torch.equal(batch.x, expected(graph, 0, batch.n_id, COLUMNS))
    assert set(sizes) == {COLUMNS.numel()}


def test_a_stage_behind_fetch_sees_whole_rows(two) -> None:
    graph = two[0]
    seen = []

    def look(sampled):
        seen.append(sampled.rows[NODE]["x"])
        return sampled

    sampler, loader = make(graph, 0, stages=[Stage("look", look, after="fetch", threads=0)])
    sampler.use(some_scores(graph, 0), at=(0, 0), columns=COLUMNS)
    for batch, rows in zip(loader, seen, strict=False):
        assert torch.equal(rows, batch.x) and rows.shape[1] == WIDTH
    assert seen


def test_rows_of_a_users_own_source_are_narrowed_as_well_and_those_that_train_never(two, whole: Graph) -> None:
    graph = two[0]
    ids = graph.original_ids(torch.arange(graph.num_nodes()), NODE)
    rows = whole.node_data[NODE]["x"][ids]
    wanted = {}
    for name, source in {
        "own": Source(rows, mutable=False),
        "tensor": rows,
        "trains": Source(rows, mutable=True),
    }.items():
        graph.set_node_data(name, source, order="global" if name == "tensor" else None)
        sampler = GuidedSampler(graph, FANOUTS, requester=0, features=name)
        if name == "trains":
            with pytest.raises(ValueError, match="trains, and is never read by some columns"):
                sampler.use(columns=COLUMNS)
            continue
        sampler.use(at=(0, 0), columns=COLUMNS)
        loader = NeighborLoader(graph, sampler=sampler, batch_size=60, fetch=[name, "x"], num_threads=1)
        wanted[name] = [batch[name] for batch in loader]
        for batch in loader:
            assert torch.equal(batch[name], expected(graph, 0, batch.n_id, COLUMNS))
            assert torch.equal(batch.x, rows[batch.n_id])  # another table stays whole
        loader.close()
    assert all(torch.equal(a, b) for a, b in zip(*wanted.values(), strict=True))


def test_all_columns_are_whole_rows(two) -> None:
    sampler = GuidedSampler(two[0], FANOUTS)
    sampler.use(some_scores(two[0], 0), at=(0, 0), columns=torch.arange(WIDTH))
    assert sampler.columns_at((0, 0)) is None


def test_bad_use_says_what_to_do(two) -> None:
    graph = two[0]
    sampler = GuidedSampler(graph, FANOUTS)
    for columns, told in (
        (torch.tensor([3, WIDTH]), r"columns must be in \[0, 12\)"),
        (torch.tensor([-1]), r"columns must be in \[0, 12\)"),
        (torch.tensor([], dtype=torch.int64), "choose at least one"),
    ):
        with pytest.raises(ValueError, match=told):
            sampler.use(columns=columns)
    with pytest.raises(ValueError, match="have no columns"):
        GuidedSampler(graph, FANOUTS, features="y").use(columns=COLUMNS)
    with pytest.raises(ValueError, match="not among the rows of nodes"):
        GuidedSampler(graph, FANOUTS, features="z").use(columns=COLUMNS)
    with pytest.raises(ValueError, match="fill must be one of"):
        GuidedSampler(graph, FANOUTS, fill="last")
    sampler.use(columns=COLUMNS)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="versions without columns"):
        sampler.load_state_dict({**state, "columns": []})
    with pytest.raises(ValueError, match="no choice of columns"):
        sampler.load_state_dict({**state, "columns": [{"rows": "x"}]})
