"""Jobs that tests of the queue submit: small, and different in what they do to their process."""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.graph import sbm
from gnnsys.planning import TrainingJob

FOLDER = Path(__file__).resolve().parents[2]
NAME = "tests.jobs.queue_jobs"
COUNT: list[int] = []  # a module of a user may keep what it likes: each job has its own


def job(
    hidden: int = 8, lr: float = 0.01, epochs: int = 6, kind: str = "whole", seed: int = 0, device: str = "cpu"
) -> TrainingJob:
    """GCN on a whole graph, GraphSAGE with our loader, or an MLP with a shuffling loader of torch. All draw."""
    COUNT.append(1)
    assert len(COUNT) == 1, "the module of another job"
    generator = torch.Generator().manual_seed(7)
    x, y = torch.rand(60, 6, generator=generator), torch.randint(3, (60,), generator=generator)
    noise = float(np.random.rand() + random.random())
    if kind == "loader":
        graph = sbm(300, seed=1)
        features = graph.node_data["node"]["x"]
        model: Any = gnnsys.nn.GraphSAGE(features.shape[1], hidden, 2, 16, dropout=0.1)
        loader: Any = gnnsys.NeighborLoader(graph, [3, 3], input_nodes=torch.arange(60), batch_size=10, shuffle=True)

        def loss(model: Any, batch: Any) -> Any:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            return F.cross_entropy(out, batch.y[: batch.batch_size]) * (1 + noise)

        return _made(model, lr, epochs, loss, loader=loader)
    if kind == "torch":
        model = torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.Dropout(0.2), torch.nn.Linear(hidden, 3))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True)
        return _made(model, lr, epochs, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), loader=loader)
    edges = torch.randint(60, (2, 240), generator=generator)
    model = gnnsys.nn.GCN(6, hidden, 2, 3, dropout=0.2)
    print(f"hidden {hidden}, seed {seed}")
    return _made(
        model,
        lr,
        epochs,
        lambda model, graph: F.cross_entropy(model(*graph), y) * (1 + noise),
        rows=x,
        edge_index=edges,
    )


def _made(model: Any, lr: float, epochs: int, loss: Any, **data: Any) -> TrainingJob:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    first = next(model.parameters())
    return TrainingJob(
        model=model, optimizer=optimizer, loss=loss, epochs=epochs, scheduler=scheduler, **data,
        evaluate=lambda model: {"norm": first.norm(), "is_training": model.training},
    )  # fmt: skip


def imports_library() -> TrainingJob:
    """Tells whether the collector of garbage looks through what the library keeps."""
    import mailbox

    return linear(evaluate=lambda model: {"looks": any(each is vars(mailbox) for each in gc.get_objects())})


def tells_file(at: str) -> TrainingJob:
    there = Path(at).exists()
    return linear(evaluate=lambda model: {"there": there})


def changes_settings() -> TrainingJob:
    gc.disable()
    gc.set_threshold(1, 1, 1)
    torch.set_autocast_dtype("cpu", torch.float16)
    sys.modules["wave"] = sys.modules["csv"] = None  # type: ignore[assignment]
    sys.modules[5] = gc  # type: ignore[index]
    return linear()


def tells_settings() -> TrainingJob:
    told = {
        "collects": gc.isenabled(),
        "threshold": list(gc.get_threshold()),
        "half": str(torch.get_autocast_dtype("cpu")),
        "library": importlib.import_module("wave").__name__,
        "other": importlib.import_module("csv").__name__,
    }
    return linear(evaluate=lambda model: told)


