"""Rates as people write them."""

from __future__ import annotations

import math

import pytest

from gnnsys.observe import bytes_per_second, format_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10gbit", 1.25e9),
        ("250mbit", 31.25e6),
        ("250 Mbit/s", 31.25e6),
        ("8000bit", 1000.0),
        ("30MB/s", 30e6),
        ("1.5GB", 1.5e9),
        ("125000000", 1.25e8),
        (1.25e8, 1.25e8),
        ("unlimited", math.inf),
    ],
)
def test_a_rate_is_bytes_per_second(text: str | float, rate: float) -> None:
    assert bytes_per_second(text) == rate


@pytest.mark.parametrize("rate", [1.25e9, 31.25e6, 6.25e6, 1234567.0, 0.5, 1 / 3, 123456789.125, math.inf])
def test_a_rate_that_is_written_is_read_as_the_same(rate: float) -> None:
    assert bytes_per_second(format_rate(rate)) == rate


@pytest.mark.parametrize("text", ["", "fast", "10 gb", "10gb", "-5mbit", "nan", None, True, "10gbit 5"])
def test_what_is_no_rate_is_told_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match="10gbit, 250mbit"):
        bytes_per_second(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", 0, "0gbit", -1.0])
def test_a_rate_of_zero_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        bytes_per_second(text)
