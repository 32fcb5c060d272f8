"""A run in the background of a shell inherits an ignored Ctrl-C; the tests of interrupts need the usual one.

`--device cuda` runs the tests of ops, layers, samplers and loaders on a device: see tests/on_device.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where native ops and loaders run")


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--device")
    if device == "cpu":
        yield
        return
    from tests.on_device import loaders_on, ops_on, samplers_on

    room = Path(request.path).parent.name
    if room in ("ops", "nn"):
        with ops_on(device):
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if room == "loader":
            loaders_on(device, patch)
        elif room == "sampling":
            samplers_on(device, patch)
        yield