def linear(
    epochs: int = 1, after: Any = None, num_rows: int = 8, batch_size: int = 8, evaluate: Any = None
) -> TrainingJob:
    """A tiny job; `after(step)` is called inside its loss."""
    model, steps = torch.nn.Linear(4, 2), [0]

    def loss(model: Any, batch: Any) -> Any:
        steps[0] += 1
        if after is not None and isinstance(batch, torch.Tensor) and type(batch) is torch.Tensor:
            after(steps[0])
        return model(batch).square().mean()

    rows = torch.ones(num_rows, 4)
    loader = [rows[at : at + batch_size] for at in range(0, num_rows, batch_size)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingJob(
        model=model, optimizer=optimizer, loss=loss, loader=loader, epochs=epochs, evaluate=evaluate
    )  # fmt: skip


def rows(num_rows: int, batch_size: int) -> TrainingJob:
    """Batches that are made one by one, so that memory grows with their size."""
    model = torch.nn.Linear(4, 2)
    loader = torch.utils.data.DataLoader(torch.empty(num_rows, 4).expand(num_rows, 4), batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingJob(
        model=model, optimizer=optimizer, loader=loader, loss=lambda model, batch: model(batch).square().mean()
    )


def raises() -> TrainingJob:
    raise RuntimeError("as it was asked to")


def returns_nonsense() -> Any:
    return {"model": 3}


def spoils(epochs: int = 2) -> TrainingJob:
    """Changes whatever the next job in this process could see."""
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(3)
    os.environ["SPOILED"] = "1"
    os.chdir("/")
    raise SystemExit(3)


def exits() -> TrainingJob:
    raise SystemExit(3)


def dies(number: int = 9, at: str = "") -> TrainingJob:
    """Its process is killed in the first attempt; `at` is a file that says so to the second."""

    def after(step: int) -> None:
        if not Path(at).exists():
            Path(at).touch()
            os.kill(os.getpid(), number)

    return linear(after=after)


def ends_process(code: int = 3, at: str = "") -> TrainingJob:
    """At once, without a word; a process that it leaves holds its pipes open and writes its number to `at`."""
    if at and os.fork() == 0:
        Path(at).write_text(str(os.getpid()))
        time.sleep(600)
        os._exit(0)
    while at and not Path(at).exists():
        time.sleep(0.005)
    os._exit(code)


def crashes() -> TrainingJob:
    print("about to crash")
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def takes(num_bytes: int, more: int = 0) -> TrainingJob:
    """Takes more in its steps than a trace sees: tensors that no operator of torch makes."""

    def after(step: int) -> None:
        held = torch.from_numpy(np.ones(num_bytes + more, np.uint8))
        assert held[-1] == 1

    return linear(after=after)


def waits(at: str, seconds: float = 60.0) -> TrainingJob:
    """Steps until the file `at` is there."""

    def after(step: int) -> None:
        Path(f"{at}.begun").touch()
        deadline = time.monotonic() + 0.05
        while not Path(at).exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    return linear(epochs=int(seconds / 0.05), after=after)


def leaves_thread() -> TrainingJob:
    threading.Thread(target=lambda: time.sleep(600), name="left-behind", daemon=True).start()
    return linear()


def is_never_made(at: str) -> TrainingJob:
    """Whoever calls it waits: a data set that does not come."""
    Path(at).touch()
    time.sleep(3600)
    raise AssertionError("an hour")


def evaluates(kind: str) -> TrainingJob:
    """Its `evaluate` returns what numpy has, or fails when all is trained."""
    made = linear()

    def evaluate(model: torch.nn.Module) -> dict[str, Any]:
        if kind == "raises":
            raise RuntimeError("evaluate was asked to")
        return {"score": np.float32(0.5), "count": np.int64(3), "array": torch.tensor([2.0])}

    return replace(made, evaluate=evaluate)


def meets(at: str, number: int, count: int, num_rows: int = 8) -> TrainingJob:
    """Waits until so many of its kind have been called: all of them at the same time, the first time."""
    (Path(at) / f"{number}.met").touch()
    deadline = time.monotonic() + 60.0
    while len(list(Path(at).glob("*.met"))) < count:
        assert time.monotonic() < deadline, "the others do not come"
        time.sleep(0.005)
    return rows(num_rows, num_rows)


def notes_calls(at: str, seed: int = 0, other: int = 0) -> TrainingJob:
    """Writes a line per call to the file `at`: an estimate is a call."""
    with open(at, "a") as file:
        file.write(f"{seed} {other}\n")
    return linear()


def escapes(at: str) -> TrainingJob:
    """Leaves a process that has left the group of its worker, and holds the worker's pipe open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(at).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not Path(at).exists() or not Path(at).read_text():
        time.sleep(0.005)
    return linear()


def interrupts() -> TrainingJob:
    raise KeyboardInterrupt("of its own")


def closes_its_output() -> TrainingJob:
    sys.stdout.close()
    return linear()


def writes_to_all_pipes() -> TrainingJob:
    for number in range(3, 40):
        try:
            os.write(number, b'{bad\n{"x": 1}\n{"did": "step"}\n')
        except OSError:
            continue
    return linear()


def says_odd_things() -> TrainingJob:
    raise RuntimeError("half a \ud800 character")


def boasts() -> TrainingJob:
    return replace(linear(), evaluate=lambda model: {"text": "x" * (2 << 20)})


def forges(at: str) -> TrainingJob:
    """Writes to the pipe of its worker, the first time, what other answers look like."""
    answers = (
        '{"did": "ready"}',
        '{"did": "estimate", "number": 1, "found": {}, "refusal": ""}',
        '{"did": "end", "job": [1, 1], "outcome": "done"}',
        '{"did": "step", "job": [1, 1]}',
    )
    if not Path(at).exists():
        Path(at).touch()
        for number in range(3, 40):
            try:
                os.write(number, ("\n".join(answers) + "\n").encode())
            except OSError:
                continue
        signal.pause()  # until it is killed for that
    return linear()


def sets_alarm() -> TrainingJob:
    signal.signal(signal.SIGALRM, lambda number, frame: sys.exit("an alarm of another job"))
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    os.umask(0o777)
    return linear()


def tells_alarm() -> TrainingJob:
    def evaluate(model: torch.nn.Module) -> dict[str, Any]:
        mask = os.umask(0o777)
        os.umask(mask)
        handler = signal.getsignal(signal.SIGALRM)
        return {"alarm": signal.getitimer(signal.ITIMER_REAL)[0], "mask": mask, "handler": handler is signal.SIG_DFL}

    return linear(evaluate=evaluate)


def sets_clock(at: str) -> TrainingJob:
    """The clock of its process is set an hour ahead at every look, until the file `at` is there."""
    real, looks = time.time, [0]

    def ahead() -> float:
        looks[0] += 1
        return real() + 3600.0 * looks[0]

    time.time = ahead
    return waits(at)
