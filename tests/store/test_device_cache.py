"""A cache in front of any source reads what the source holds, asks it for the rest alone, and knows its hit rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.store import DeviceCache, FeatureSource, TableSpec, memory_budget
from gnnsys.store.device_cache import highest
from tests.store.cluster import cluster, random_rows
from tests.support.grid import grid

NUM_ROWS = 1000


class Asked:
    """A source that is no tensor and remembers which rows it was asked for."""

    def __init__(self, rows: Tensor, mutable: bool = False, fills: bool = True) -> None:
        self.rows, self.mutable, self.fills, self.asked = rows, mutable, fills, []

    shape = property(lambda self: tuple(self.rows.shape))
    dtype = property(lambda self: self.rows.dtype)

    def read(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        self.asked += ids.tolist()
        if out is None or not self.fills:
            return self.rows[ids.long()]
        return out.copy_(self.rows[ids.long()])

    def begin_read(self, ids: Tensor, out: Tensor | None = None):
        rows = self.read(ids, out)
        return type("Pending", (), {"result": lambda self: rows})()


def case(shape: tuple[int, ...] = (7,), dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, those to keep, and ids to read."""
    generator = torch.Generator().manual_seed(len(shape))
    rows = (torch.randn(NUM_ROWS, *shape, generator=generator) * 50).to(dtype)
    kept = torch.randperm(NUM_ROWS, generator=generator)[:300]
    return rows, kept, torch.randint(0, NUM_ROWS, (4000,), generator=generator)


@grid(
    kind=["tensor", "columns", "filling", "returning", "cache"],
    shape=[(), (1,), (7,), (128,), (3, 5)],
    dtype=[torch.float32, torch.bfloat16, torch.int64],
)
def test_rows_are_those_of_the_source(dtype, shape, kind):
    rows, kept, ids = case(shape, dtype)
    sources = {
        "tensor": lambda: rows,
        "columns": lambda: torch.stack([rows, rows], dim=-1)[..., 0],  # not contiguous
        "filling": lambda: Asked(rows),
        "returning": lambda: Asked(rows, fills=False),
        "cache": lambda: DeviceCache(rows, kept[:50], "cpu"),
    }
    cache = DeviceCache(sources[kind](), kept, "cpu")
    assert isinstance(cache, FeatureSource)
    assert (cache.shape, cache.dtype, cache.num_cached) == (tuple(rows.shape), dtype, 300)
    for some in (ids, ids.int(), kept, ids[:0]):
        out = torch.full((some.numel(), *shape), 77).to(dtype)
        assert torch.equal(cache.read(some), rows[some.long()])
        assert cache.begin_read(some, out).result() is out
        assert torch.equal(out, rows[some.long()])
    hits = 4 * int(torch.isin(ids, kept).sum()) + 2 * kept.numel()
    misses = 4 * ids.numel() + 2 * kept.numel() - hits
    row_bytes = rows[0].numel() * rows.element_size()
    assert cache.counters() == (hits, misses, misses * row_bytes)
    assert cache.counters().hit_rate == hits / (hits + misses)


@pytest.mark.parametrize("wrap", [lambda rows: rows, Asked])
def test_rows_are_cast_to_what_they_are_read_into(wrap):
    rows, kept, ids = case()
    out = torch.empty(ids.numel(), 7, dtype=torch.float16)
    assert torch.equal(DeviceCache(wrap(rows), kept, "cpu").read(ids, out), rows[ids].half())


def test_a_source_is_asked_for_the_kept_rows_once_and_for_misses_alone():
    rows, kept, ids = case()
    source = Asked(rows)
    cache = DeviceCache(source, kept, "cpu")
    assert source.asked == kept.tolist()
    source.asked.clear()
    cache.read(ids)
    assert source.asked == [i for i in ids.tolist() if i not in set(kept.tolist())]
    source.asked.clear()
    cache.read(kept)
    assert not source.asked


def test_a_cache_of_nothing_and_a_cache_of_everything():
    rows, _, ids = case()
    for kept in (torch.empty(0, dtype=torch.int64), torch.arange(NUM_ROWS)):
        for source in (rows, Asked(rows)):
            cache = DeviceCache(source, kept, "cpu")
            assert torch.equal(cache.read(ids), rows[ids])
            assert cache.counters().hit_rate == (kept.numel() > 0)


