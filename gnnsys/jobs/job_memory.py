"""How much memory is set aside for a job: what was estimated times a safety factor, what was stated, or what was
measured of a job like it.

Bytes on the CPU are those of tensors, as the estimate counts them; what is measured there is the growth of the
process, which has Python's own in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gnnsys.jobs.job_record import JobRecord, SpecEstimate
from gnnsys.jobs.job_spec import SEED, JobSpec
from gnnsys.observe import format_size

FIRST_FACTOR = 1.15  # CoGNN, V-C
_FITTED = "batch_size"


def memory_to_reserve(job: JobRecord, factor: float, learned: int | None) -> int | None:
    """Bytes for one job; None where nothing is known, and it must run alone to be measured."""
    if job.spec.memory is not None:
        return job.spec.memory
    if learned is not None:
        return learned
    if job.estimated is not None:
        return math.ceil(job.estimated * factor)
    return None


def estimate_spec(spec: JobSpec, kind: str) -> SpecEstimate:
    """Runs the job's function, on the CPU, and traces it with fake rows, for a device of this kind. What goes wrong in
    that is no error."""
    from gnnsys.jobs.generators import kept_generators
    from gnnsys.jobs.shared_graphs import noted_graphs
    from gnnsys.planning import estimate_memory

    if spec.memory is not None:
        return SpecEstimate(num_bytes=spec.memory, how="stated")
    if spec.is_script:
        return SpecEstimate(how="unknown", why="a script is not traced")
    with kept_generators():
        try:
            with noted_graphs() as noted:
                function, arguments = _function(spec)
                found = estimate_memory(function, arguments, kind)
            return SpecEstimate(num_bytes=found.needed_bytes, how="traced", graphs=dict(noted.graphs))
        except (Exception, SystemExit) as error:  # whatever the user's function or the trace says
            why = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
            return SpecEstimate(how="unknown", why=why)


def has_profile(kind: str) -> bool:
    """Whether this process can estimate for such a device. That of a service may have another cache than a user's."""
    from gnnsys.planning import known_kinds

    return kind in ("cpu", *known_kinds())


def check_call(spec: JobSpec) -> None:
    """ValueError where the function is not there, or does not take these arguments: wherever it runs, it fails."""
    import inspect

    from gnnsys.graph import did_you_mean
    from gnnsys.planning import NoSuchJob

    try:
        function, arguments = _function(spec)
    except NoSuchJob:
        raise
    except (Exception, SystemExit):  # of the user's module, which may be well where the job runs
        return
    parameters = inspect.signature(function).parameters
    for name, each in parameters.items():
        is_needed = each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if is_needed and name not in arguments and name != "device":
            raise ValueError(f"{spec.target} needs the argument {name!r}")
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            near = did_you_mean(name, list(parameters)) or f": it has {', '.join(parameters) or 'none'}"
            raise ValueError(f"{spec.target} has no argument {name!r}{near}")


def _function(spec: JobSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    import inspect

    from gnnsys.planning import find_job

    function, arguments = find_job(spec.target), dict(spec.arguments)
    if SEED in inspect.signature(function).parameters:
        arguments.setdefault(SEED, spec.seed)
    return function, arguments


def too_large(spec: JobSpec, needed: int, capacity: int, kind: str | None = None, factor: float = 1.0) -> str:
    """Why a job is refused, with the batch size that would fit where it has one and `kind` is given: that runs it."""
    text = f"{spec.target} takes {format_size(needed)} at its peak and the queue's capacity is {format_size(capacity)}"
    if spec.is_script or spec.memory is not None:
        return f"{text}: state less --memory, or serve with a larger --capacity"
    value = spec.arguments.get(_FITTED)
    if kind is not None and isinstance(value, int) and not isinstance(value, bool):
        try:
            return f"{text}: {_FITTED}={_fitting(spec, capacity, kind, factor)} fits, {value} does not"
        except Exception as error:  # a hint alone: the refusal itself stands
            return f"{text}: make it smaller ({' '.join(str(error).split())})"
    return f"{text}: make the model or its batches smaller, or serve with a larger --capacity"


def _fitting(spec: JobSpec, capacity: int, kind: str, factor: float) -> int:
    from gnnsys.jobs.generators import kept_generators
    from gnnsys.planning import fit_argument

    function, arguments = _function(spec)
    with kept_generators():
        fitted = fit_argument(
            function, _FITTED, arguments, kind, int(capacity / factor),
            most=int(arguments[_FITTED]),
        )  # fmt: skip
    return fitted.value
