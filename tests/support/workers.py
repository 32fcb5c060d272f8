"""How all tests run in half the time: in two processes more than there are processors, those of a file in the same one.

Tests of processes and of links wait for a third of their time: with two more workers than processors these have work
meanwhile (8.5 minutes with one more, 7.2 with two on two processors; a third saves less than its imports cost). Their
files are the longest. They are spread over the others, so that never all workers wait, but for the last fifth of a run:
what runs at the end is short, and no processor waits for another. A test that looks at the whole machine (rates and
quotas that are kept, every lab there is) is marked `alone`: no other test runs while it does, and these are the very
first, while what ranks are forked from is made. A test that takes long, and whose promise a shorter one keeps,
is marked `long`: `make test` leaves it out, `make check-all` does not. `pytest` and `make test` without arguments use
all processors where pytest-xdist is; parts of the suite run in one process, and `-n` says otherwise. Workers are forked
from one process that has imported the tests (tests/support/forked_workers.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest

MOST_WORKERS = 6  # each has two nurseries, with torch in all three
ALONE = "alone: the test looks at the whole machine, so that no other runs beside it"
LONG = "long: much work, whose promise a shorter test keeps; `make check-all` runs it, `make test` does not"
WHOLE = ("", "not long")  # of `-m`: all tests, and those of `make test`
STARTERS = ("tests.support.processes", "gnnsys.lab", "gnnsys.bench.dist")  # where functions are that start processes
SPREAD = 0.8  # of a run, in which the last file that starts processes begins
WAIT_SECONDS = 600.0  # more than any test takes
DOOR, ROOM = Path(__file__), Path(__file__).parents[1] / "conftest.py"  # files that all workers have, to lock


def choose_workers(config: pytest.Config) -> None:
    """Sets what `-n` and `--dist` set, if all tests were asked for and nothing that wants to see them one by one."""
    if is_worker(config):
        return
    options = config.option
    unsaid = getattr(options, "numprocesses", 0) is None  # there is pytest-xdist, and nobody has said how many
    whole = config.args == config.getini("testpaths") and not options.keyword and options.markexpr in WHOLE
    watched = options.usepdb or options.collectonly or options.capture == "no" or options.device != "cpu"
    if unsaid and whole and not watched and not os.environ.get("GNNSYS_SANITIZER"):
        options.numprocesses = min(len(os.sched_getaffinity(0)) + 2, MOST_WORKERS)
        options.dist = "loadfile"
        options.loadscopereorder = False  # files in the order of `sort_files`: most tests are not the longest
        if options.maxworkerrestart is None:  # one that crashed has failed the run, and its files would not come back
            options.maxworkerrestart = "0"
    if getattr(options, "numprocesses", 0):
        # Workers use all processors: threads of OpenMP would take them from other workers, most of all while they spin.
        # What is promised of several threads is in tests that ask for them (`torch.set_num_threads`).
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def sort_files(items: list[pytest.Item]) -> None:
    """Sorts tests by their files: first those with tests that run alone, then those that may start processes among all
    others.

    A test that runs alone waits for all others that run, and later on these may be long: it is the first of its file.
    """
    files = {id(getattr(item, "module", None)): item for item in reversed(items)}  # with their first tests
    keys = list(reversed(files))
    starting = [key for key in keys if starts_processes(getattr(files[key], "module", None))]
    plain = [key for key in keys if key not in set(starting)]
    places = {key: SPREAD * number / len(starting) for number, key in enumerate(starting)}
    places |= {key: number / len(plain) for number, key in enumerate(plain)}
    alone = {id(getattr(item, "module", None)) for item in items if is_alone(item)}
    ranked = sorted([*starting, *plain], key=lambda key: (key not in alone, places[key]))
    order = {key: number for number, key in enumerate(ranked)}

    def place(item: pytest.Item) -> tuple[int, bool]:
        key = id(getattr(item, "module", None))
        return order[key], not (key in alone and is_alone(item))

    items.sort(key=place)


def starts_processes(module: ModuleType | None) -> bool:
    """Whether a test file imports what starts processes: subprocess, or something of `STARTERS`."""
    values = [] if module is None else vars(module).values()  # anything: they may not like to be compared
    homes = [str(getattr(value, "__module__", "")) for value in values if callable(value)]
    return any(value is subprocess for value in values) or any(
        home == name or home.startswith(f"{name}.") for home in homes for name in STARTERS
    )


@contextlib.contextmanager
def machine(
    alone: bool, door_file: Path = DOOR, room_file: Path = ROOM, seconds: float = WAIT_SECONDS
) -> Iterator[None]:
    """Shares the machine with tests of other workers, or has it alone; whoever wants it alone is the next to have it.

    Everyone comes through a door, one at a time, and whoever waits for the room to be empty stands in it.
    """
    with open(door_file) as door, open(room_file) as room:
        _lock(door, fcntl.LOCK_EX, seconds)
        _lock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, seconds)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # also for children that have the file open


class Turns:
    """One worker's tests. What was waited for lasts as long as tests follow one another that must be alone."""

    def __init__(self) -> None:
        self._stack, self._alone = contextlib.ExitStack(), False

    def begin(self, alone: bool, door_file: Path = DOOR, room_file: Path = ROOM) -> None:
        if not (alone and self._alone):
            self._stack.enter_context(machine(alone, door_file, room_file))
            self._alone = alone

    def end(self, next_alone: bool) -> None:
        if not (next_alone and self._alone):
            self._stack.close()
            self._alone = False


TURNS = pytest.StashKey[Turns]()


def is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


def _lock(file: IO[str], kind: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"other tests held the machine for {seconds:g} s") from None
            time.sleep(0.01)
