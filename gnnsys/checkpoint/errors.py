"""What ranks tell each other of a save that failed, and what the caller gets of it."""

from __future__ import annotations

from gnnsys.comm import CommError


def raise_first(problems: list[str | None], cause: Exception | None = None) -> None:
    """Raises what the first rank complains of; a lost shard or rank as what it is where it was noticed."""
    if isinstance(cause, CommError):
        raise cause
    first = next((problem for problem in problems if problem is not None), None)
    if first is not None:
        raise ValueError(first) from cause


def of_step(steps: int, error: Exception) -> Exception:
    """The error with the step whose checkpoint it is about: it may come up many steps later."""
    said = f"the checkpoint of step {steps} was not saved"
    if isinstance(error, ValueError):
        made = ValueError(f"{said}: {error}")
        made.__cause__ = error
        return made
    if hasattr(error, "add_note"):  # a lost shard or rank stays what it is
        error.add_note(said)
    return error


def words(error: Exception) -> str:
    """What a person needs: the file and the cause."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}"
    return str(error) or type(error).__name__
