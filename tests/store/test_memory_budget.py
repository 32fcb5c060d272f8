"""What is promised to one is not promised to another, and nothing is held longer than its owner lives."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from gnnsys.ops import BufferPool
from gnnsys.store import DeviceCache, MemoryBudget, capped, free_memory, memory_budget
from gnnsys.store.memory_budget import CAPS, limited, shared_by_ranks


class Holder:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def test_what_one_was_promised_is_not_left_for_another() -> None:
    budget = MemoryBudget("cpu", limit=1000)
    first = budget.promise(600, "bins")
    assert budget.left() == 400
    with pytest.raises(MemoryError, match=r"cache needs 500 bytes of cpu, where 400 are left: bins 600 \(promised\)"):
        budget.promise(500, "cache")
    second = budget.promise_share(0.5, "cache")
    assert (second.bytes, budget.left()) == (200, 200)
    first.close()
    first.close()
    assert budget.left() == 800


def test_memory_that_is_held_counts_against_the_limit_as_long_as_its_owner_lives() -> None:
    budget = MemoryBudget("cpu", limit=1000)
    holder = Holder(300)
    budget.watch(holder, "loader buffers", lambda owner: owner.num_bytes)
    assert budget.left() == 700
    holder.num_bytes = 450
    assert budget.left() == 550 and budget.describe() == "loader buffers 450"
    del holder
    gc.collect()
    assert budget.left() == 1000 and budget.uses() == []


def test_a_promise_ends_with_its_owner_and_gives_back_what_is_not_needed() -> None:
    budget = MemoryBudget("cpu", limit=1000)
    owner = Holder(0)
    promise = budget.promise(800, "bins").keep_for(owner)
    promise.shrink(300)
    promise.shrink(500)  # it never grows
    assert budget.left() == 700
    del owner, promise
    gc.collect()
    assert budget.left() == 1000


def test_without_a_limit_the_device_says_what_is_left_and_promises_are_subtracted() -> None:
    budget = MemoryBudget("cpu")
    promised = free_memory() // 2
    with budget.promise(promised, "bins"):
        assert budget.left() <= free_memory() - promised + (1 << 30)  # other processes give and take meanwhile
    with pytest.raises(MemoryError, match="needs"):
        budget.promise(1 << 60, "everything")


def test_there_is_one_budget_for_every_device_of_a_process() -> None:
    assert MemoryBudget.of("cpu") is MemoryBudget.of(torch.device("cpu", 0))
    with limited("cpu", 123) as budget:
        assert MemoryBudget.of("cpu").limit == 123 and budget.left() <= 123
    assert MemoryBudget.of("cpu").limit is None


def test_promises_of_many_threads_never_add_up_to_more_than_the_limit() -> None:
    budget = MemoryBudget("cpu", limit=1000)
    kept: list[object] = []

    def ask() -> None:
        for _ in range(50):
            try:
                kept.append(budget.promise(30, "bins"))
            except MemoryError:
                return

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert len(kept) == 33


@pytest.mark.parametrize("bad", [0, -1])
def test_a_limit_and_a_cap_are_positive_numbers(bad: int) -> None:
    with pytest.raises(ValueError, match="limit must be a positive number of bytes"):
        MemoryBudget("cpu", limit=bad)
    with pytest.raises(ValueError, match="cap must be a positive number of bytes"):
        MemoryBudget("cpu").cap = bad


def test_a_cache_takes_its_share_of_the_cap_whatever_others_have_taken(monkeypatch) -> None:
    rows, scores = torch.zeros(1000, 7), torch.arange(1000)
    sizes = []
    for free in (1 << 40, 1 << 15, 0):
        monkeypatch.setattr(memory_budget, "free_device_memory", lambda device, free=free: free)
        with capped("cpu", 40_000 + sum(use.bytes for use in MemoryBudget.of("cpu").uses())) as budget:
            sizes.append(DeviceCache.from_scores(rows, scores, device="cpu").nbytes)
            assert budget.left() >= 20_000
    assert sizes[0] == sizes[1] == sizes[2] <= 20_000 < sizes[0] + 28


def test_a_cap_leaves_what_is_not_allocated_and_the_smaller_of_cap_and_limit_counts(monkeypatch) -> None:
    monkeypatch.setattr(memory_budget, "_allocated", lambda device: 300)  # a model, as torch counts on a device
    budget, holder = MemoryBudget("cpu", cap=1000), Holder(200)
    assert budget.left() == budget.room() == 700
    budget.watch(holder, "loader buffers", lambda owner: owner.num_bytes)
    assert budget.left() == 700  # buffers of torch's are in what it has allocated
    holder.num_bytes = 400
    assert budget.left() == 600  # and others are not
    with budget.promise(100, "bins"):
        assert (budget.left(), budget.room()) == (500, 600)
        budget.limit = 700
        assert budget.left() == 200
    budget.cap = budget.limit = None
    monkeypatch.setattr(memory_budget, "free_device_memory", lambda device: 5000)
    assert budget.left() == budget.room() == 5000


@pytest.mark.parametrize(
    ("text", "host", "device"),
    [
        ("", None, None),
        ("6G", 6 << 30, 6 << 30),
        ("cuda:0=6G, cpu=2M", 2 << 20, 6 << 30),
        ("cuda=1000", None, 1000),
        ("cuda:1=6G", None, None),
        ("cuda:1=6G,3k", 3 << 10, 3 << 10),
    ],
)
def test_the_environment_caps_each_device_that_it_names(text: str, host: int | None, device: int | None) -> None:
    assert memory_budget._cap_in(text, torch.device("cpu")) == host
    assert memory_budget._cap_in(text, torch.device("cuda", 0)) == device


@pytest.mark.parametrize("text", ["much", "cuda:0=", "cdua=1G", "cpu=0"])
def test_a_cap_in_the_environment_that_is_none_is_refused_by_name(text: str, monkeypatch) -> None:
    monkeypatch.setenv(CAPS, text)
    monkeypatch.setattr(memory_budget, "_budgets", {})
    with pytest.raises(ValueError, match=rf"^{CAPS} must be "):
        MemoryBudget.of("cpu")


def test_a_second_cache_takes_half_of_what_the_first_has_left() -> None:
    rows, scores = torch.zeros(1000, 7), torch.arange(1000)
    with limited("cpu", 40_000):
        first = DeviceCache.from_scores(rows, scores, device="cpu")
        second = DeviceCache.from_scores(rows, scores, device="cpu")
        assert first.nbytes <= 20_000 < first.nbytes + 28 and second.nbytes <= (40_000 - first.nbytes) // 2
        held = [use for use in MemoryBudget.of("cpu").uses() if use.what == "device cache"]
        assert [use.bytes for use in held] == [first.nbytes, second.nbytes]


def test_buffers_that_a_loader_lends_and_keeps_are_counted_until_they_are_gone() -> None:
    pool = BufferPool(max_free=1)
    budget = MemoryBudget("cpu", limit=1 << 30)
    budget.watch(pool, "loader buffers", BufferPool.held_bytes)
    batches = [pool.empty((1 << 20,), torch.uint8) for _ in range(3)]
    assert pool.held_bytes() >= 3 << 20 and pool.held_bytes() == (1 << 30) - budget.left()
    one = pool.held_bytes() // 3
    del batches[1:]
    assert pool.held_bytes() == 2 * one  # one in use, one kept, one given back
    batches.clear()
    assert pool.held_bytes() == pool.free_bytes() == one


def test_promises_whose_owners_are_collected_meanwhile_disturb_nobody() -> None:
    budget, thresholds = MemoryBudget("cpu", limit=1 << 30), gc.get_threshold()
    gc.set_threshold(20)
    try:
        for _ in range(200):
            for _ in range(5):
                owner = Holder(0)
                owner.self = owner  # type: ignore[attr-defined]  # only the collector ends it
                budget.promise(1, "bins").keep_for(owner)
                del owner
            assert budget.left() > 0 and isinstance(budget.describe(), str)
    finally:
        gc.set_threshold(*thresholds)


def test_a_rank_takes_its_share_and_whoever_counted_the_ranks_may_end_in_any_order(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    with limited("cpu", 1000) as budget:
        assert (budget.num_ranks, budget.share()) == (5, 200)
        first, second = shared_by_ranks("cpu", 2), shared_by_ranks("cpu", 4)
        first.__enter__(), second.__enter__()
        with budget.promise(200, "bins"):
            assert (budget.num_ranks, budget.share()) == (4, 200)
        first.__exit__(None, None, None)
        assert budget.num_ranks == 4
        second.__exit__(None, None, None)
        assert budget.num_ranks == 5
    with pytest.raises(ValueError, match="num_ranks must be at least 1"), shared_by_ranks("cpu", 0):
        pass
