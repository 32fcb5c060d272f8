"""Batches of a sampling loader on a device: how many are there, what else is, and how large the largest becomes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.loader.batch_memory import planned_use
from gnnsys.planning import TrainingJob, estimate_memory, fit_argument
from gnnsys.planning.memory import fit
from gnnsys.planning.memory.estimate import trace_job
from gnnsys.planning.memory.loader_batches import draw_batches, largest_batch
from gnnsys.planning.memory.training_device import TrainingDevice
from gnnsys.store import DeviceCache

DEVICE = TrainingDevice("t1000", "cuda")
NODES, WIDTH = 4000, 16


def graph() -> gnnsys.Graph:
    edges = torch.randint(NODES, (2, 40_000), generator=torch.Generator().manual_seed(1))
    rows, labels = torch.zeros(NODES, WIDTH), torch.arange(NODES) % 5
    return gnnsys.Graph.from_edge_index(edges, num_nodes=NODES, node_data={"x": rows, "y": labels})


def job(place: str = "host", batch_size: int = 64, prefetch: int = 2, cached: int = 0, device: str = "cpu"):
    placed = {"host": lambda: graph(), "pinned": lambda: graph().pin_memory(), "device": lambda: graph().to(device)}
    data = placed[place]()
    if cached:
        visits = torch.arange(NODES, dtype=torch.float32)
        rows = data.node_data["node"]["x"]
        data.set_node_data("x", DeviceCache.from_scores(rows, visits, bytes=cached, device=device))
    loader = gnnsys.NeighborLoader(
        data, [5, 3], input_nodes=torch.arange(3000), batch_size=batch_size, shuffle=True, prefetch=prefetch,
        device=device,
    )  # fmt: skip
    model = gnnsys.nn.GraphSAGE(WIDTH, 8, 2, 5)

    def loss(model, batch):
        out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

    return TrainingJob(model=model, optimizer=torch.optim.Adam(model.parameters()), loss=loss, loader=loader)


def live_batches(place: str, **more) -> int:
    """How many different batches' rows are there at the peak."""
    traced = trace_job(job, {"place": place, **more}, DEVICE, 2)
    rows = [
        record
        for record in traced.trace.live_at(traced.trace.peak()[1])
        if record.module.endswith("batch.nodes.node.x")
    ]
    return len({record.step for record in rows})


@pytest.mark.parametrize(
    ("place", "more", "count"),
    [
        ("host", {}, 1 + 2),  # the one that is trained on; one that was copied, one that is being copied
        ("device", {}, 1 + 2 + 1),  # two that wait, one in the hands of a thread
        ("pinned", {}, 1 + 2 + 2),  # two threads
        ("device", {"prefetch": 4}, 1 + 4 + 1),
    ],
)
def test_batches_that_a_loader_has_ready_are_counted(place, more, count):
    assert live_batches(place, **more) == count


def test_a_loader_without_threads_has_none_ready():
    assert planned_use("device", 0, 2, 1, 1000) == (0, 0, 0)
    waiting, making, sampling = planned_use("device", 3, 2, 1, 1_000_000)
    assert (waiting, making) == (2, 3) and 30e6 < sampling < 150e6, "some 70 bytes per edge"


def test_a_graph_is_counted_where_it_is():
    given = {place: estimate_memory(job, {"place": place}, DEVICE).by_kind() for place in ("host", "pinned", "device")}
    data = graph()
    csc = data.csc()
    structure = csc.indptr.nbytes + csc.indices.nbytes + csc.edge_ids.nbytes
    assert given["pinned"]["structure"] - given["host"]["structure"] >= structure
    rows = data.node_data["node"]["x"].nbytes
    assert given["device"]["inputs"] - given["host"]["inputs"] >= rows
    assert given["pinned"]["inputs"] < rows + given["host"]["inputs"], "rows of a pinned graph stay on the host"


