"""An estimate beside the device it is for: what calibrating measures, and what a run takes."""

from __future__ import annotations

import pytest
import torch

from gnnsys.planning import compare_on_device, estimate_memory, run_on_device
from gnnsys.planning.memory.calibrate_device import calibrate_device
from gnnsys.planning.memory.training_device import TrainingDevice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def job(width: int = 1024, device: str = "cpu"):
    from gnnsys.planning import TrainingJob

    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)).to(device)
    return TrainingJob(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        rows=torch.empty(20_000, width, device=device),
        loss=lambda model, graph: model(graph.x).square().mean(),
    )


@pytest.fixture(scope="module")
def here() -> TrainingDevice:
    profile = calibrate_device(is_quick=True)
    return TrainingDevice(profile.kind, "cuda", profile.capacity, profile)


def test_calibrating_finds_cublas_a_context_and_the_scratch_of_sorts(here):
    assert here.profile.product_workspace >= 1 << 20
    assert 50 << 20 < here.profile.context < 4 << 30
    keys = torch.empty(100_000, dtype=torch.int64, device="meta")
    assert here.profile.scratch("aten::sort", [keys]) >= 8 * 100_000


def test_an_estimate_is_within_three_percent_of_a_run(here):
    found, run = estimate_memory(job, {}, here), run_on_device(job, {})
    assert found.allocated_bytes == pytest.approx(run.allocated, rel=0.03)
    assert found.reserved_bytes == pytest.approx(run.reserved, rel=0.05)


def test_the_model_of_the_allocator_has_the_peaks_of_a_runs_own_events(here):
    compared = compare_on_device(job, {}, here)
    assert compared.replayed == (compared.run.allocated, compared.run.reserved)
    assert "estimated" in compared.table()
