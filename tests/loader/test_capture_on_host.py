"""gnnsys.cuda.capture where there is no GPU: which step is captured when, with graphs that call the step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.cuda import CaptureCounts, CapturedStep, capture
from gnnsys.cuda.captured_step import StepGraph, detached, promise_for_replays, size_of
from gnnsys.loader import Batch
from gnnsys.nn import GAT, GCN, GIN, GraphSAGE
from gnnsys.ops import BY_DESTINATION, STRUCTURES, ReplayedEdges
from tests.support.capture import ONE_SIZE, SIZES, graph, loader_of, seeded, step_of


class FakeStream:
    """Records a step by remembering it: replays run it on the buffers."""

    def __init__(self) -> None:
        self.recorded: list[Batch] = []

    def run(self, step: Callable[[Batch], Any], batch: Batch) -> Any:
        return detached(step(batch))

    def record(self, step: Callable[[Batch], Any], batch: Batch) -> StepGraph:
        buffers = batch.apply(torch.zeros_like)
        self.recorded.append(buffers)
        kept = detached(step(batch.apply(Tensor.clone))) * 0

        def replay() -> None:
            kept.copy_(step(buffers))

        return StepGraph(list(buffers.tensors()), kept, replay)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """Makes batches on the host look as if they could be captured."""
    made = FakeStream()
    monkeypatch.setattr(CapturedStep, "_stream", lambda self, batch: made)
    monkeypatch.setattr("gnnsys.cuda.captured_step._is_capturable", lambda batch: True)
    return made


def checksum(batch: Batch) -> Tensor:
    """Depends on all that a batch has."""
    total = torch.zeros((), dtype=torch.float64)
    for number, tensor in enumerate(batch.tensors()):
        total = total + (number + 1) * tensor.double().sum()
    return total + batch.batch_size


def test_every_batch_gives_what_the_step_gives(fake: FakeStream) -> None:
    train = capture(checksum)
    loader, plain = loader_of(graph(), num_threads=0), loader_of(graph(), num_threads=0)
    kept = []
    for _ in range(3):
        for batch, same in zip(loader, plain, strict=True):
            kept.append((train(batch), checksum(same)))
    assert all(torch.equal(ours, expected) for ours, expected in kept)  # also those of long ago
    assert train.counts.graphs == len(fake.recorded) <= 3
    assert train.counts.replayed > train.counts.eager and sum(train.counts[1:]) == 3 * len(loader)


def test_the_first_batch_of_a_size_runs_as_written_and_no_batch_runs_twice(fake: FakeStream) -> None:
    batches = list(loader_of(graph(), num_threads=0, drop_last=True, pad=ONE_SIZE))
    assert len({size_of(batch) for batch in batches}) == 1
    train = capture(checksum)
    assert [train(batch) is not None and train.counts for batch in batches[:3]] == [
        CaptureCounts(0, 0, 1),
        CaptureCounts(1, 1, 1),
        CaptureCounts(1, 2, 1),
    ]
    train.close()
    assert train.counts.graphs == 0
    assert torch.equal(train(batches[0]), checksum(batches[0])) and train.counts.eager == 2


def test_there_are_no_more_graphs_than_allowed(fake: FakeStream) -> None:
    train = capture(checksum, max_graphs=1)
    loader = loader_of(graph(), num_threads=0, pad=SIZES)
    sizes = {size_of(batch) for batch in loader}
    assert len(sizes) > 1
    for _ in range(3):
        for batch in loader:
            assert torch.equal(train(batch), checksum(batch))
    assert train.counts.graphs == 1 and train.counts.eager > 0


def test_what_python_sees_of_a_batch_is_part_of_its_size() -> None:
    batch = next(iter(loader_of(graph(), num_threads=0)))
    same = batch.apply(torch.zeros_like)
    assert size_of(same) == size_of(batch) and hash(size_of(batch))
    for change in (
        lambda b: setattr(b, "batch_size", b.batch_size - 1),
        lambda b: setattr(b, "num_sampled_nodes", [1, *b.num_sampled_nodes[1:]]),
        lambda b: setattr(b, "x", b.x.double()),
        lambda b: setattr(b, "x", b.x[:, :3]),
        lambda b: setattr(b, "temperature", 0.5),
        lambda b: setattr(b, "own", {"rows": torch.zeros(3)}),
    ):
        other = batch.apply(Tensor.clone)
        change(other)
        assert size_of(other) != size_of(batch)


def test_batches_without_padding_are_told_of(fake: FakeStream) -> None:
    train = capture(checksum)
    loader = loader_of(graph(), num_threads=0, pad=False, batch_size=32)
    with pytest.warns(UserWarning, match="64 batches of as many sizes.*pad=True"):
        for batch in loader:
            train(batch)
    assert train.counts.graphs == 0


def test_on_the_host_the_step_is_called() -> None:
    model, other = seeded(), seeded()
    train = capture(step_of(model, torch.optim.Adam(model.parameters())))
    step = step_of(other, torch.optim.Adam(other.parameters()))
    for batch in loader_of(graph(), num_threads=0):
        loss = train(batch)
        assert torch.equal(loss, step(batch)) and not loss.requires_grad
    assert train.counts == CaptureCounts(0, 0, 12) and "12 as written" in repr(train)


@pytest.mark.parametrize(
    ("step", "options", "text"),
    [(3, {}, "step must be a function"), (checksum, {"max_graphs": -1}, "max_graphs must be a whole number >= 0")],
)
def test_bad_arguments_are_refused(step: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        capture(step, **options)


# -- structures in a capture -----------------------------------------------------------------------------------------


@pytest.fixture
def as_if_captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, everything looks as if it were captured into a graph."""

    def begin() -> None:
        for module in ("gnnsys.ops.csc", "gnnsys.ops.memo", "gnnsys.nn.layer_inputs"):
            monkeypatch.setattr(f"{module}.is_captured", lambda *tensors: True)

    return begin


