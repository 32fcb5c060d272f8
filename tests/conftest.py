"""A run in the background of a shell inherits an ignored Ctrl-C; the tests of interrupts need the usual one.

All tests together run in several processes: see tests/support/workers.py. `--quick` runs some of every room in a
minute: see tests/support/quick.py. `--device cuda` runs the tests of ops, layers, samplers and loaders on a device: see
tests/support/on_device.py.
"""

from __future__ import annotations

import contextvars
import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.disk import do_not_wait_for_disks
from tests.support.forked_workers import pytest_unconfigure, pytest_xdist_setupnodes  # noqa: F401
from tests.support.one_epoch import one_epoch  # noqa: F401
from tests.support.open_sessions import no_session_stays_open
from tests.support.pyg_templates import parse_templates_once
from tests.support.quick import forbid_processes, is_quick
from tests.support.workers import ALONE, LONG, TURNS, Turns, choose_workers, is_alone, is_worker, sort_files

STARTERS = ("run_ranks", "run_code", "start_ranks", "start_agents")  # from nurseries
DEVICE_TESTS = Path(__file__).parent / "cuda"

signal.signal(signal.SIGINT, signal.default_int_handler)
do_not_wait_for_disks()
gc.disable()  # while tests are imported, which makes next to no garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where native ops and loaders run")
    parser.addoption("--quick", action="store_true", help="some files of every room, none that starts a process")


def pytest_configure(config: pytest.Config) -> None:
    for marker in (ALONE, LONG):
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads how many there are to be
def pytest_cmdline_main(config: pytest.Config) -> None:
    choose_workers(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What a quick run leaves out is not imported either."""
    is_left_out = config.getoption("--quick") and collection_path.suffix == ".py" and not is_quick(collection_path)
    return True if is_left_out else None


class NoDevice(pytest.Module):
    """A file of tests/cuda where there is no device: skipped as a whole, without the seconds that its tests take.

    tests/support/test_device_files.py imports it.
    """

    def collect(self) -> NoReturn:
        pytest.skip("no CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.parent != DEVICE_TESTS:
        return None
    import torch

    return None if torch.cuda.is_available() else NoDevice.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sort_files(items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Each test begins with what requests say where nobody has said anything: a loop over batches that an earlier one
    broke off says something until it is collected."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if contextvars.copy_context().run(pyfuncitem.obj, **arguments) is not None:
        pytest.fail("a test that returns something, a coroutine say, has checked nothing")
    return True


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
    """Where ranks will be started, what they are forked from imports torch while the first tests run.

    What was imported stays: looking through it for garbage again and again took a tenth of the time. This is not called
    in a process that only starts workers.
    """
    parse_templates_once()
    gc.collect()
    gc.freeze()
    gc.enable()
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    used = [getattr(module, name, None) for module in modules for name in STARTERS]
    options = session.config.option
    if options.collectonly:
        return
    if options.quick:
        forbid_processes()
    elif any(getattr(function, "__module__", "") == "tests.support.processes" for function in used):
        from tests.support.nursery import forks_ranks, nurseries

        if forks_ranks():
            nurseries()


@pytest.fixture(scope="module", autouse=True)
def sessions_are_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    with no_session_stays_open(request.node.nodeid):
        yield


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    device = request.config.getoption("--device")
    if device == "cpu":
        yield
        return
    from tests.support.on_device import HOST_ONLY, loaders_on, ops_on, samplers_on

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
