"""Captured training steps have the losses of the step as written, while loading threads load."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnnsys.cuda import capture
from gnnsys.loader import Batch
from gnnsys.nn import GAT, GCN, GIN
from tests.cuda.places import same_batch
from tests.support.capture import ONE_SIZE, SIZES, graph, loader_of, seeded, step_of
from tests.support.docs import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "sage": (lambda: seeded(), True),
    "sage, sum": (lambda: seeded(aggr="sum"), True),
    "sage, max": (lambda: seeded(aggr="max"), True),
    "sage, whole batch": (lambda: seeded(), False),
    "gin": (lambda: seeded(GIN), True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["device", "pinned", "host"])
def test_captured_steps_have_the_losses_of_the_step_as_written(name: str, place: str) -> None:
    """Over fifty steps of several sizes, last batches too, while loading threads load."""
    make, trim = MODELS[name]
    placed = {"device": lambda: graph().to("cuda"), "pinned": graph().pin_memory, "host": graph}[place]()
    model = make().cuda()
    other = copy.deepcopy(model)
    train, step = capture(step_of(model, adam(model), trim), max_graphs=64), step_of(other, adam(other), trim)
    loader = loader_of(placed, pad=SIZES, device="cuda", num_threads=2)
    losses: list[tuple[Tensor, Tensor]] = []
    while len(losses) < 60:
        losses += [(train(batch), step(batch).detach()) for batch in loader]
    loader.close()
    ours, expected = (torch.stack(each).cpu() for each in zip(*losses, strict=True))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert ours[-5:].mean() < ours[:5].mean()  # it trains
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    assert train.counts.graphs > 1 and train.counts.replayed > train.counts.eager


def test_a_replay_does_not_wait_for_the_device() -> None:
    model = seeded().cuda()
    train = capture(step_of(model, adam(model)))
    loader = loader_of(graph().to("cuda"), num_threads=1, drop_last=True, pad=ONE_SIZE)
    batches = [batch for _ in range(2) for batch in loader]
    loader.close()
    for batch in batches:
        train(batch)
    replayed = train.counts.replayed
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[-4:]:
            train(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert train.counts.replayed == replayed + 4


def test_a_replay_has_the_edges_of_its_own_batch() -> None:
    """One model and no training: two batches of one size have different losses, each its own."""
    model = seeded().cuda()

    def step(batch: Batch) -> dict[str, Tensor]:
        batch.twice = 2 * batch.x  # a batch that the step writes to
        out = model(batch.twice, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
        return {"out": out[: batch.batch_size]}

    train = capture(step, max_graphs=64)
    loader = loader_of(graph().to("cuda"), drop_last=True)
    for _ in range(3):
        for batch in loader:
            ours, expected = train(batch)["out"], step(batch)["out"]
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-5)
    assert train.counts.replayed > 20
    loader.close()


def test_memory_does_not_grow_with_steps_and_is_given_back() -> None:
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MB for each stream that multiplies, kept by torch for good
    before = torch.cuda.memory_allocated()
    model = seeded().cuda()
    train = capture(step_of(model, adam(model)), max_graphs=4)
    loader = loader_of(graph().to("cuda"), pad=SIZES)

    def epochs(count: int) -> int:
        for _ in range(count):
            for batch in loader:
                train(batch)
        del batch
        loader.close()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    warm = epochs(6)
    assert train.counts.graphs <= 4
    assert epochs(6) <= warm + (4 << 20)
    train.close()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < warm and torch.cuda.memory_allocated() <= before + (64 << 20)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (GCN, {}, "cannot be captured"),
        (GAT, {}, "cannot be captured"),
        (GAT, {"attention_dropout": 0.5}, "cannot be captured"),
    ],
)
def test_models_that_cannot_be_captured_say_so_and_go_on_as_written(kind: type, options: Any, text: str) -> None:
    model = seeded(kind, **options).cuda()
    step = step_of(model, adam(model), trim=False)
    train = capture(step)
    loader = loader_of(graph().to("cuda"), drop_last=True, pad=ONE_SIZE)
    first, second, *_ = loader
    train(first)
    with pytest.raises(ValueError, match=text):
        train(second)
    assert step(second).isfinite()
    loader.close()


WAITS = """
import torch
from gnnsys.cuda import capture
from tests.support.capture import ONE_SIZE, graph, loader_of, seeded, step_of

model = seeded().cuda()
step = step_of(model, torch.optim.Adam(model.parameters(), capturable=True))
train = capture(lambda batch: step(batch).item())
first, second, *_ = loader_of(graph().to("cuda"), drop_last=True, pad=ONE_SIZE, num_threads=0)
train(first)
current = torch.cuda.current_stream()
try:
    train(second)
except ValueError as error:
    assert torch.cuda.current_stream() == current
    print(error)
"""


def test_a_step_that_waits_says_so() -> None:
    """In a process of its own: a capture that CUDA itself has ended may leave torch's allocator as if it went on."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "must not wait for the device" in done.stdout, done.stderr


def test_an_optimizer_that_cannot_be_captured_says_so() -> None:
    model = seeded().cuda()
    train = capture(step_of(model, torch.optim.Adam(model.parameters())))
    loader = loader_of(graph().to("cuda"), drop_last=True, pad=ONE_SIZE)
    first, second, *_ = loader
    train(first)
    with pytest.raises(ValueError, match="capturable=True"):
        train(second)
    loader.close()


@pytest.mark.parametrize("place", ["device", "pinned", "host"])
def test_padded_batches_are_those_of_the_host(place: str) -> None:
    made = graph()
    placed = {"device": lambda: made.to("cuda"), "pinned": made.pin_memory, "host": lambda: made}[place]()
    there = loader_of(placed, device="cuda", num_threads=2)
    for a, b in zip(there, loader_of(made, num_threads=0), strict=True):
        same_batch(a, b)
    there.close()
