"""The two-level gather on the device returns what a gather from the source does, and counts what it saved."""

import pytest
import torch

from gnnsys.ops import gather_cached
from gnnsys.store import DeviceCache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def put(rows: torch.Tensor, place: str, skip: int = 0) -> torch.Tensor:
    """`rows` on the device or in pinned memory, contiguous, starting `skip` values after an aligned address."""
    flat = torch.zeros(rows.numel() + skip, dtype=rows.dtype)
    flat = flat.cuda() if place == "device" else flat.pin_memory()
    return flat[skip:].view(rows.shape).copy_(rows)


def case(seed: int, width: int, dtype: torch.dtype, num_cached: int, num_src: int = 200, size: int = 1777):
    """On the CPU: cached rows (with the sign changed, to tell them apart), slots, a table and ids."""
    generator = torch.Generator().manual_seed(seed)
    src = (torch.rand(num_src, width, generator=generator) * 50 + 1).to(dtype)
    rows = torch.randperm(num_src, generator=generator)[:num_cached]
    slots = torch.full((num_src,), -1, dtype=torch.int32)
    slots[rows] = torch.arange(num_cached, dtype=torch.int32)
    index = torch.randint(0, num_src, (size,), generator=generator)
    return -src[rows], slots, src, index


def expected(cache, slots, src, index, dtype):
    return gather_cached(cache, slots, src, index, torch.empty(index.numel(), src.shape[1], dtype=dtype))


@pytest.mark.parametrize("place", ["device", "pinned"])
@pytest.mark.parametrize("num_cached", [0, 1, 60, 200])
@pytest.mark.parametrize("width", [1, 2, 3, 16, 32, 100, 128, 129, 256, 602, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_comes_from_its_place(dtype, width, num_cached, place):
    cache, slots, src, index = case(width, width, dtype, num_cached)
    want = expected(cache, slots, src, index, dtype)
    for ids, skip in ((index, 0), (index.int(), 1)):
        room = torch.full((index.numel() + 2, width), 777.0, dtype=dtype, device="cuda")
        hits = torch.full((1,), 5, device="cuda")
        gather_cached(put(cache, "device", skip), slots.cuda(), put(src, place), ids.cuda(), room[1:-1], hits)
        assert torch.equal(room[1:-1].cpu(), want)
        assert (room[0] == 777).all() and (room[-1] == 777).all()
        assert int(hits) == 5 + int((slots[index] >= 0).sum())


@pytest.mark.parametrize("width", [1, 100])
@pytest.mark.parametrize("num_cached", [0, 700, 3000])
def test_many_rows_are_asked_for_in_another_order_and_come_in_their_own(num_cached, width):
    cache, slots, src, index = case(4, width, torch.float32, num_cached, num_src=3000, size=400_000)
    out, hits = torch.full((index.numel(), width), 777.0, device="cuda"), torch.zeros(1, dtype=torch.int64).cuda()
    gather_cached(cache.cuda(), slots.cuda(), put(src, "pinned"), index.cuda(), out, hits)
    assert torch.equal(out.cpu(), expected(cache, slots, src, index, torch.float32))
    assert int(hits) == int((slots[index] >= 0).sum())


@pytest.mark.parametrize("width", [1, 8, 100])
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_cast_on_the_way(dtype, to, width):
    cache, slots, src, index = case(3, width, dtype, 100)
    out = torch.full((index.numel(), width), 777.0, device="cuda").to(to)
    gather_cached(cache.cuda(), slots.cuda(), put(src, "pinned"), index.cuda(), out)
    assert torch.equal(out.cpu(), expected(cache, slots, src, index, to))


@pytest.mark.parametrize("size", [1, 31, 33, 1024, 200_000])
def test_hits_of_any_number_of_rows_are_counted_on_every_run(size):
    cache, slots, src, index = case(size, 16, torch.float32, 2500, num_src=5000, size=size)
    for _ in range(3):
        hits = torch.zeros(1, dtype=torch.int64, device="cuda")
        out = torch.empty(size, 16, device="cuda")
        gather_cached(cache.cuda(), slots.cuda(), put(src, "pinned"), index.cuda(), out, hits)
        assert int(hits) == int((slots[index] >= 0).sum())
    assert torch.equal(out.cpu(), expected(cache, slots, src, index, torch.float32))


def test_nothing_to_read_is_fine():
    cache, slots, src, _ = case(4, 4, torch.float32, 3)
    hits = torch.zeros(1, dtype=torch.int64, device="cuda")
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    gather_cached(cache.cuda(), slots.cuda(), src.cuda(), none, torch.empty(0, 4, device="cuda"), hits)
    assert int(hits) == 0


def test_a_gather_can_be_captured():
    cache, slots, src, index = case(5, 64, torch.float32, 100)
    given = cache.cuda(), slots.cuda(), put(src, "pinned"), torch.zeros_like(index, device="cuda")
    out, hits = torch.empty(index.numel(), 64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    gather_cached(*given, out, hits)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_cached(*given, out, hits)
    hits.zero_()
    given[3].copy_(index)
    graph.replay()
    assert torch.equal(out.cpu(), expected(cache, slots, src, index, torch.float32))
    assert int(hits) == int((slots[index] >= 0).sum())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"index": torch.tensor([0])}, "index must be on the device"),
        ({"slots": torch.full((200,), -1, dtype=torch.int32)}, "slots must be on cuda:0"),
        ({"slots": torch.full((199,), -1, dtype=torch.int32, device="meta")}, "slots"),
        ({"src": torch.empty(200, 4)}, "src must be on cuda:0 or in pinned host memory"),
        ({"cache": torch.empty(3, 4)}, "cache must be on cuda:0"),
    ],
)
def test_what_is_in_the_wrong_place_is_refused_by_name(change, name):
    cache, slots, src, _ = case(6, 4, torch.float32, 3)
    given = {"cache": cache, "slots": slots, "src": src, "index": torch.tensor([0]), "out": torch.empty(1, 4)}
    change = {
        k: torch.full((199,), -1, dtype=torch.int32, device="cuda") if v.is_meta else v for k, v in change.items()
    }
    with pytest.raises(ValueError, match=name):
        gather_cached(**({k: v.cuda() for k, v in given.items()} | change))


