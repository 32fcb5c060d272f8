"""Errors of a save: how ranks report them to each other, and what the caller gets."""

from __future__ import annotations

from gnnsys.comm import CommError


def raise_first(problems: list[str | None], cause: Exception | None = None) -> None:
    """Raises the first rank's problem as a ValueError. A rank that noticed a lost shard or rank raises that instead."""
    if isinstance(cause, CommError):
        raise cause
    first = next((problem for problem in problems if problem is not None), None)
    if first is not None:
        raise ValueError(first) from cause


def of_step(steps: int, error: Exception) -> Exception:
    """The error, with the step whose checkpoint failed: it may be raised many steps later."""
    said = f"the checkpoint of step {steps} was not saved"
    if isinstance(error, ValueError):
        made = ValueError(f"{said}: {error}")
        made.__cause__ = error
        return made
    if hasattr(error, "add_note"):  # keeps the type of a lost shard or rank
        error.add_note(said)
    return error


def words(error: Exception) -> str:
    """The error for a person: the file and the cause."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return str(error) or type(error).__name__
