"""Where a trace ends: the job is run for a few steps, or its memory is stated; an estimate says which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnnsys.planning import TraceEnds, TrainingJob, estimate_memory, probe_memory, stated_memory, watched_peak
from gnnsys.planning.memory.training_device import TrainingDevice
from tests.planning.memory import jobs


def chosen_rows(batch_size: int = 512) -> TrainingJob:
    """A mask of rows by their values: a size that no trace knows."""
    model = nn.Linear(32, 64)

    def loss(model, rows):
        out = model(rows)
        return out[out.sum(1) > -1e9].square().mean()

    return TrainingJob(
        model=model, optimizer=torch.optim.Adam(model.parameters()), loss=loss,
        loader=[torch.ones(batch_size, 32) for _ in range(3)],
    )  # fmt: skip


def test_a_job_that_cannot_be_traced_is_probed_with_smaller_batches():
    with pytest.raises(TraceEnds, match="depends on rows"):
        estimate_memory(chosen_rows, {"batch_size": 512})
    found = probe_memory(chosen_rows, {"batch_size": 512})
    assert found.how == "probed"
    assert found.peak_bytes == pytest.approx(watched_peak(chosen_rows(512), 6), rel=0.02)


def test_a_job_without_batches_is_probed_as_it_is():
    assert probe_memory(jobs.gnn, {"kind": "GIN"}).peak_bytes == watched_peak(jobs.gnn("GIN"))


def test_for_a_device_the_events_of_a_probe_go_through_its_allocator():
    found = probe_memory(chosen_rows, {"batch_size": 4096}, TrainingDevice("t1000", "cuda"))
    assert found.peak_bytes <= found.allocated_bytes <= found.reserved_bytes == found.needed_bytes
    assert found.reserved_bytes % (2 << 20) == 0 or found.reserved_bytes > found.allocated_bytes
    assert "peak on t1000, probed:" in found.table()


def test_memory_can_be_stated():
    found = stated_memory(6 << 30, "h200")
    assert (found.how, found.needed_bytes) == ("stated", 6 << 30)
    assert found.table().startswith("peak on h200, stated: 6.00 GiB")
    with pytest.raises(ValueError, match="memory must be a number of bytes from 1 on"):
        stated_memory(0)


def test_what_is_traced_says_so():
    found = estimate_memory(jobs.mlp)
    assert found.how == "traced" and found.as_json()["how"] == "traced"
    assert found.table().startswith("peak on cpu, traced: ")