def test_a_table_of_several_machines_is_cached_whole_whatever_columns_are_pulled():
    spec = TableSpec("node/paper/x", (7,), torch.float32, (0, 400, NUM_ROWS))
    rows = random_rows(NUM_ROWS, 7)
    _, kept, ids = case()
    with cluster([0, 1]) as c:
        c.add(spec, rows)
        table = c.stores[0].tensor(spec.name)
        cache = DeviceCache(table, kept, "cpu")
        assert cache.is_remote
        assert torch.equal(table.pull(ids, columns=torch.tensor([2])), rows[ids][:, [2]])
        assert torch.equal(cache.read(ids), rows[ids])
        assert cache.num_cached == 300
        assert cache.counters().hits == int(torch.isin(ids, kept).sum())


@pytest.mark.parametrize("wrap", [lambda rows: rows, Asked])
def test_the_highest_scores_that_fit_are_kept_and_of_equal_ones_the_lowest_ids(wrap):
    rows, _, _ = case()
    scores = torch.arange(NUM_ROWS) // 10  # ten of each
    room = 28 * 25 + 27 + 4 * NUM_ROWS
    cache = DeviceCache.from_scores(wrap(rows), scores, bytes=room, device="cpu")
    expected = [*range(980, 1000), *range(970, 975)]
    assert cache.num_cached == 25 and cache.nbytes <= room
    cache.read(torch.tensor(expected))
    assert cache.counters() == (25, 0, 0)


def test_without_a_size_a_cache_takes_half_of_what_is_free(monkeypatch):
    rows, _, _ = case()
    scores = torch.arange(NUM_ROWS)
    monkeypatch.setattr(memory_budget, "free_device_memory", lambda device: 2 * (28 * 25 + 4 * NUM_ROWS))
    assert DeviceCache.from_scores(rows, scores, device="cpu").num_cached == 25
    monkeypatch.undo()
    assert DeviceCache.from_scores(rows, scores, device="cpu").num_cached == NUM_ROWS  # which is less than that


def test_choosing_the_highest_equals_a_stable_sort():
    generator = torch.Generator().manual_seed(0)
    for high in (2, 30, 10**6):
        scores = torch.randint(0, high, (500,), generator=generator).double()
        for count in (0, 1, 7, 499, 500, 501):
            expected = torch.sort(scores, descending=True, stable=True).indices[:count]
            assert highest(scores, count).tolist() == sorted(expected.tolist())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda rows: DeviceCache(rows, torch.tensor([NUM_ROWS]), "cpu"), "rows must be in"),
        (lambda rows: DeviceCache(rows, torch.tensor([-1]), "cpu"), "rows must be in"),
        (lambda rows: DeviceCache(rows, torch.tensor([3, 4, 3]), "cpu"), "rows must name each row once"),
        (lambda rows: DeviceCache(rows, torch.tensor([0.5]), "cpu"), "rows must be ids"),
        (lambda rows: DeviceCache(Asked(rows, mutable=True), torch.tensor([0]), "cpu"), "cannot be cached"),
        (lambda rows: DeviceCache(rows.requires_grad_(), torch.tensor([0]), "cpu"), "cannot be cached"),
        (lambda rows: DeviceCache.from_scores(rows, torch.ones(3), bytes=10**6, device="cpu"), "scores"),
        (
            lambda rows: DeviceCache.from_scores(rows, torch.full((NUM_ROWS,), torch.nan), bytes=10**4, device="cpu"),
            "NaN",
        ),
        (lambda rows: DeviceCache.from_scores(rows, torch.ones(NUM_ROWS), bytes=4000, device="cpu"), "bytes"),
        (lambda rows: DeviceCache(rows, torch.tensor([0]), "cpu").read(torch.tensor([NUM_ROWS])), "index"),
        (lambda rows: DeviceCache(Asked(rows), torch.tensor([0]), "cpu").read(torch.tensor([-2])), "index"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, name):
    with pytest.raises(ValueError, match=name):
        call(case()[0])