class Remote:
    """A source that is no tensor, and remembers what it was asked."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.asked = rows, []

    shape = property(lambda self: tuple(self.rows.shape))
    dtype = property(lambda self: self.rows.dtype)

    def read(self, ids, out=None):
        assert ids.device.type == "cpu"
        self.asked += ids.tolist()
        return self.rows[ids]

    def begin_read(self, ids, out=None):
        rows = self.read(ids, out)
        return type("Pending", (), {"result": lambda self: rows})()


@pytest.mark.parametrize("kind", ["pinned", "plain", "device", "remote"])
@pytest.mark.parametrize("width", [1, 100, 256])
def test_a_device_cache_reads_what_its_source_holds(kind, width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(3000, width, generator=generator)
    kept = torch.randperm(3000, generator=generator)[:1200]
    source = {"pinned": rows.pin_memory, "plain": rows.clone, "device": rows.cuda, "remote": lambda: Remote(rows)}[
        kind
    ]()
    cache = DeviceCache(source, kept, "cuda")
    if kind == "remote":
        assert sorted(source.asked) == sorted(kept.tolist())
        source.asked.clear()
    index = torch.randint(0, 3000, (5000,), generator=generator)
    for ids in (index, index.int()):
        got = cache.read(ids.cuda())
        assert got.is_cuda and torch.equal(got.cpu(), rows[index])
    out = torch.full((5000, width), 777.0, device="cuda", dtype=torch.bfloat16)
    assert cache.begin_read(index.cuda(), out).result() is out
    assert torch.equal(out.cpu(), rows[index].bfloat16())
    hits = 3 * int(torch.isin(index, kept).sum())
    assert (cache.counters().hits, cache.counters().misses) == (hits, 15000 - hits)
    if kind == "remote":
        assert len(source.asked) == 15000 - hits and not set(source.asked) & set(kept.tolist())


def test_without_a_size_a_cache_keeps_torchs_limit_of_the_process():
    rows = torch.rand(1000, 256).pin_memory()
    total = torch.cuda.mem_get_info()[1]
    allowed = torch.cuda.memory_allocated() + 1_000_000
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        few = DeviceCache.from_scores(rows, torch.arange(1000), device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert few.num_cached > 100 and few.nbytes <= 500_000
    assert DeviceCache.from_scores(rows, torch.arange(1000), device="cuda").num_cached == 1000
