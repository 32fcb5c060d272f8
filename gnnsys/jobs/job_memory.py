"""How much memory is set aside for a job: what was estimated times a safety factor, what was stated, or what was
measured of a job like it. And how much there is.

Bytes on the CPU are those of tensors, as the estimate counts them; what is measured there is the growth of the
process, which has Python's own in it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gnnsys
from gnnsys.jobs.job_record import JobRecord, SpecEstimate
from gnnsys.jobs.job_spec import SEED, JobSpec
from gnnsys.observe import format_size

FIRST_FACTOR = 1.15  # CoGNN, V-C
_CONTEXT_BYTES = 640 << 20  # of a process on a GPU, beside torch's allocator
_PROBE_SECONDS = 120.0
_FITTED = "batch_size"
_PATH = "PYTHONPATH"


def device_memory(device: str) -> int:
    """Bytes of a device. A process of its own asks the driver, which would stay in this one, and leaves torch out."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    index = device.partition(":")[2] or "0"
    if not index.isdigit():
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    code = f"from gnnsys.jobs.cuda_memory import device_bytes; print(device_bytes({int(index)}))"
    package = str(Path(gnnsys.__file__).resolve().parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    if told.returncode:
        said = (told.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"device {device} cannot be used ({said}): gnnsys jobs serve --device cpu runs on the host")
    return int(told.stdout)


def choose_capacity(device: str, wanted: int | None, workers: int) -> int:
    """What jobs may take together. ValueError for more than the device has."""
    there = device_memory(device)
    if wanted is None:
        return int(0.8 * there) if device == "cpu" else there - workers * _CONTEXT_BYTES
    if wanted < 1 or wanted > there:
        raise ValueError(
            f"the capacity must be at most the {format_size(there)} that {device} has, got "
            f"{format_size(max(wanted, 0))}: give --capacity {max(there >> 30, 1)}G or less"
        )
    return wanted


def memory_to_reserve(job: JobRecord, factor: float, learned: int | None) -> int | None:
    """Bytes for one job; None where nothing is known, and it must run alone to be measured."""
    if job.spec.memory is not None:
        return job.spec.memory
    if learned is not None:
        return learned
    if job.estimated is not None:
        return math.ceil(job.estimated * factor)
    return None


def estimate_spec(spec: JobSpec, device: str) -> SpecEstimate:
    """Runs the job's function, on the CPU, and traces it with fake rows. What goes wrong in that is no error."""
    from gnnsys.jobs.fresh_state import kept_generators
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
                found = estimate_memory(function, arguments, _training_device(device))
            return SpecEstimate(num_bytes=found.needed_bytes, how="traced", graphs=dict(noted.graphs))
        except Exception as error:  # whatever the user's function or the trace says
            why = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
            return SpecEstimate(how="unknown", why=why)


def check_call(spec: JobSpec) -> None:
    """ValueError where the function is not there, or does not take these arguments: wherever it runs, it fails."""
    import inspect

    from gnnsys.graph import did_you_mean

    if spec.environment.get(_PATH, "") != os.environ.get(_PATH, ""):
        return  # its modules may be elsewhere
    try:
        function, arguments = _function(spec)
    except ValueError:
        raise
    except Exception:  # of the user's module, which may be well where the job runs
        return
    parameters = inspect.signature(function).parameters
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


def _training_device(device: str) -> Any:
    from gnnsys.planning import training_device

    return training_device("cpu" if device == "cpu" else "h200")  # the kind that a profile is shipped of


def too_large(spec: JobSpec, needed: int, capacity: int, device: str | None = None, factor: float = 1.0) -> str:
    """Why a job is refused, with the batch size that would fit where it has one and `device` is given: that runs it."""
    text = f"{spec.target} takes {format_size(needed)} at its peak and the queue's capacity is {format_size(capacity)}"
    if spec.is_script or spec.memory is not None:
        return f"{text}: state less --memory, or serve with a larger --capacity"
    value = spec.arguments.get(_FITTED)
    if device is not None and isinstance(value, int) and not isinstance(value, bool):
        try:
            return f"{text}: {_FITTED}={_fitting(spec, capacity, device, factor)} fits, {value} does not"
        except Exception as error:  # a hint alone: the refusal itself stands
            return f"{text}: make it smaller ({' '.join(str(error).split())})"
    return f"{text}: make the model or its batches smaller, or serve with a larger --capacity"


def _fitting(spec: JobSpec, capacity: int, device: str, factor: float) -> int:
    from gnnsys.jobs.fresh_state import kept_generators
    from gnnsys.planning import fit_argument

    function, arguments = _function(spec)
    with kept_generators():
        fitted = fit_argument(
            function, _FITTED, arguments, _training_device(device), int(capacity / factor),
            most=int(arguments[_FITTED]),
        )  # fmt: skip
    return fitted.value
