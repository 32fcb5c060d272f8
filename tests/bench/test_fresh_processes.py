"""Processes that have run nothing before, and a device's room that they share."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from gnnsys.bench.case import NotHere
from gnnsys.bench.jobs import fresh_processes
from gnnsys.bench.jobs.fresh_processes import DeviceRoom, FreshProcesses, call_in_fresh_process
from gnnsys.bench.jobs.imports_off_device import DEVICE_FILE
from tests.support.processes import await_true, run_code


def is_imported(name: str) -> bool:
    return name in sys.modules


def fails():
    raise ValueError("it was asked to")


@pytest.mark.long  # a process that imports torch
def test_each_call_has_a_process_of_its_own_and_errors_come_back():
    mine, theirs = os.getpid(), {call_in_fresh_process(os.getpid) for _ in range(3)}
    assert len(theirs) == 3 and mine not in theirs
    with pytest.raises(RuntimeError, match="ValueError: it was asked to"):
        call_in_fresh_process(fails)
    with pytest.raises(RuntimeError, match="a process of _exit ended with 7"):
        call_in_fresh_process(os._exit, 7)


def is_not_here():
    raise NotHere("there is no such device")


def leaves_thread() -> int:
    threading.Thread(target=threading.Event().wait, args=(600,)).start()
    return 3


@pytest.mark.long
def test_a_process_that_does_not_end_is_ended_and_what_is_not_here_has_not_failed(monkeypatch):
    monkeypatch.setattr(fresh_processes, "_END_SECONDS", 0.1)
    assert call_in_fresh_process(leaves_thread) == 3
    with pytest.raises(NotHere, match="no such device"):
        call_in_fresh_process(is_not_here)
    errors: list[str] = []
    running = FreshProcesses()

    def wait() -> None:
        with pytest.raises(RuntimeError) as error:
            running.call(never_ends)
        errors.append(str(error.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    await_true(lambda: len(running._running) == 1, "a process")
    running.end()
    with pytest.raises(RuntimeError, match="no process is started any more"):
        running.call(is_not_here)
    waiting.join(60)
    assert "ended with -9" in errors[0]


def never_ends() -> None:
    threading.Event().wait(600)


@pytest.mark.long
def test_pyg_is_imported_before_where_it_leaves_the_device_alone(monkeypatch):
    pytest.importorskip("torch_geometric")
    assert fresh_processes.start_forking()[-1] == "torch_geometric.nn"
    assert call_in_fresh_process(is_imported, "torch_geometric.nn")
    assert "GNNSYS_IMPORTS" not in os.environ, "other processes have nothing of it to import"
    monkeypatch.setattr(fresh_processes, "_TRIAL", "no_module_of_that_name")
    assert fresh_processes.start_forking.__wrapped__() == []


PACKAGE = {
    "whole/__init__.py": "import early, whole.late.part, helper, {touching}\nimport wave\n",
    "whole/late/__init__.py": "",
    "whole/late/part.py": "",
    "early.py": "import colorsys\n",
    "helper.py": "import whole\n",  # alone it imports all of that
    "touching.py": "import chunk_of_it\n{opens}",
    "quiet.py": "import importlib; importlib.import_module('touching')\n",  # no import statement
    "chunk_of_it.py": "",
}


@pytest.mark.parametrize("how", ["touching", "quiet"])
@pytest.mark.parametrize("touches", [True, False])
def test_what_is_imported_before_the_device_is_touched_may_be_imported_before(tmp_path: Path, touches: bool, how: str):
    """Not what touches it, and not what was only begun then."""
    (tmp_path / DEVICE_FILE).write_text("")
    opens = f"opened = open({str(tmp_path / DEVICE_FILE)!r})\n" if touches else ""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.format(opens=opens, touching=how))
    said = run_code(
        "import json, sys; from gnnsys.bench.jobs.imports_off_device import import_off_device\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "print(json.dumps(import_off_device('whole')), flush=True)",
        tmp_path,
    )
    found = json.loads(said.stdout.splitlines()[-1])
    assert {"early", "colorsys"} <= set(found)
    own = {"whole", "whole.late", "whole.late.part", "touching", "wave"}
    assert own & set(found) == (set() if touches else own)
    if not touches:
        assert found[-1] == "whole"
    (tmp_path / "listed.json").write_text(json.dumps(found))
    again = run_code(
        "import sys; from gnnsys.bench.jobs.imports_off_device import main\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "main(['--listed', sys.argv[1] + '/listed.json'])",
        tmp_path,
    )
    assert json.loads(again.stdout.splitlines()[-1]) == ([] if touches else found), "helper imports all of it"


def test_who_asks_for_more_than_is_left_waits_and_who_asks_for_too_much_is_told():
    room, entered = DeviceRoom(10), threading.Event()

    def second() -> None:
        with room.taken(5):
            entered.set()

    other = threading.Thread(target=second)
    with room.taken(6):
        other.start()
        assert not entered.wait(0.05), "five are not left"
    other.join(60)
    assert entered.is_set()
    with room.taken(10), pytest.raises(NotHere, match="GB are needed"), room.taken(11):
        pass
