"""Ten minutes of it are `make soak`; here are a few seconds, and that its judgement can fail."""

from __future__ import annotations

import pytest

from tests.fuzz.served import Usage
from tests.fuzz.soak import judge, soak


def test_a_server_under_load_with_clients_coming_and_going_stays_as_it_is(tmp_path):
    assert soak(tmp_path / "parts", seconds=4, every=0.4) is None


@pytest.mark.parametrize(
    ("last", "rate", "words"),
    [
        (Usage(900 << 20, 50, 7, 2), 100.0, "memory grew"),
        (Usage(100 << 20, 90, 7, 2), 100.0, "descriptors grew"),
        (Usage(100 << 20, 50, 7, 90), 100.0, "descriptors grew"),
        (Usage(100 << 20, 50, 8, 2), 100.0, "threads grew"),
        (Usage(100 << 20, 50, 7, 2), 50.0, "throughput fell"),
        (Usage(101 << 20, 52, 7, 3), 95.0, None),
    ],
)
def test_what_grows_is_told(last, rate, words):
    usages, rates = [Usage(100 << 20, 50, 7, 2)] * 9 + [last], [100.0] * 5 + [rate] * 5
    assert judge(usages, rates) is None if words is None else words in judge(usages, rates)
