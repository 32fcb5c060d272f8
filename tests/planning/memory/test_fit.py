"""The largest batch that fits: what is found fits, and what is just above does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnnsys.planning import TrainingJob, estimate_memory, fit_argument


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


def test_bad_use_is_one_line():
    with pytest.raises(ValueError, match=r"takes .* with batch_size=1, and only 10.00 KiB are there"):
        fit_argument(job, "batch_size", {"batch_size": 2}, capacity=10 << 10)
    with pytest.raises(ValueError, match="capacity of cpu is not known: give --memory"):
        fit_argument(job, "batch_size")
    with pytest.raises(ValueError, match="batch_size must be a number from 1 on to be fitted, got 'a'"):
        fit_argument(job, "batch_size", {"batch_size": "a"}, capacity=1)
    with pytest.raises(ValueError, match="memory does not grow with seed"):
        fit_argument(lambda seed: job(), "seed", capacity=1 << 30)
    with pytest.raises(ValueError, match=r"cannot be called with .*depth"):
        fit_argument(job, "depth", capacity=1 << 30)
