"""The largest batch that fits: what is found fits, and what is just above does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import gnnsys
from gnnsys.planning import TrainingJob, estimate_memory, fit_argument
from gnnsys.planning.memory.fit import _Search, _Tried


def job(batch_size: int = 16, width: int = 64) -> TrainingJob:
    model = nn.Linear(32, width)
    return TrainingJob(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda model, rows: model(rows).square().mean(),
        loader=[torch.empty(batch_size, 32) for _ in range(2)],
    )


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_what_is_found_fits_and_one_percent_more_does_not(device):
    capacity = 100 << 20
    found = fit_argument(job, "batch_size", {"width": 128, "batch_size": 4096}, device, capacity)
    assert found.memory.needed_bytes <= capacity
    assert found.memory == estimate_again(found.value, device, found.memory.seconds)
    assert estimate_memory(job, {"width": 128, "batch_size": found.too_large}, device).needed_bytes > capacity
    assert found.value < found.too_large <= found.value * 1.01 + 1
    assert found.num_estimates < 20


def estimate_again(batch_size: int, device: str, seconds: float):
    again = estimate_memory(job, {"width": 128, "batch_size": batch_size}, device)
    return type(again)(**{**vars(again), "seconds": seconds})


def test_the_search_begins_at_what_is_given_and_ends_at_the_most():
    found = fit_argument(job, "batch_size", {"batch_size": 64}, capacity=1 << 30, most=256)
    assert (found.value, found.too_large, found.num_estimates) == (256, None, 3)


def test_where_memory_ceases_to_grow_every_larger_value_fits():
    found = fit_argument(
        lambda batch_size: job(min(batch_size, 1000)), "batch_size", {"batch_size": 64}, capacity=1 << 30
    )
    assert found.value >= 1000 and found.too_large is None
    assert found.memory.peak_bytes == estimate_memory(job, {"batch_size": 1000}).peak_bytes


def test_the_search_ends_below_the_first_that_does_not_fit():
    """From 100 on there is room only by luck: not for 140 to 160, but for 200."""
    memory = estimate_memory(job)

    def estimate(value: int) -> _Tried:
        taken = dataclasses.replace(memory, peak_bytes=value)
        return _Tried(taken, fits=value < 140 or 160 < value < 250, has_room=value < 100)

    search = _Search("batch_size", estimate, limit=100, most=1 << 20)
    low, high = search.run(10, lambda asked: asked.fits and asked.has_room)
    assert (low, high) == (99, 100) and search.ask(high).fits
    assert search.climb(high) == (139, 140)
    assert all(search.ask(value).fits for value in search.asked if value < 140)


def dropping(batch_size: int = 32, seeds: int = 300, device: str = "cpu") -> TrainingJob:
    """Epochs drop what is no whole batch: of fewer seeds there is none."""
    data = gnnsys.Graph.from_edge_index(torch.arange(600).view(2, 300) % 300, num_nodes=300)
    data.set_node_data("x", torch.zeros(300, 4))
    loader = gnnsys.NeighborLoader(
        data.to(device), [2], input_nodes=torch.arange(seeds), batch_size=batch_size, drop_last=True, device=device
    )
    model = nn.Linear(4, 1)
    return TrainingJob(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        loss=lambda model, batch: model(batch.x).mean(),
        loader=loader,
    )


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_the_search_ends_where_a_loader_has_no_batches_left(device):
    found = fit_argument(dropping, "batch_size", {"batch_size": 20}, device, 8 << 30)
    assert 297 <= found.value <= 300 < found.too_large <= 303
    with pytest.raises(ValueError, match="loader has no batches"):
        fit_argument(dropping, "batch_size", {"batch_size": 2000}, device, 8 << 30)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_a_loader_that_has_batches_from_some_value_on_is_fitted_above_it(device):
    assert fit_argument(dropping, "seeds", {"seeds": 64}, device, 1 << 30, most=128).value >= 64
    with pytest.raises(ValueError, match=r"the job takes .* with seeds=\d\d, and only 1.00 KiB are there"):
        fit_argument(dropping, "seeds", {"seeds": 64}, device, 1 << 10)


def test_bad_use_is_one_line():
    with pytest.raises(ValueError, match=r"takes .* with batch_size=1, and only 10.00 KiB are there"):
        fit_argument(job, "batch_size", {"batch_size": 2}, capacity=10 << 10)
    with pytest.raises(ValueError, match="capacity of cpu is not known: give --memory"):
        fit_argument(job, "batch_size")
    with pytest.raises(ValueError, match="batch_size must be a number from 1 on to be fitted, got 'a'"):
        fit_argument(job, "batch_size", {"batch_size": "a"}, capacity=1)
    with pytest.raises(ValueError, match="most must be at least 1"):
        fit_argument(job, "batch_size", capacity=1 << 30, most=0)
    with pytest.raises(ValueError, match="memory does not grow with seed"):
        fit_argument(lambda seed: job(), "seed", capacity=1 << 30)
    with pytest.raises(ValueError, match=r"cannot be called with .*depth"):
        fit_argument(job, "depth", capacity=1 << 30)
