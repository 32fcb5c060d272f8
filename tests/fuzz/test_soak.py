"""Ten minutes of it are `make soak`; here are a few seconds, and that its judgement can fail."""

from __future__ import annotations

import pytest

from tests.fuzz.served import Usage
from tests.fuzz.soak import Interval, judge, soak


@pytest.mark.usefixtures("forked_servers")
def test_a_server_under_load_with_clients_coming_and_going_stays_as_it_is(tmp_path):
    """Intervals this short say nothing about rates on a machine that pauses: `make soak` judges those."""
    assert soak(tmp_path / "parts", seconds=0.8, every=0.1, by_rate=False) is None


@pytest.mark.parametrize(
    ("last", "interval", "words"),
    [
        (Usage(900 << 20, 50, 7, 2), Interval(100, 40), "memory grew"),
        (Usage(100 << 20, 90, 7, 2), Interval(100, 40), "descriptors grew"),
        (Usage(100 << 20, 50, 7, 90), Interval(100, 40), "descriptors grew"),
        (Usage(100 << 20, 50, 8, 2), Interval(100, 40), "threads grew"),
        (Usage(100 << 20, 50, 7, 2), Interval(50, 40), "50 pulls per CPU second"),
        (Usage(100 << 20, 50, 7, 2), Interval(100, 20), "20 pulls per second"),
        (Usage(100 << 20, 50, 7, 2), Interval(100, 20, others=0.5), None),  # that is not the server's
        (Usage(100 << 20, 50, 7, 2), Interval(100, 0, others=0.5), "nobody was answered"),
        (Usage(101 << 20, 52, 7, 3), Interval(95, 38), None),
    ],
)
def test_what_grows_or_falls_is_told(last, interval, words):
    told = judge([Usage(100 << 20, 50, 7, 2)] * 9 + [last], [Interval(100, 40)] * 5 + [interval] * 5)
    assert told is None if words is None else told is not None and words in told
