"""A run in the background of a shell inherits an ignored Ctrl-C; the tests of interrupts need the usual one.

All tests together run in several processes: see tests/workers.py. `--device cuda` runs the tests of ops, layers,
samplers and loaders on a device: see tests/on_device.py.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.disk import do_not_wait_for_disks
from tests.workers import ALONE, TURNS, Turns, choose_workers, is_alone, is_worker

LONG = "long: the test takes minutes; `make test` leaves it out, `make check-all` runs it"

signal.signal(signal.SIGINT, signal.default_int_handler)
do_not_wait_for_disks()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where native ops and loaders run")


def pytest_configure(config: pytest.Config) -> None:
    for marker in (ALONE, LONG):
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads how many there are to be
def pytest_cmdline_main(config: pytest.Config) -> None:
    choose_workers(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Fixtures of files are made and taken down under the same rule."""
    if not is_worker(item.config):
        return (yield)
    turns = item.config.stash.setdefault(TURNS, Turns())
    turns.begin(is_alone(item))
    try:
        return (yield)
    finally:
        turns.end(is_alone(nextitem))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where ranks will be started, what they are forked from imports torch while the first tests run."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    used = [getattr(module, name, None) for module in modules for name in ("run_ranks", "start_ranks")]
    if not session.config.option.collectonly and any(
        getattr(function, "__module__", "") == "tests.processes" for function in used
    ):
        from tests.nursery import forks_ranks, nurseries

        if forks_ranks():
            nurseries()


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--device")
    if device == "cpu":
        yield
        return
    from tests.on_device import HOST_ONLY, loaders_on, ops_on, samplers_on

    if any(words in request.node.name for words in HOST_ONLY):
        pytest.skip("about the host alone")
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
