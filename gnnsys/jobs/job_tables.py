"""Jobs as people read them: a line per job, or arguments and results side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
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


def _state(job: JobRecord) -> str:
    return "cancelling" if job.is_cancelling and job.state is JobState.RUNNING else job.state.value


def _seconds(job: JobRecord) -> str:
    seconds = job.times.seconds
    return "" if seconds is None else f"{seconds:.1f}"


def _text(value: Any) -> str:
    """On one line, and short enough for a column; `show` has all of it."""
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
