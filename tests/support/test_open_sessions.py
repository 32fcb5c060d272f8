"""A file that leaves a session open fails, and not those that come after it."""

from __future__ import annotations

import pytest

import gnnsys
from tests.support.open_sessions import no_session_stays_open


def test_a_file_that_leaves_a_session_open_is_named() -> None:
    with no_session_stays_open("tests/a.py"), gnnsys.init(process_group=False):
        pass
    with (
        pytest.raises(pytest.fail.Exception, match=r"tests/b.py leaves Session\(rank 0 of 1, machine 0 of 1\) open"),
        no_session_stays_open("tests/b.py"),
    ):
        left = gnnsys.init(process_group=False)
    assert left.is_closed and gnnsys.session.current() is None


def test_a_file_that_begins_with_an_open_session_says_so() -> None:
    with (
        gnnsys.init(process_group=False),
        pytest.raises(pytest.fail.Exception, match=r"Session\(.* is open when tests/c.py begins"),
        no_session_stays_open("tests/c.py"),
    ):
        pytest.fail("unreachable")
