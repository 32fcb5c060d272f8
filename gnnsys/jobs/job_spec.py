"""What a job is: a function that returns a TrainingJob, or a script; with its arguments, folder and environment.

It is kept as JSON. Nothing of it is run or imported here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

SEED = "seed"
JOB_VARIABLES = "GNNSYS_JOB_VARIABLES"  # in a job's environment: the names of the variables that it was given, as JSON
MOST_RESULT_BYTES = 1 << 20  # of JSON
_MOST = 1 << 63
_KEPT = ("PYTHONPATH",)  # of the environment of who submits; all else is the service's, or named


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """`target` is MODULE:FUNCTION or the path of a script.

    `arguments` are the function's, by name; a script has `words`. `memory` in bytes is what the user says it takes,
    None where it is to be found out. A checkpoint is written every so many steps or seconds; without either a job that
    is killed begins again.
    """

    target: str
    folder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    memory: int | None = None
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = None
    keeps_weights: bool = True

    @cached_property
    def is_script(self) -> bool:
        return not is_function(self.target)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written."""
        return self.checkpoint_steps is not None or self.checkpoint_seconds is not None

    @cached_property
    def likeness(self) -> str:
        """Jobs that take the same memory, for all that can be said without running them: all but the seed is equal."""
        arguments = {name: value for name, value in self.arguments.items() if name != SEED}
        equal = [self.target, self.folder, arguments, list(self.words), dict(self.environment)]
        return json.dumps(equal, sort_keys=True)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        values = json.loads(text)
        return cls(**{**values, "words": tuple(values["words"])})


def is_function(target: str) -> bool:
    """Whether this is MODULE:FUNCTION, and not the path of a script."""
    module, colon, function = target.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def make_spec(
    target: str,
    arguments: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    *,
    folder: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    seed: int = 0,
    memory: int | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_seconds: float | None = None,
    keeps_weights: bool = True,
) -> JobSpec:
    """Checks what a user gives. ValueError of one line."""
    where = Path(folder or Path.cwd()).resolve()
    if not where.is_dir():
        raise ValueError(f"there is no folder {where} to run the job in: give one that is there, or none for this one")
    given = dict(arguments or {})
    for name, value in given.items():
        check_json(f"argument {name}", value)
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ} | dict(environment or {})
    for name, value in kept.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise ValueError(f"a variable of the environment is NAME=VALUE, got {name!r} and {value!r}")
    if not isinstance(target, str) or not target:
        raise ValueError(f"a job is MODULE:FUNCTION, such as train:job, or a script, got {target!r}")
    if is_function(target):
        if words:
            raise ValueError(
                f"{target} is a function, which has arguments by name: write them as JSON, not {words[0]!r}"
            )
    else:
        target = str(_script(target, where))
        if checkpoint_steps is not None or checkpoint_seconds is not None:
            raise ValueError("checkpoints of a script are its own: call gnnsys.resume() in it (docs/jobs.md)")
    _check_number("seed", seed, 0, "whole")
    _check_number("memory", memory, 1, "whole")
    _check_number("checkpoint_steps", checkpoint_steps, 1, "whole")
    _check_number("checkpoint_seconds", checkpoint_seconds, 0, "any")
    return JobSpec(
        target=target, folder=str(where), arguments=given, words=tuple(map(str, words)), environment=kept, seed=seed,
        memory=memory, checkpoint_steps=checkpoint_steps, checkpoint_seconds=checkpoint_seconds,
        keeps_weights=keeps_weights,
    )  # fmt: skip


def check_json(what: str, value: Any) -> None:
    """ValueError where a value is not JSON: a queue keeps nothing else."""
    kind = type(value).__name__
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} is {value}, which JSON has no number for: give a finite one, or text")
    if isinstance(value, list):
        for each in value:
            check_json(what, each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{what} has the name {name!r}: names in JSON are text")
            check_json(what, each)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError(
            f"{what} is a {kind}: a job's arguments are JSON (text, numbers, true, false, null, lists, objects)"
        )


def _script(target: str, where: Path) -> Path:
    path = (where / target).resolve()
    if not path.is_file():
        hint = "" if ":" in target else "; a function is MODULE:FUNCTION, such as train:job"
        raise ValueError(f"there is no script {path}{hint}")
    if path.suffix != ".py" and not os.access(path, os.X_OK):
        raise ValueError(f"{path} is no Python file and cannot be executed: chmod +x it")
    return path


def _check_number(name: str, value: float | None, least: int, sort: str) -> None:
    if value is None:
        return
    kinds = (int,) if sort == "whole" else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value < _MOST:
        what = "whole number" if sort == "whole" else "number"
        raise ValueError(f"{name} must be a {what} from {least} to 2**63 - 1, got {value!r}")