def test_a_cache_of_rows_is_counted_with_its_slots():
    with_cache = estimate_memory(job, {"place": "pinned", "cached": 64_000}, DEVICE)
    shares = {share.module: share.num_bytes for share in with_cache.shares if share.module.startswith("cache.")}
    assert shares["cache.x"] == pytest.approx(64_000 + 4 * NODES, abs=4 * NODES)


def test_placing_a_graph_for_an_estimate_leaves_others_alone():
    data = graph()
    assert data.to("cpu").planned_place == "host"
    estimate_memory(job, {"place": "device"}, DEVICE)
    assert data.planned_place == "host"


def test_sizes_are_those_of_the_batches_that_will_come():
    made = job()
    drawn = [(counts.num_nodes, counts.num_edges) for counts in draw_batches(made.loader, most=10)]
    batches = [
        (batch.n_id.numel(), batch.edge_index.shape[1]) for batch, _ in zip(job().loader, range(10), strict=False)
    ]
    assert drawn == batches


def test_the_largest_of_many_batches_is_below_its_bound_as_often_as_was_said():
    draw, held, near = random.Random(1), 0, 0
    for _ in range(200):
        seen = [int(draw.gauss(1e6, 2e4)) for _ in range(40)]
        found = largest_batch(seen, 4, 500)
        largest = max(draw.gauss(1e6, 2e4) for _ in range(500))
        held += largest <= found.bound_bytes
        near += abs(found.likely_bytes - largest) < 0.05 * largest
    assert held >= 198 and near == 200


def test_the_bound_of_an_estimate_is_above_every_batch_of_three_epochs():
    found = estimate_memory(job, {}, DEVICE)
    made = job()
    row_bytes = made.loader.row_bytes()
    sizes = [
        batch.n_id.numel() * (row_bytes + 8) + batch.edge_index.shape[1] * 24
        for _ in range(3) for batch in made.loader
    ]  # fmt: skip
    assert found.batches.largest_drawn <= max(sizes) <= found.batches.bound_bytes
    assert found.batches.likely_bytes == pytest.approx(max(sizes), rel=0.05)
    assert found.needed_bytes == found.reserved_bytes + found.late_bytes + found.more_bytes > found.reserved_bytes
    assert "the largest of 470 batches" in found.table()


def test_where_steps_are_not_alike_there_is_room_for_what_many_may_reserve():
    def unlike(**arguments):
        made, steps = job(**arguments), []

        def loss(model, batch):
            steps.append(batch.batch_size)
            out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
            for _ in steps:  # each step has one more
                out = out.relu()
            return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

        return TrainingJob(model=made.model, optimizer=made.optimizer, loss=loss, loader=made.loader)

    alike, other = (trace_job(each, {"place": "device"}, DEVICE, 2) for each in (job, unlike))
    assert alike.many is not None and alike.memory.replayed_steps == 470 and alike.memory.unreplayed_bytes == 0
    assert other.many is None and other.memory.replayed_steps == 0
    assert other.memory.unreplayed_bytes == other.memory.reserved_bytes // 3
    assert other.memory.needed_bytes > 4 / 3 * other.memory.reserved_bytes
    assert "steps are not alike" in other.memory.table() and "steps are not alike" not in alike.memory.table()
    least = other.memory.allocated_bytes + other.memory.more_bytes
    assert not other.fits(least + other.memory.unreplayed_bytes // 2) and other.fits(other.memory.needed_bytes)


@pytest.mark.long
def test_a_batch_size_is_fitted_with_the_largest_batch_in_mind():
    capacity = 6 << 20
    found = fit_argument(job, "batch_size", {"place": "device", "batch_size": 1024}, DEVICE, capacity)
    assert found.memory.allocated_bytes + found.memory.more_bytes <= capacity
    too_large = {"place": "device", "batch_size": found.too_large}
    assert not trace_job(job, too_large, DEVICE, 2, fit.DRAWN, fit.FIT_STEPS).fits(capacity)