def promised(batch: Batch) -> tuple[Batch, list[ReplayedEdges]]:
    """Buffers as they are captured on, of a batch whose edges are known as they are on a device."""
    within = list(accumulate(batch.num_sampled_nodes))
    ends = dict(zip(within, accumulate([*batch.num_sampled_edges, 0]), strict=True))
    STRUCTURES.put((within[-1], within[-1], ends), batch.edge_index, key=BY_DESTINATION)
    buffers = batch.apply(Tensor.clone)
    return buffers, promise_for_replays(batch, buffers)


@pytest.mark.parametrize("kind", [GraphSAGE, GIN])
@pytest.mark.parametrize("trim", [True, False])
def test_layers_make_the_structure_of_promised_edges_in_the_capture(
    kind: type, trim: bool, as_if_captured: Callable[[], None]
) -> None:
    model = seeded(kind)
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.0), trim)
    batch = next(iter(loader_of(graph(), num_threads=0)))
    expected = step(batch).detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    buffers, promises = promised(batch)
    as_if_captured()
    assert torch.equal(step(buffers).detach(), expected)
    for ours, theirs in zip(model.parameters(), gradients, strict=True):
        assert ours.grad is not theirs and torch.equal(ours.grad, theirs)
    made = promises[0].csc(buffers.edge_index, buffers.num_nodes, buffers.num_nodes)
    assert promises[0].csc(buffers.edge_index, buffers.num_nodes, buffers.num_nodes) is made  # once for all layers
    promises[0].forget()
    assert promises[0].csc(buffers.edge_index, buffers.num_nodes, buffers.num_nodes) is not made
    with pytest.raises(ValueError, match="edge_index leads from"):
        promises[0].csc(buffers.edge_index, 3, 3)


@pytest.mark.parametrize("kind", [GCN, GAT])
def test_layers_that_look_at_edges_refuse_to_be_captured(kind: type, as_if_captured: Callable[[], None]) -> None:
    model = seeded(kind)
    batch = next(iter(loader_of(graph(), num_threads=0)))
    buffers, _ = promised(batch)
    as_if_captured()
    with pytest.raises(RuntimeError, match="cannot be made while a CUDA graph is captured"):
        model(buffers.x, buffers.edge_index)


def test_edges_without_a_promise_are_not_captured(as_if_captured: Callable[[], None]) -> None:
    batch = next(iter(loader_of(graph(), num_threads=0)))
    as_if_captured()
    with pytest.raises(RuntimeError, match="cannot be made while a CUDA graph is captured"):
        seeded()(batch.x, batch.edge_index)
