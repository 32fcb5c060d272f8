"""What a training job is to the estimate: a function that returns a model, its data, its optimizer and its loss.

The step is written here once. The estimate traces it, and whoever compares runs the same one for real.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnsys.graph import did_you_mean
from gnnsys.planning.memory.ledger import StepPhase

_SHAPE = "TrainingJob(model=, optimizer=, loss=, loader= or rows= and edge_index=), or a dict with these keys"
_JSON = (str, int, float, bool, type(None))


class WholeGraph(NamedTuple):
    """The one batch of a job that trains on a whole graph."""

    x: Any
    edge_index: Any


class NoBatches(ValueError):
    """A loader has nothing to train on."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingJob:
    """`loss(model, batch)` is a scalar to go back from. Batches are those of `loader`, or every time the whole graph
    `WholeGraph(rows, edge_index)`. What else a loss needs (labels, a mask) it may hold itself.

    What follows is for who runs the job to its end (docs/jobs.md), and no part of an estimate: `epochs`, each of them
    all batches of the loader or one step on a whole graph; `scheduler`, stepped after each; `evaluate(model)`, called
    at the end for results by name, numbers or text.

    >>> def job(hidden: int, device: str) -> TrainingJob:
    ...     model = gnnsys.nn.GCN(128, hidden, 2, 7).to(device)
    ...     return TrainingJob(model=model, optimizer=torch.optim.Adam(model.parameters()), rows=x, edge_index=edges,
    ...                        loss=lambda model, graph: F.cross_entropy(model(*graph), y))
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    loader: Iterable[Any] | None = None
    rows: Any = None
    edge_index: Any = None
    epochs: int = 1
    scheduler: Any = None
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {_sort(self.model)}")
        if not hasattr(self.optimizer, "step") or not hasattr(self.optimizer, "param_groups"):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {_sort(self.optimizer)}")
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{type(self.optimizer).__name__} computes the loss several times in a step, by a closure, and a job's "
                "step computes it once: choose an optimizer whose step() takes none, such as Adam"
            )
        if not callable(self.loss):
            raise ValueError(f"loss must be a function of (model, batch), got {_sort(self.loss)}")
        if (self.loader is None) == (self.rows is None):
            raise ValueError("a job has either loader= or rows= with edge_index=: give one of the two")
        if self.loader is not None and not isinstance(self.loader, Iterable):
            raise ValueError(f"loader must be iterable, got {_sort(self.loader)}")
        if not isinstance(self.epochs, int) or isinstance(self.epochs, bool) or self.epochs < 1:
            raise ValueError(f"epochs must be a whole number, at least 1, got {self.epochs!r}")
        if self.scheduler is not None and not hasattr(self.scheduler, "step"):
            raise ValueError(f"scheduler must have step(), as those of torch.optim, got {_sort(self.scheduler)}")
        if self.evaluate is not None and not callable(self.evaluate):
            raise ValueError(f"evaluate must be a function of the model, got {_sort(self.evaluate)}")
        _refuse_compiled(self.model)

    def epoch(self) -> Iterator[Any]:
        """The batches of one epoch, or what is left of it where the loader was restored in its middle."""
        if self.loader is None:
            yield WholeGraph(self.rows, self.edge_index)
            return
        for batch in self.loader:
            yield batch
            del batch  # as in `batches`

    def step(self, batch: Any) -> Tensor:
        """One training step; its loss."""
        return _step(self, batch, 0, lambda phase, step, batch: None).detach()

    def batches(self, num_steps: int) -> Iterator[Any]:
        """As many as there are up to `num_steps`; a short loader is begun again."""
        if self.loader is None:
            graph = WholeGraph(self.rows, self.edge_index)
            for _ in range(num_steps):
                yield graph
            return
        left = num_steps
        while left:
            count = 0
            for batch in islice(self.loader, left):
                yield batch
                del batch  # else it would outlive what the caller does with it
                count += 1
            if count == 0:
                raise NoBatches("loader has no batches: give it more input nodes, or a smaller batch size")
            left -= count


def run_steps(
    job: TrainingJob,
    num_steps: int,
    enter: Callable[[StepPhase, int, Any], None] = lambda phase, step, batch: None,
    step_context: Callable[[], Any] | None = None,
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """The training loop that is estimated: gradients are set to None, forward, backward, step.

    A batch is there until the next one has come. `enter` is told where the loop is; `is_enough`, asked before each
    step, ends it.
    """
    for step, batch in enumerate(job.batches(num_steps)):
        if is_enough():
            return
        enter(StepPhase.BATCH, step, batch)
        if step_context is None:
            _step(job, batch, step, enter)
        else:
            with step_context():
                _step(job, batch, step, enter)


def _step(job: TrainingJob, batch: Any, step: int, enter: Callable[[StepPhase, int, Any], None]) -> Tensor:
    enter(StepPhase.FORWARD, step, None)
    job.optimizer.zero_grad()
    loss = job.loss(job.model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"loss(model, batch) must return a tensor of one value, got {_sort(loss)}")
    enter(StepPhase.BACKWARD, step, None)
    loss.backward()  # type: ignore[no-untyped-call]
    enter(StepPhase.OPTIMIZER, step, None)
    job.optimizer.step()
    return loss


class NoSuchJob(ValueError):
    """There is no such module, or no such function in it."""


def find_job(name: str) -> Callable[..., Any]:
    """The function MODULE:FUNCTION; modules beside the current folder are found, as `python -m` finds them."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f"a job is MODULE:FUNCTION, such as train:job, got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        remedy = f": write {module_name[:-3]}:{function_name}" if module_name.endswith(".py") else ""
        raise NoSuchJob(f"there is no module {module_name!r} here ({here}) or on PYTHONPATH{remedy}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = did_you_mean(function_name, (key for key, value in vars(module).items() if callable(value)))
        raise NoSuchJob(f"module {module_name!r} has no function {function_name!r}{near}")
    return function  # type: ignore[no-any-return]


def make_job(function: Callable[..., Any], arguments: Mapping[str, Any], device: str = "cpu") -> TrainingJob:
    """Calls a job's function with JSON arguments, and with `device` where it has a parameter of that name."""
    name = getattr(function, "__name__", "the job")
    check_arguments(arguments)
    given = dict(arguments)
    parameters = inspect.signature(function).parameters
    if "device" in parameters and "device" not in given:
        given["device"] = device
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        near = "".join(did_you_mean(each, parameters) for each in arguments if each not in parameters)
        raise ValueError(f"{name} cannot be called with {sorted(arguments)}: {error}{near}") from error
    made = function(**given)
    if isinstance(made, TrainingJob):
        return made
    known = {field.name for field in fields(TrainingJob)}
    if isinstance(made, Mapping) and set(made) <= known and {"model", "optimizer", "loss"} <= set(made):
        return TrainingJob(**made)
    what = f"a dict with {sorted(map(str, made))}" if isinstance(made, Mapping) else _sort(made)
    raise ValueError(f"{name} returned {what}; a job returns {_SHAPE}")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Arguments must be JSON, so that a queue can keep them."""
    for name, value in arguments.items():
        if not _is_json(value):
            raise ValueError(f"argument {name} is {_sort(value)}: a job's arguments are JSON")


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    return isinstance(value, _JSON)


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{name or type(model).__name__} is compiled by torch.compile, which plans memory itself: estimate the "
                "job without compile"
            )


def _sort(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
