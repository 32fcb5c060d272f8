"""Runs a function job to its end: the training loop, its checkpoints, its losses, its results.

What it does depends on the job's spec alone, and on the number of threads: so a job that runs in a warm worker, beside
others, or after a kill from its checkpoint, gives the same bits as one that runs alone in a fresh process.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gnnsys.jobs.job_spec import MOST_RESULT_BYTES, SEED, JobSpec, check_json
from gnnsys.jobs.queue_folder import NO_ROOM, write_whole

if TYPE_CHECKING:
    from gnnsys.checkpoint import Saver
    from gnnsys.planning import TrainingJob

_ROOM_SECONDS = 1.0  # between two tries to write to a full disk
_MORE_BYTES = 1 << 16  # of a file of weights, beside these
_FETCH_STEPS = 64  # losses are read back from a device so many at a time


class JobCancelled(Exception):
    """Raised in a job's loop, between two steps, when it is to end."""


@dataclass(kw_only=True)
class JobFiles:
    """Where a job leaves things; nowhere where it is run for its result alone."""

    results: Path | None = None
    checkpoints: Path | None = None


@dataclass
class TrainingProgress:
    """How far a job is: part of its checkpoints, so that a resumed one has all losses."""

    epochs: int = 0
    losses: list[float] = field(default_factory=list)
    _pending: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor) -> None:
        self._pending.append(loss.detach())
        if len(self._pending) == _FETCH_STEPS:
            self.fetch()

    def fetch(self) -> None:
        if self._pending:
            self.losses += torch.stack([loss.reshape(()) for loss in self._pending]).double().tolist()
            self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        self.fetch()
        return {"epochs": self.epochs, "losses": torch.tensor(self.losses, dtype=torch.float64, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs, self.losses = int(state["epochs"]), state["losses"].tolist()


def run_alone(
    target: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    on_step: Callable[[int], None] = lambda steps: None,
) -> dict[str, Any]:
    """Runs a job in this process, as a queue would, and returns its result: what the queue's are compared with.
    `on_step(steps)` is called after each step."""
    from gnnsys.jobs.job_spec import make_spec

    return train(make_spec(target, arguments, seed=seed), device, on_step=on_step)


def make_training_job(spec: JobSpec, device: str) -> TrainingJob:
    """Calls the job's function. Generators begin with the job's seed, and a parameter `seed` is given it."""
    from gnnsys.planning import find_job, make_job

    seed_all(spec.seed)
    function = find_job(spec.target)
    arguments = dict(spec.arguments)
    if SEED in inspect.signature(function).parameters:
        arguments.setdefault(SEED, spec.seed)
    return make_job(function, arguments, device)


def train(
    spec: JobSpec,
    device: str = "cpu",
    files: JobFiles | None = None,
    on_step: Callable[[int], None] = lambda steps: None,
    on_wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The result of a job. `on_step(steps)` is called after each step, and `on_wait()` now and then while there is no
    room for what was trained; what they raise ends the job."""
    job, files = make_training_job(spec, device), files or JobFiles()
    progress, saver = TrainingProgress(), None
    if files.checkpoints is not None and spec.saves:
        saver = _resume(spec, job, progress, files.checkpoints)
    with saver or nullcontext():
        for steps in _steps(spec, job, progress, saver):
            on_step(steps)
        progress.fetch()
        if files.results is not None:  # first: what was trained is kept whatever `evaluate` does
            _write_once_there_is_room(spec, job, progress, files.results, on_wait)
        result = _result(job, progress)
        if saver is not None:
            with _left_out_where_full():
                saver.wait()
    return result


def seed_all(seed: int) -> None:
    import random

    import numpy as np

    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def has_state(loader: Any) -> bool:
    """Whether a loader can go on in the middle of an epoch. Without one checkpoints are written between epochs."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _steps(spec: JobSpec, job: TrainingJob, progress: TrainingProgress, saver: Saver | None) -> Iterator[int]:
    saved, steps = time.monotonic(), len(progress.losses)

    def is_due() -> bool:
        if saver is None:
            return False
        by_steps = spec.checkpoint_steps is not None and steps % spec.checkpoint_steps == 0
        return by_steps or (spec.checkpoint_seconds is not None and time.monotonic() - saved >= spec.checkpoint_seconds)

    within = has_state(job.loader)
    is_waiting = False  # a checkpoint is due at the end of this epoch
    while progress.epochs < job.epochs:
        num_before = steps
        for batch in job.epoch():
            progress.add(job.step(batch))
            steps += 1
            if saver is not None:
                saver.step()
            is_waiting = is_waiting or is_due()
            if is_waiting and within and saver is not None:
                with _left_out_where_full():
                    saver.save()
                is_waiting, saved = False, time.monotonic()
            yield steps
        if steps == 0 and num_before == 0:
            raise ValueError("loader has no batches: give it more input nodes, or a smaller batch size")
        progress.epochs += 1
        if job.scheduler is not None:
            job.scheduler.step()
        if is_waiting and not within and saver is not None:
            with _left_out_where_full():
                saver.save()
            is_waiting, saved = False, time.monotonic()


@contextmanager
def _left_out_where_full() -> Iterator[None]:
    """A checkpoint that a full disk has no room for is left out, which the saver says in the log; the job goes on."""
    try:
        yield
    except ValueError as error:
        if not any(os.strerror(code) in str(error) for code in NO_ROOM):
            raise


def _resume(spec: JobSpec, job: TrainingJob, progress: TrainingProgress, folder: Path) -> Saver:
    from gnnsys.checkpoint import resume

    states: dict[str, Any] = {"model": job.model, "optimizer": job.optimizer, "progress": progress}
    if job.scheduler is not None:
        states["scheduler"] = job.scheduler
    if has_state(job.loader):
        states["loader"] = job.loader
    return resume(folder, **states)


def _result(job: TrainingJob, progress: TrainingProgress) -> dict[str, Any]:
    result: dict[str, Any] = {"steps": len(progress.losses), "loss": _number(progress.losses[-1])}
    result["weights"] = weights_digest(job.model.state_dict())
    if job.evaluate is not None:
        was_training = job.model.training
        job.model.eval()
        with torch.no_grad():
            told = job.evaluate(job.model)
        job.model.train(was_training)
        if not isinstance(told, Mapping):
            raise ValueError(f"evaluate returned {type(told).__name__}: it must return a dict of results by name")
        for name, value in told.items():
            if getattr(value, "ndim", None) == 0 or (isinstance(value, Tensor) and value.numel() == 1):
                value = value.item()  # of torch or numpy
            value = _number(value)
            check_json(f"result {name}", value)
            result[str(name)] = value
        if (size := len(json.dumps(result))) > MOST_RESULT_BYTES:
            raise ValueError(
                f"the results of evaluate are {size} bytes of JSON, at most {MOST_RESULT_BYTES}: write a file"
            )
    return result


def _number(value: Any) -> Any:
    """A loss that is no number is a result too, which JSON has as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def weights_digest(state: Mapping[str, Any]) -> str:
    """SHA-256 of a state's names, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in state.items():
        if isinstance(value, Tensor):
            here = value.detach().cpu().contiguous()
            digest.update(f"{name} {here.dtype} {list(here.shape)}\n".encode())
            digest.update(here.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()


def _write_once_there_is_room(
    spec: JobSpec, job: TrainingJob, progress: TrainingProgress, folder: Path, on_wait: Callable[[], None]
) -> None:
    is_told = False
    while True:
        try:
            return _write(spec, job, progress, folder)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not is_told:
                print(f"the job has ended and waits for room for its results: {error}", file=sys.stderr)
            is_told = True
        on_wait()
        time.sleep(_ROOM_SECONDS)


def _write(spec: JobSpec, job: TrainingJob, progress: TrainingProgress, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(folder / "losses.json", json.dumps([_number(loss) for loss in progress.losses]))
    if spec.keeps_weights:
        half = folder / ".model.pt.half"
        state = {name: value.cpu() if isinstance(value, Tensor) else value
                 for name, value in job.model.state_dict().items()}  # fmt: skip
        try:
            torch.save(state, half)
            half.replace(folder / "model.pt")
        except RuntimeError:  # torch does not say why a file cannot be written
            _check_room(half, sum(value.nbytes for value in state.values() if isinstance(value, Tensor)))
            raise
        finally:
            half.unlink(missing_ok=True)


def _check_room(file: Path, num_bytes: int) -> None:
    """OSError where the disk has no room for such a file."""
    with open(file, "wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, num_bytes + _MORE_BYTES)
