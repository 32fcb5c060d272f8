"""No file of tests leaves a session open: it would be every later file's `gnnsys.session.current()`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gnnsys.session import Session


@contextmanager
def no_session_stays_open(file: str) -> Iterator[None]:
    """Fails where a session is open when a file begins, and where it leaves one open, which is closed then."""
    if (found := _open_session()) is not None:
        pytest.fail(f"{found} is open when {file} begins: something before it left it so")
    yield
    if (left := _open_session()) is not None:
        text = str(left)
        close_sessions()
        pytest.fail(
            f"{file} leaves {text} open: begin sessions by `with`; gnnsys.open() begins one where there is none"
        )


def close_sessions() -> None:
    """Closes those that are open: a page's `gnnsys.open`, which ends with its program, begins one."""
    while (session := _open_session()) is not None:
        session.close(wait=False)


def _open_session() -> Session | None:
    """None as well where nothing has been imported that could begin one."""
    module = sys.modules.get("gnnsys.session")
    return None if module is None else module.current()
