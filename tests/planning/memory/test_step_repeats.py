"""Steps are traced until they do the same to memory; a real run of twenty has the same peak, byte for byte."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from gnnsys.planning import TrainingJob, estimate_memory, watched_peak
from tests.support.grid import grid


def training(beside, model: nn.Module | None = None) -> TrainingJob:
    """`beside(number, model, out)` is called in each step, which are numbered from 1."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    rows, number = torch.randn(50, 16), [0]

    def loss(model: nn.Module, graph) -> torch.Tensor:
        number[0] += 1
        out = model(graph.x)
        beside(number[0], model, out)
        return out.square().mean()

    return TrainingJob(model=model, optimizer=torch.optim.Adam(model.parameters()), loss=loss, rows=rows)


def every(period: int) -> TrainingJob:
    return training(lambda number, model, out: torch.cat([out] * 200).exp() if number % period == 0 else None)


def averaged() -> TrainingJob:
    """Averages of weights, from the fourth step on."""
    kept: list[torch.optim.swa_utils.AveragedModel] = []

    def beside(number: int, model: nn.Module, out: torch.Tensor) -> None:
        if kept:
            kept[0].update_parameters(model)
        elif number == 4:
            kept.append(torch.optim.swa_utils.AveragedModel(model))

    return training(beside)


def looking_ahead() -> TrainingJob:
    """Slow weights, which are written every fourth step."""
    slow: dict[int, torch.Tensor] = {}
    job, number = training(lambda number, model, out: None), [0]

    def look_ahead(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        number[0] += 1
        if number[0] % 4 == 0:
            with torch.no_grad():
                for place, weight in enumerate(job.model.parameters()):
                    slow[place] = weight + 0.5 * (slow.get(place, weight) - weight)
                    weight.copy_(slow[place])

    job.optimizer.register_step_post_hook(look_ahead)
    return job


def bank(length: int | None) -> TrainingJob:
    kept: collections.deque = collections.deque(maxlen=length)
    return training(lambda number, model, out: kept.append(out.detach()))


def hooked() -> TrainingJob:
    """A hook that keeps the last six outputs of a layer."""
    model, kept = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), collections.deque(maxlen=6)
    model[0].register_forward_hook(lambda module, given, out: kept.append(out))
    return training(lambda number, model, out: None, model)


LATER = {
    "a costly fifth step": lambda: every(5),
    "averages from the fourth step on": averaged,
    "slow weights every fourth step": looking_ahead,
    "a bank of eight outputs": lambda: bank(8),
    "a hook that keeps six outputs": hooked,
}


@grid(make=LATER)
def test_what_later_steps_take_is_counted(make):
    found = estimate_memory(make)
    assert found.peak_bytes == watched_peak(make(), 12) > estimate_memory(make, num_steps=2).peak_bytes
    assert found.is_repeated
    assert f"traced {found.num_traced} steps; not seen: what happens first in a later one" in found.table()


def test_memory_that_grows_without_end_is_said_to():
    found = estimate_memory(lambda: bank(None))
    assert (found.num_traced, found.is_repeated, found.step_growth) == (20, False, 50 * 16 * 4)
    assert "Steps were not alike to the end, and each of the last took 3.12 KiB more" in found.table()


def test_steps_that_are_alike_end_a_trace_early():
    """A costly step that comes later is not seen, and the table says how many were."""
    found = estimate_memory(lambda: every(7))
    assert (found.num_traced, found.is_repeated, found.step_growth) == (6, True, 0)
    assert found.peak_bytes < watched_peak(every(7), 7)


def test_as_many_steps_are_traced_as_are_asked_for():
    found = estimate_memory(lambda: every(5), num_steps=4)
    assert (found.num_traced, found.is_repeated) == (4, True)
    with pytest.raises(ValueError, match="num_steps must be at least 2"):
        estimate_memory(lambda: every(5), num_steps=1)
