"""Many steps of a loader's job, from few that were traced: beside traces of all of them, and what must hold always."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.ops import HopRelation, HopStructure, as_if_on, hop_workspaces, workspace_bytes
from gnnsys.planning import TrainingJob
from gnnsys.planning.memory.caching_allocator import DeviceFull
from gnnsys.planning.memory.estimate import TracedJob, trace_job
from gnnsys.planning.memory.loader_batches import BatchCounts, draw_batches
from gnnsys.planning.memory.many_steps import ManySteps, _like
from gnnsys.planning.memory.step_pattern import StepPattern, count_values, find_pattern
from gnnsys.planning.memory.trace import trace_steps
from gnnsys.planning.memory.training_job import make_job
from tests.planning.memory.test_loader_batches import DEVICE

STEPS, FEW = 60, 6
MIB = 1 << 20
NODES, WIDTH, HIDDEN, FANOUTS = 40_000, 100, 256, [10, 5]


@functools.cache
def graph() -> gnnsys.Graph:
    made = gnnsys.graph.rmat(NODES, 800_000, seed=1)
    made.set_node_data("x", torch.zeros(NODES, WIDTH))
    made.set_node_data("y", torch.arange(NODES) % 5)
    return made


def job(place: str, batch_size: int, device: str = "cpu") -> TrainingJob:
    """Of some 100 MB: the largest blocks have segments of their own."""
    data = graph().pin_memory() if place == "pinned" else graph().to(device)
    loader = gnnsys.NeighborLoader(
        data, FANOUTS, input_nodes=torch.arange(12 * 1024), batch_size=batch_size, shuffle=True, device=device
    )
    model = gnnsys.nn.GraphSAGE(WIDTH, HIDDEN, 2, 5)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

    return TrainingJob(model=model, optimizer=torch.optim.Adam(model.parameters()), loss=loss, loader=loader)


def planned_job(arguments: dict[str, Any]) -> TrainingJob:
    """The job, with its graph where an estimate would have it."""
    with as_if_on("cuda"):
        return make_job(job, arguments)


def traced(place: str = "device", num_steps: int = FEW, batch_size: int = 1024) -> tuple[ManySteps, list[BatchCounts]]:
    """Many steps of the job, learned from `num_steps` traced ones, and the counts of the first batches."""
    arguments = {"place": place, "batch_size": batch_size}
    found = trace_job(job, arguments, DEVICE, num_steps, most_steps=STEPS)
    assert found.many is not None
    return found.many, draw_batches(planned_job(arguments).loader, most=STEPS, fewest=STEPS)


@pytest.fixture(scope="module")
def few() -> ManySteps:
    return traced()[0]


@pytest.fixture(scope="module")
def all_steps() -> tuple[StepPattern, list[BatchCounts]]:
    """Of a trace of all 60 steps, and the counts of their batches."""
    drawn = traced()[1]
    real = trace_steps(planned_job({"place": "device", "batch_size": 1024}), "cuda", STEPS)
    whole = find_pattern(real.changes, real.starts, drawn)
    assert whole is not None and len(whole.steps) == STEPS
    return whole, drawn


def test_sizes_of_batches_that_were_not_traced_follow_from_their_counts(few: ManySteps, all_steps):
    """Beside a trace of 60 of these batches, of which six were learned from."""
    whole, drawn = all_steps
    values = torch.tensor([count_values(counts) for counts in drawn], dtype=torch.float64)
    told = few.pattern.sizes(values)[FEW:].sum(1)
    made = torch.tensor([sum(step.sizes) for step in whole.steps[FEW:]])
    assert float(((told - made).abs() / made).max()) < 0.02


def test_what_is_reserved_after_many_steps_is_that_of_a_trace_of_all_of_them(few: ManySteps, all_steps):
    pattern, drawn = all_steps
    whole = dataclasses.replace(few, pattern=pattern, drawn=drawn)
    told, found = few.replay(), whole.replay()
    assert told.peak_allocated == pytest.approx(found.peak_allocated, rel=0.02)
    assert told.peak_reserved == pytest.approx(found.peak_reserved, rel=0.05, abs=2 * MIB)


def enlarged(many: ManySteps, factor: int) -> ManySteps:
    """The same with storages so many times as large."""
    steps = [step._replace(sizes=[factor * size for size in step.sizes]) for step in many.pattern.steps]
    lines = [line._replace(slope=factor * line.slope, fixed=factor * line.fixed) for line in many.pattern.lines]
    return dataclasses.replace(many, pattern=many.pattern._replace(steps=steps, lines=lines))


def test_reserved_memory_grows_with_steps_and_is_more_where_batches_come_back_late(few: ManySteps):
    few = enlarged(few, 10)
    reserved = [dataclasses.replace(few, num_steps=steps).replay().peak_reserved for steps in (2, 6, 20, 60, 120)]
    assert all(low <= high for low, high in pairwise(reserved)) and reserved[0] < reserved[-1]
    assert few.replay(is_late=True).peak_reserved > few.replay().peak_reserved


def test_memory_is_given_back_but_for_what_is_held_at_the_end(few: ManySteps):
    """After ten steps as after sixty: nothing leaks from step to step."""
    held = [dataclasses.replace(few, num_steps=steps).replay().allocated for steps in (10, 60)]
    assert held[0] == pytest.approx(held[1], rel=0.02)


def test_a_capacity_is_kept_and_refused_where_it_is_below_what_is_live(few: ManySteps):
    free = few.replay()
    assert few.replay(capacity=free.peak_reserved).peak_reserved == free.peak_reserved
    with pytest.raises(DeviceFull):
        few.replay(capacity=free.peak_allocated - MIB)


def test_the_last_batch_of_every_epoch_is_short():
    """12,288 seeds in batches of 5,000."""
    many, drawn = traced(batch_size=5000)
    assert [counts.is_whole for counts in drawn[:6]] == [True, True, False] * 2
    few_drawn = dataclasses.replace(many, drawn=many.drawn[:13])
    counts = few_drawn._batches(window=2).counts
    assert [each.is_whole for each in counts[:30]] == [True, True, False] * 10
    sizes = [each.num_nodes for each in counts]
    assert max(sizes[2:30:3]) < 0.8 * min(sizes[0:30:3])


def test_the_last_batch_is_short_where_no_short_one_is_among_the_first():
    """12,288 seeds in batches of 1,000: the thirteenth has 288."""
    many, _ = traced(batch_size=1000)
    many = dataclasses.replace(many, drawn=many.drawn[:8])
    assert all(counts.is_whole for counts in many.drawn) and many.last.nodes[0][0] == 288
    seeds = [each.nodes[0][0] for each in many._batches(window=2).counts]
    assert seeds[12::13] == [288] * 4 and max(seeds) == 1000


def test_what_comes_back_late_is_there_before_a_job_is_out_of_memory(few: ManySteps):
    few = enlarged(few, 10)
    late = few.replay(is_late=True)
    least = late.peak_reserved - (late.peak_reserved - late.peak_allocated) // 3
    assert few.replay(least, is_late=True).peak_reserved <= least


def test_two_threads_have_a_pool_each():
    streams = []
    many, _ = traced("pinned")
    for is_sampled_there in (False, True):
        memory = dataclasses.replace(many, is_sampled_there=is_sampled_there).replay()
        streams.append({stream for pool in memory._free.values() for stream, *_ in pool})
    assert streams == [{0, 1}, {0, 1, 2}]


def test_more_batches_have_the_means_and_covariances_of_those_drawn():
    drawn = [BatchCounts(((100, 900 + 10 * k, 4000 + 30 * k),), ((1000 + 9 * k, 5000 + 31 * k),)) for k in range(12)]
    like = _like(drawn, 4000)
    flat = [torch.tensor([[*c.nodes[0], *c.edges[0]] for c in each], dtype=torch.float64) for each in (drawn, like)]
    assert torch.allclose(flat[0].mean(0), flat[1].mean(0), rtol=0.01)
    assert torch.allclose(torch.cov(flat[0].T), torch.cov(flat[1].T), rtol=0.1, atol=1)


def test_steps_that_are_not_alike_have_no_pattern():
    arguments = {"place": "device", "batch_size": 1024}
    found: TracedJob = trace_job(job, arguments, DEVICE, 2)
    drawn = draw_batches(planned_job(arguments).loader, most=12)
    changes, starts = found.trace.changes, found.trace.starts
    assert find_pattern(changes, starts[:3], drawn) is None, "two that are alike are too few"
    assert find_pattern(changes, starts, drawn[:3]) is None, "not all of their batches are known"


def test_workspaces_of_hops_are_within_what_sampling_states():
    made = planned_job({"place": "device", "batch_size": 1024})
    csc, loader = graph().csc(), made.loader
    structure = HopStructure([HopRelation(csc, 0, 0)], [NODES])
    seeds = [torch.zeros(1024, dtype=torch.int64)]
    stated = workspace_bytes(
        "sample_hops", *structure.arguments, seeds, FANOUTS, [1, 1], False, False, None, device="cuda"
    )
    for counts in draw_batches(loader, most=8):
        found = loader.planned_workspaces(counts.nodes, counts.edges)
        assert len(found) == 4, "of the seeds, of two hops, and a table of ids"
        assert sum(found) <= stated + (1 << 16)


def test_tables_of_ids_are_made_anew_only_where_fanouts_do_not_say_how_many_come():
    """With -1 nothing is known of the hops to come, so each hop makes a table. Sizes by hand: 16 bytes per id."""
    nodes, edges = [[100, 800, 3000]], [[1000, 4000]]
    assert hop_workspaces([0, 0], [10, 5], nodes, edges) == [2800, 52_008, 16 * 6100, 112_000]
    assert hop_workspaces([0, 0], [-1, -1], nodes, edges) == [2800, 52_008, 16 * 1100, 112_000, 16 * 4900]


def test_short_rows_of_a_pinned_graph_are_on_the_device_too_and_in_the_pool_of_a_loading_thread():
    pinned = trace_job(job, {"place": "pinned", "batch_size": 1024}, DEVICE, 2)
    copies = [record for record in pinned.trace.given if record.module == "copy.y"]
    assert [(record.num_bytes, record.stream) for record in copies] == [(8 * NODES, 1)]
    on_device = trace_job(job, {"place": "device", "batch_size": 1024}, DEVICE, 2)
    assert not any(record.module.startswith("copy.") for record in on_device.trace.given)


def test_an_epoch_of_few_batches_has_a_pattern_all_the_same():
    """Three batches, of which the last one has fewer seeds and other storages."""
    found = trace_job(job, {"place": "device", "batch_size": 5000}, DEVICE, 2)
    assert len(found.trace.starts) == 12 and found.many is not None
