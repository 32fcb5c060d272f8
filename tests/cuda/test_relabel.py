"""Relabelling on the device against the CPU's: the same numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import IdTable, compact, compact_scratch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.int32, torch.int64]
TILE = 1024  # ids that one block numbers


def power_law(size: int, bound: int, seed: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Few ids come very often, most rarely."""
    unit = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (unit**4 * bound).to(dtype)


def check_compact(seeds: list[Tensor], ids: list[Tensor], types: list[int], scratch: Tensor | None = None) -> None:
    expected_nodes, expected_local = compact(seeds, ids, types)
    nodes, local = compact([s.cuda() for s in seeds], [i.cuda() for i in ids], types, scratch)
    assert len(nodes) == len(seeds) and len(local) == len(ids)
    for ours, expected in zip([*nodes, *local], [*expected_nodes, *expected_local], strict=True):
        assert ours.is_cuda and ours.dtype == expected.dtype
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, TILE - 1, TILE, TILE + 1, 40 * TILE + 17, 300_000])
@pytest.mark.parametrize("num_seeds", [0, 1, 1500])
def test_one_type_is_numbered_as_on_the_cpu(size: int, num_seeds: int, dtype: torch.dtype) -> None:
    bound = max(4 * size // 5, 10)
    check_compact(
        [power_law(num_seeds, bound, seed=size + 1, dtype=dtype)], [power_law(size, bound, seed=size, dtype=dtype)], [0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all new", "all one", "descending", "twice", "all seeds", "seeds all one"])
def test_extremes_of_repetition(kind: str, dtype: torch.dtype) -> None:
    size = 70_000
    ids = {
        "all one": torch.full((size,), 7),
        "descending": torch.arange(size).flip(0),
        "twice": torch.arange(size).repeat(2),
    }.get(kind, torch.randperm(size, generator=torch.Generator().manual_seed(1)))
    seeds = {"all seeds": torch.arange(size), "seeds all one": torch.full((3000,), 9)}.get(kind, ids[:0])
    check_compact([seeds.to(dtype)], [ids.to(dtype)], [0])


@pytest.mark.parametrize("ids", [[2**63 - 2, 0, 2**63 - 2, 2**32, 2**32 - 1], [2**31 - 1, 2**31, 0]])
def test_ids_of_any_size_are_told_apart(ids: list[int]) -> None:
    check_compact([torch.tensor(ids[:1])], [torch.tensor(ids)], [0])
    high = torch.arange(5000) << 40  # differ in their upper half alone
    check_compact([high[:10]], [high.repeat(2)], [0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_types", [1, 3, 12])
@pytest.mark.parametrize("num_lists", [0, 1, 9, 70])  # 70 and their seeds do not fit into a kernel's arguments
def test_several_types_and_lists_in_one_call(num_types: int, num_lists: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: int(torch.randint(high, (), generator=generator))  # noqa: E731
    dtypes = [DTYPES[draw(2)] for _ in range(num_types)]
    seeds = [power_law(draw(2) * draw(3000), 5000, draw(1000), dtypes[t]) for t in range(num_types)]
    types = [draw(num_types) for _ in range(num_lists)]
    ids = [power_law(draw(3) * draw(4000), 5000, draw(1000), dtypes[t]) for t in types]
    check_compact(seeds, ids, types)


def test_a_large_call_and_the_next_one_in_the_same_memory() -> None:
    for seed in range(3):
        check_compact([power_law(1024, 1_000_000, seed)], [power_law(1_500_000, 1_000_000, seed + 10)], [0])


def test_no_types_at_all() -> None:
    scratch = compact_scratch(10, "cuda")
    assert compact([], [], [], scratch) == ([], [])


def test_the_cpus_scratch_does_no_harm() -> None:
    check_compact([torch.arange(5)], [torch.arange(100)], [0], compact_scratch(10))


def test_ids_may_begin_anywhere_in_memory() -> None:
    ids = power_law(5001, 3000, seed=3, dtype=torch.int32)
    (nodes,), (local,) = compact([ids.cuda()[1:8]], [ids.cuda()[3:]], [0])
    (expected,), (places,) = compact([ids[1:8]], [ids[3:]], [0])
    assert torch.equal(nodes.cpu(), expected) and torch.equal(local.cpu(), places)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("bound", "dtype"),
    [(bound, dtype) for bound in (100, 50_000, 1 << 20) for dtype in DTYPES] + [(1 << 45, torch.int64)],
)
def test_a_table_numbers_by_first_sight_across_calls(bound: int, dtype: torch.dtype, seed: int) -> None:
    ours, theirs = IdTable(bound, device="cuda"), IdTable(bound)
    for round_ in range(2):  # the second time on a table that has been used
        ours.clear()
        theirs.clear()
        seeds = power_law(300, bound, seed, dtype)
        ours.insert_seeds(seeds.cuda())
        theirs.insert_seeds(seeds)
        for step, size in enumerate((10, 0, 1000, 70_000, 5)):
            ids = power_law(size, bound, seed + 7 * step + round_, dtype)
            for mine, expected in zip(ours.insert(ids.cuda()), theirs.insert(ids), strict=True):
                assert mine.dtype == expected.dtype and torch.equal(mine.cpu(), expected), f"round {round_}, {size} ids"
        more = power_law(50, bound, seed + 99, dtype)  # seeds also after ids
        ours.insert_seeds(more.cuda())
        theirs.insert_seeds(more)
    ids = torch.cat([torch.arange(100, dtype=dtype), power_law(2000, bound, seed + 1, dtype)])
    assert torch.equal(ours.lookup(ids.cuda()).cpu(), theirs.lookup(ids))


def test_a_narrow_table_takes_every_id_below_2_to_the_32() -> None:
    ids = torch.tensor([2**32 - 1, 5, 2**31, 2**32 - 1, 0])
    table = IdTable(1 << 32, device="cuda")
    local, fresh = table.insert(ids.cuda())
    assert local.tolist() == [0, 1, 2, 0, 3] and fresh.tolist() == [2**32 - 1, 5, 2**31, 0]
    assert table.lookup(torch.tensor([2**32 - 1, 2**32 - 2, -1, 2**40]).cuda()).tolist() == [0, -1, -1, -1]


def test_a_table_grows_once_its_room_is_used() -> None:
    table = IdTable(1 << 20, room=16, device="cuda")
    before = table.workspace_bytes
    seeds = torch.arange(400)
    table.insert_seeds(seeds.cuda())
    local, fresh = table.insert(torch.arange(3000).cuda())
    assert table.workspace_bytes > before and local.tolist() == list(range(3000)) and fresh.numel() == 2600
    assert table.device.type == "cuda"


def test_the_python_face_never_waits_by_itself() -> None:
    table = IdTable(1000, device="cuda")
    ids = torch.arange(100).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # sees the waits of torch's own ops
    try:
        table.clear()
        table.insert_seeds(ids)
        table.insert(ids)
        table.lookup(ids)
        compact([ids], [ids], [0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_input_is_told_as_on_the_cpu() -> None:
    for bad in ([-1], [3, -5, -2], [1 << 40]):
        table = IdTable(10, device="cuda")
        table.insert(torch.tensor([3]).cuda())
        expected = next(b for b in sorted(bad) if b < 0 or b >= 1 << 32)
        with pytest.raises(ValueError, match=rf"ids must be in \[0, 4294967296\), got {expected}$"):
            table.insert(torch.tensor(bad).cuda())
        with pytest.raises(ValueError, match="ids must be"):  # void until it is cleared
            table.insert(torch.tensor([3]).cuda())
        table.clear()
        assert table.insert(torch.tensor([3, 4]).cuda())[0].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"ids must be in \[0, 9223372036854775807\), got -7"):
        compact([torch.tensor([1]).cuda()], [torch.tensor([2, -7, 9]).cuda()], [0])
    with pytest.raises(ValueError, match=r"got -7"):
        compact([torch.tensor([1, -7], dtype=torch.int32).cuda()], [], [])
    with pytest.raises(ValueError, match="types"):
        compact([torch.tensor([1]).cuda()], [torch.tensor([1]).cuda()], [1])
    with pytest.raises(ValueError, match="dtype"):
        compact([torch.tensor([1]).cuda()], [torch.tensor([1], dtype=torch.int32).cuda()], [0])
    with pytest.raises(ValueError, match="ids must be int32 or int64"):
        table.insert(torch.tensor([1.0]).cuda())
    with pytest.raises(ValueError, match="ids must be on cuda"):
        table.insert(torch.tensor([1]))


def test_a_void_table_never_fills_up_however_often_it_is_asked() -> None:
    table = IdTable(1 << 20, device="cuda")
    with pytest.raises(ValueError, match="got -1"):
        table.insert(torch.cat([torch.arange(400), torch.tensor([-1])]).cuda())
    for first in (400, 800, 1200, 1600):  # more ids than it has slots
        with pytest.raises(ValueError, match="got -1"):
            table.insert(torch.arange(first, first + 400).cuda())
    table.clear()
    assert table.insert(torch.arange(400).cuda())[1].numel() == 400


def test_a_bad_seed_is_told_by_the_next_insert() -> None:
    table = IdTable(10, device="cuda")
    table.insert_seeds(torch.tensor([5, -3]).cuda())
    with pytest.raises(ValueError, match="got -3"):
        table.insert(torch.tensor([1]).cuda())


def test_a_table_that_is_none_and_one_that_is_full_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 words"):
        torch.ops.gnnsys.relabel(torch.zeros(4, dtype=torch.int64).cuda(), torch.tensor([1]).cuda())
    with pytest.raises(ValueError, match="not initialised"):
        torch.ops.gnnsys.relabel(torch.zeros(2000, dtype=torch.int64).cuda(), torch.tensor([1]).cuda())
    words = torch.zeros(8 + 1024, dtype=torch.int64).cuda()
    torch.ops.gnnsys.id_table_init(words, 10, False)
    with pytest.raises(ValueError, match="holds up to 512 ids"):
        torch.ops.gnnsys.relabel(words, torch.arange(513).cuda())
    with pytest.raises(ValueError, match="too few for 2\\^10 wide slots"):
        torch.ops.gnnsys.id_table_init(words, 10, True)
