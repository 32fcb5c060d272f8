"""All tests together run in several processes, and a test that must be alone is."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from gnnsys.lab import Lab
from tests.support import workers
from tests.support.processes import await_true
from tests.support.workers import Turns, choose_workers, machine, sort_files

WHOLE = {"keyword": "", "markexpr": "", "usepdb": False, "collectonly": False, "capture": "fd", "device": "cpu"}


RESTARTS: dict[str, object] = {"maxworkerrestart": None}


def chosen(args: list[str], **options: object) -> SimpleNamespace:
    option = SimpleNamespace(
        **{**WHOLE, "numprocesses": None, "dist": "no", "loadscopereorder": True, **RESTARTS, **options}
    )
    config = SimpleNamespace(args=args, option=option, getini=lambda name: {"testpaths": ["tests"]}[name])
    choose_workers(config)
    return option


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("GNNSYS_SANITIZER", raising=False)
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # what a test sets is taken back
        monkeypatch.delenv(name)


def test_all_tests_run_in_two_processes_more_than_there_are_processors_file_by_file():
    option = chosen(["tests"])
    assert (option.numprocesses, option.dist, option.loadscopereorder) == (4, "loadfile", False)
    assert option.maxworkerrestart == "0"  # who crashes ends the run
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("passive", "1")


def test_leaving_out_what_is_long_leaves_all_processors_to_the_rest():
    assert chosen(["tests"], markexpr="not long").numprocesses == 4
    assert chosen(["tests"], markexpr="long").numprocesses is None


def item(name: str, marker: str = "", module: ModuleType | None = None, **imported: object) -> SimpleNamespace:
    module = ModuleType(name) if module is None else module
    vars(module).update(imported)
    return SimpleNamespace(name=name, module=module, get_closest_marker=lambda wanted: wanted == marker or None)


def test_files_that_start_processes_are_spread_over_the_others_but_for_the_end_and_each_kind_keeps_its_order():
    plain = [item(f"plain {number}", Path=Path, rows=np.zeros(2)) for number in range(10)]
    starting = [item("ranks", run=await_true), item("programs", subprocess=subprocess), item("lab", Lab=Lab)]
    found = [*plain[:4], *starting, *plain[4:]]
    sort_files(found)
    assert [each for each in found if each in plain] == plain and [
        each for each in found if each in starting
    ] == starting
    assert [found.index(each) for each in starting] == [0, 4, 8] and found[9:] == plain[6:]


def test_what_runs_alone_runs_before_anything_that_it_would_wait_for():
    starting, plain, lab, rates = item("ranks", run=await_true), item("plain"), ModuleType("lab"), ModuleType("rates")
    labs = [item("before", module=lab), item("alone", "alone", lab), item("after", module=lab)]
    rest = [item("quota", "alone", rates), item("rate", "alone", rates)]
    found = [starting, *labs, plain, *rest]
    sort_files(found)
    assert found == [labs[1], labs[0], labs[2], *rest, starting, plain]


@pytest.mark.parametrize(
    "options",
    [{"keyword": "push"}, {"usepdb": True}, {"collectonly": True}, {"capture": "no"}, {"device": "cuda"}],
)
def test_whoever_wants_to_see_tests_one_by_one_does(options):
    assert chosen(["tests"], **options).numprocesses is None


def test_a_part_of_the_tests_runs_in_one_process_and_a_number_that_was_given_stays(monkeypatch):
    assert chosen(["tests/store"]).numprocesses is None and not {"OMP_WAIT_POLICY", "OMP_NUM_THREADS"} & set(os.environ)
    assert [chosen(["tests"], numprocesses=number).numprocesses for number in (0, 7)] == [0, 7]
    monkeypatch.setenv("GNNSYS_SANITIZER", "address")
    assert chosen(["tests"]).numprocesses is None


def test_without_xdist_nothing_is_set():
    option = SimpleNamespace(**WHOLE)
    choose_workers(SimpleNamespace(args=["tests"], option=option, getini=lambda _: ["tests"]))
    assert not hasattr(option, "numprocesses")


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    door, room = tmp_path / "door", tmp_path / "room"
    door.touch()
    room.touch()
    return door, room


def can_enter(alone: bool, files: tuple[Path, Path]) -> bool:
    """Whether the machine is had at once; nobody else wants it meanwhile."""
    try:
        with machine(alone, *files, seconds=0.0):
            return True
    except TimeoutError:
        return False


def test_tests_run_beside_each_other_but_beside_one_that_is_alone(files):
    with machine(False, *files):
        assert can_enter(False, files) and not can_enter(True, files)
    with machine(True, *files):
        assert not can_enter(False, files) and not can_enter(True, files)
    assert can_enter(True, files)


def test_whoever_waits_for_the_machine_alone_is_next(files):
    entered, leave = threading.Event(), threading.Event()

    def be_alone() -> None:
        with machine(True, *files):
            entered.set()
            leave.wait(60)

    waiting = threading.Thread(target=be_alone)
    try:
        with machine(False, *files):
            waiting.start()
            await_true(lambda: not can_enter(False, files), "someone in the door")
            assert not entered.is_set()
        assert entered.wait(60) and not can_enter(False, files)
    finally:
        leave.set()
        waiting.join(60)
    assert can_enter(False, files)


def test_what_goes_wrong_gives_the_machine_back(files):
    with pytest.raises(ZeroDivisionError), machine(True, *files):
        1 / 0  # noqa: B018
    assert can_enter(True, files)


def test_tests_that_must_be_alone_and_follow_one_another_wait_once(files):
    turns = Turns()
    turns.begin(True, *files)
    turns.end(next_alone=True)
    assert not can_enter(False, files), "nobody comes in between"
    turns.begin(True, *files)
    turns.end(next_alone=False)
    assert can_enter(True, files)
    turns.begin(False, *files)
    assert can_enter(False, files) and not can_enter(True, files)
    turns.end(next_alone=True)
    assert can_enter(True, files)
