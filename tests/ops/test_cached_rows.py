"""A gather over two places returns what a gather from the slow one does, and knows how many rows it saved."""

import pytest
import torch

from gnnsys.ops.cached_rows import gather_cached

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def cached(src: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.full((src.shape[0],), -1, dtype=torch.int32)
    slots[rows] = torch.arange(rows.numel(), dtype=torch.int32)
    return src[rows].clone(), slots


def case(seed: int, shape: tuple[int, ...], dtype: torch.dtype, num_cached: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    src = (torch.randn(200, *shape, generator=generator) * 50).to(dtype)
    cache, slots = cached(src, torch.randperm(200, generator=generator)[:num_cached])
    index = torch.randint(0, 200, (777,), generator=generator)
    return cache, slots, src, index


@pytest.mark.parametrize("num_cached", [0, 1, 60, 200])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (100,), (128,), (3, 5)])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64])
def test_rows_are_those_of_the_source_wherever_they_are_read(dtype, shape, num_cached):
    cache, slots, src, index = case(0, shape, dtype, num_cached)
    for ids in (index, index.int()):
        hits = torch.zeros(1, dtype=torch.int64)
        out = torch.empty(index.numel(), *shape, dtype=dtype)
        assert gather_cached(cache, slots, src, ids, out, hits) is out
        assert torch.equal(out, src[index])
        assert int(hits) == int((slots[index] >= 0).sum())


def test_a_cached_row_is_read_from_the_cache_and_no_other_is():
    cache, slots, src, index = case(1, (9,), torch.float32, 60)
    cache = cache + 1000
    expected = torch.where((slots[index] >= 0)[:, None], src[index] + 1000, src[index])
    assert torch.equal(gather_cached(cache, slots, src, index, torch.empty(777, 9)), expected)


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_cast_as_torch_casts(dtype, to):
    cache, slots, src, index = case(2, (19,), dtype, 100)
    out = torch.empty(777, 19, dtype=to)
    assert torch.equal(gather_cached(cache, slots, src, index, out), src[index].to(to))


def test_hits_are_added_to_what_was_counted_before():
    cache, slots, src, index = case(3, (4,), torch.float32, 200)
    hits = torch.tensor([5])
    for _ in range(2):
        gather_cached(cache, slots, src, index, torch.empty(777, 4), hits)
    assert int(hits) == 5 + 2 * 777


def test_nothing_to_read_is_fine():
    cache, slots, src, _ = case(4, (4,), torch.float32, 3)
    hits = torch.zeros(1, dtype=torch.int64)
    gather_cached(cache, slots, src, torch.empty(0, dtype=torch.int64), torch.empty(0, 4), hits)
    assert int(hits) == 0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"index": torch.tensor([200])}, r"index must be in \[0, 200\), got 200 at position 0"),
        ({"index": torch.tensor([-1])}, "index"),
        ({"index": torch.tensor([0.5])}, "index"),
        ({"slots": torch.full((200,), 3, dtype=torch.int32)}, "slots must be below 3"),
        ({"slots": torch.full((199,), -1, dtype=torch.int32)}, "slots"),
        ({"slots": torch.full((200,), -1)}, "slots"),
        ({"cache": torch.empty(3, 5)}, "cache"),
        ({"cache": torch.empty(3, 4, dtype=torch.float16)}, "cache"),
        ({"out": torch.empty(2, 4)}, "out"),
        ({"out": torch.empty(1, 5)}, "out"),
        ({"out": torch.empty(1, 4, dtype=torch.int32)}, "out"),
        ({"hits": torch.zeros(2, dtype=torch.int64)}, "hits"),
        ({"hits": torch.zeros(1)}, "hits"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, name):
    cache, slots, src, _ = case(5, (4,), torch.float32, 3)
    given = {"cache": cache, "slots": slots, "src": src, "index": torch.tensor([0]), "out": torch.empty(1, 4)}
    with pytest.raises(ValueError, match=name):
        gather_cached(**(given | change))


def test_memory_that_is_read_and_written_at_once_is_refused():
    cache, slots, src, _ = case(6, (4,), torch.float32, 3)
    with pytest.raises(ValueError, match="out must not share memory"):
        gather_cached(cache, slots, src, torch.tensor([5]), src[:1])
    with pytest.raises(ValueError, match="out must not share memory"):
        gather_cached(cache, slots, src, torch.tensor([5]), cache[:1])


def test_the_op_obeys_torch_library():
    cache, slots, src, index = case(7, (4,), torch.float32, 3)
    hits = torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(torch.ops.gnnsys.gather_cached, (cache, slots, src, index, torch.empty(777, 4), hits))
