"""Jobs as people read them: a line per job, arguments and results side by side, or all of one job."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from gnnsys.jobs.job_record import JobRecord, JobState
from gnnsys.observe import format_size

_WIDEST = 60
_HIDDEN = ("weights", "steps")  # results that are for `show`


def job_json(job: JobRecord) -> dict[str, Any]:
    """Everything the queue knows of a job."""
    return {**asdict(job), "kind": job.kind}


def job_lines(jobs: Sequence[JobRecord]) -> list[str]:
    """A table: state, memory, seconds, what it is and what went wrong."""
    rows = [["job", "state", "memory", "measured", "seconds", "what", ""]]
    for job in jobs:
        words = [f"{name}={_text(value)}" for name, value in job.spec.arguments.items()]
        words += map(_text, job.spec.words)
        if job.spec.seed:
            words.append(f"seed={job.spec.seed}")
        rows.append(
            [
                str(job.number),
                _state(job),
                "" if job.estimated is None else format_size(job.estimated),
                "" if job.measured is None else format_size(job.measured),
                _seconds(job),
                " ".join([job.spec.target, *words]),
                job.error,
            ]
        )
    return _aligned(rows)


def result_lines(jobs: Sequence[JobRecord]) -> list[str]:
    """A table with a column per argument that differs or is given, and one per result."""
    arguments = list(dict.fromkeys(name for job in jobs for name in job.spec.arguments))
    results = list(dict.fromkeys(name for job in jobs for name in job.result if name not in _HIDDEN))
    has_words = any(job.spec.words for job in jobs)
    rows = [["job", "state", *arguments, *(["words"] if has_words else []), "seed", *results, "seconds"]]
    for job in jobs:
        given = [_text(job.spec.arguments.get(name, "")) for name in arguments]
        words = [" ".join(map(_text, job.spec.words))] if has_words else []
        told = [_text(job.result.get(name, "")) for name in results]
        rows.append([str(job.number), _state(job), *given, *words, str(job.spec.seed), *told, _seconds(job)])
    return _aligned(rows)


def job_page(job: JobRecord) -> list[str]:
    """One job: a line for all that is known of it, and no line for what is not."""
    spec, memory = job.spec, []
    if job.estimated is not None:
        memory.append(f"{format_size(job.estimated)} {job.estimate}")
    if job.reserved is not None:
        memory.append(f"{format_size(job.reserved)} set aside")
    if job.measured is not None:
        memory.append(f"{format_size(job.measured)} measured")
    if not memory and job.estimate:
        memory.append(job.estimate)
    often = ((spec.checkpoint_steps, "steps"), (spec.checkpoint_seconds, "seconds"))
    saves = [f"every {count:g} {unit}" for count, unit in often if count is not None]
    rows = [
        ("job", str(job.number)),
        ("state", _state(job)),
        ("error", job.error),
        ("what", " ".join([spec.target, *map(_text, spec.words)])),
        ("arguments", "" if spec.is_script else json.dumps(dict(spec.arguments))),
        ("seed", "" if spec.is_script else str(spec.seed)),
        ("folder", spec.folder),
        ("environment", " ".join(f"{name}={value}" for name, value in spec.environment.items())),
        ("checkpoints", ", ".join(saves)),
        ("sweep", "" if job.sweep is None else f"of job {job.sweep}"),
        ("submitted", _time(job.submitted)),
        ("started", _time(job.started)),
        ("first step", _time(job.first_step)),
        ("ended", _time(job.ended)),
        ("seconds", _seconds(job)),
        ("attempts", f"{job.attempt}, {job.num_lost} of them lost" if job.num_lost else str(job.attempt or "")),
        ("process", f"{job.process.pid}" if job.process is not None and job.state is JobState.RUNNING else ""),
        ("device", job.device or ""),
        ("memory", ", ".join(memory)),
        ("runs", "alone" if job.is_alone else ""),
        *((f"graph {_text(name)}", format_size(size)) for name, size in job.graphs.items()),
        *((f"result {_text(name)}", _text(value)) for name, value in job.result.items()),
    ]
    return _aligned([[name, _one_line(value)] for name, value in rows if value])


def _time(seconds: float | None) -> str:
    """Of this machine's clock; that of `job_json` is a number."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="milliseconds")


def _state(job: JobRecord) -> str:
    return "cancelling" if job.is_cancelling and job.state is JobState.RUNNING else job.state.value


def _seconds(job: JobRecord) -> str:
    """Of its last attempt; so far, where it still runs."""
    seconds = job.times.seconds
    if job.state is JobState.RUNNING and job.started is not None:
        seconds = max(0.0, time.time() - job.started)
    return "" if seconds is None else f"{seconds:.1f}"


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _text(value: Any) -> str:
    """On one line, and short enough for a column; `show --json` has all of it."""
    text = _one_line(f"{value:.6g}" if isinstance(value, float) else str(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
