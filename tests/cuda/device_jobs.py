"""Jobs that tests of a queue on a GPU submit: some that train, and some that go wrong."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.graph import sbm
from gnnsys.jobs import shared_graph
from gnnsys.planning import TrainingJob

NAME = "tests.cuda.device_jobs"
_HELD_AT = 4  # steps: a checkpoint has been written by then
_SECONDS = 120.0


def steady(at: str, kind: str = "loader", hidden: int = 16, device: str = "cpu") -> TrainingJob:
    """GraphSAGE on batches of a shared graph, or GCN on all of it, with dropout. After some steps it keeps the device
    busy until the file `at` is there."""
    graph = shared_graph(sbm, {"num_nodes": 3000, "seed": 1}, device=device)
    x, y = (graph.node_data["node"][name] for name in ("x", "y"))
    steps = [0]

    def hold() -> None:
        steps[0] += 1
        if steps[0] == _HELD_AT + 1:
            Path(f"{at}.{kind}").touch()
            busy, deadline = torch.ones(256, 256, device=device), time.monotonic() + _SECONDS
            while not Path(at).exists():
                assert time.monotonic() < deadline, f"nobody makes {at}"
                (busy @ busy).sum().item()

    def of_batch(model: Any, batch: Any) -> torch.Tensor:
        hold()
        return F.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])

    def of_whole(model: Any, given: Any) -> torch.Tensor:
        hold()
        return F.cross_entropy(model(given.x, given.edge_index), y)

    width, classes = x.shape[1], int(y.max()) + 1
    if kind == "loader":
        model: Any = gnnsys.nn.GraphSAGE(width, hidden, 2, classes, dropout=0.2).to(device)
        loader = gnnsys.NeighborLoader(
            graph, [5, 4], input_nodes=torch.arange(640), batch_size=64, shuffle=True, device=device
        )
        return _made(model, of_batch, loader=loader, epochs=2)
    model = gnnsys.nn.GCN(width, hidden, 2, classes, dropout=0.2).to(device)
    return _made(model, of_whole, rows=x, edge_index=graph.edge_index(), epochs=20)


def _made(model: torch.nn.Module, loss: Any, **data: Any) -> TrainingJob:
    return TrainingJob(model=model, optimizer=torch.optim.Adam(model.parameters()), loss=loss, **data)


def _stepping(do: Any, device: str, epochs: int) -> TrainingJob:
    model = torch.nn.Linear(4, 2).to(device)
    rows = torch.ones(8, 4, device=device)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        do()
        return model(batch).square().mean()

    return _made(model, loss, loader=[rows], epochs=epochs)


def takes(num_bytes: int, device: str = "cpu") -> TrainingJob:
    """So much of the device in each step."""
    return _stepping(lambda: torch.ones(num_bytes, dtype=torch.uint8, device=device), device, 2)


def raises(device: str = "cpu") -> TrainingJob:
    def fail() -> None:
        raise RuntimeError("as it was asked to")

    return _stepping(fail, device, 2)


def goes_on(at: str, device: str = "cpu") -> TrainingJob:
    """Steps until it is cancelled or killed; a second attempt ends at once. Says that it runs by the file `at`."""
    ran_before = Path(at).exists()

    def step() -> None:
        Path(at).touch()
        torch.cuda.synchronize()

    return _stepping(step, device, 1 if ran_before else 10_000_000)


def reads_freed_memory(after: list[str], device: str = "cpu") -> TrainingJob:
    """An illegal address, once all of these files are there."""
    from gnnsys.jobs.cuda_memory import BlockPiece, CudaDevice

    def fail() -> None:
        deadline = time.monotonic() + _SECONDS
        while not all(Path(at).exists() for at in after):
            assert time.monotonic() < deadline, "the others do not come"
            time.sleep(0.005)
        driver = CudaDevice(0)
        address = driver.allocate(64 << 20)
        driver.free(address)

        freed = torch.as_tensor(BlockPiece(SimpleNamespace(address=address), 0, 64 << 20), device=device)
        print(freed.sum().item())

    return _stepping(fail, device, 2)
