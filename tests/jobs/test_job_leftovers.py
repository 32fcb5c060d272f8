"""What a job does to its process, and leaves behind, is neither the next job's nor the service's."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from gnnsys.jobs import JobState, Queue
from tests.jobs.queue_jobs import FOLDER, NAME
from tests.jobs.queue_services import DEADLINE, expected, run_until, service, submit
from tests.support.processes import alive, await_true, run_code

KINDS = ({"kind": "whole", "hidden": 4}, {"kind": "loader", "epochs": 2}, {"kind": "torch"})


def test_what_a_job_does_to_its_process_is_its_own(queue: Queue, tmp_path: Path):
    escaped = submit(queue, "escapes", {"at": str(tmp_path / "pid")}, memory="1M")
    failing = {
        submit(queue, "interrupts", memory="1M"): "KeyboardInterrupt: of its own",
        submit(queue, "says_odd_things", memory="1M"): "RuntimeError: half a ? character",
        submit(queue, "boasts", memory="1M"): "at most 1048576: write a file",
    }
    odd = [submit(queue, name, memory="1M") for name in ("closes_its_output", "writes_to_all_pipes")]
    after = submit(queue, "job", dict(KINDS[0]), memory="1M")
    with service(queue.folder.path, workers=1) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    for number, said in failing.items():
        assert ended[number].state is JobState.FAILED and ended[number].attempts <= 2, "once more in a fresh process"
        assert said in ended[number].error
    assert ended[escaped].state is JobState.DONE and all(ended[number].state.is_over for number in odd)
    assert ended[after].result == expected(dict(KINDS[0])) and queue.logs(after) == "hidden 4, seed 0\n"
    child = int((tmp_path / "pid").read_text())
    await_true(lambda: not alive(child), "the end of a process that left its group")


def test_a_module_in_a_folder_without_init_is_forgotten_by_the_next_job(queue: Queue, tmp_path: Path):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "module.py").write_text(f"from {NAME} import linear as job\n")
    environment = {"PYTHONPATH": str(FOLDER)}
    with service(queue.folder.path, workers=1) as running:
        seen = []
        for _ in range(2):
            queue.submit("outer.inner.module:job", folder=tmp_path, environment=environment, memory="1M")
            (ended,) = running.run_until_empty(DEADLINE)
            assert ended.state is JobState.DONE
            run_until(running, lambda: len(running.pool.idle) == 1)
            seen.append(running.pool.idle[0])
    assert seen[0] is seen[1], "it was not lost"


def test_a_library_that_one_job_imports_is_there_for_the_next_and_costs_it_nothing(queue: Queue):
    numbers = [submit(queue, "imports_library", memory="1M") for _ in range(3)]
    with service(queue.folder.path, workers=1) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert [ended[number].result["looks"] for number in numbers] == [True, False, False], ended


KEEPS = f"""
import gc, mailbox, os, weakref
from {NAME} import linear

class Kept: pass
KEPT = Kept()  # such as a data set

class Owner:  # in a cycle, and with something to call when it goes: the collector needs two passes for this module
    def __init__(self):
        self.me = self
        weakref.finalize(self, gone)

def gone(): pass

def job(at):
    gc.disable()  # so that nobody else looks
    weakref.finalize(KEPT, os.mkdir, at)
    made = linear()
    made.model.__dict__["owner"] = Owner()
    return made
"""


def test_what_a_module_of_a_job_keeps_is_gone_before_the_next(queue: Queue, tmp_path: Path):
    (tmp_path / "keeps.py").write_text(KEEPS)
    at, environment = {"at": str(tmp_path / "gone")}, {"PYTHONPATH": str(FOLDER)}
    queue.submit("keeps:job", at, folder=tmp_path, environment=environment, memory="1M")
    number = submit(queue, "tells_file", at, memory="1M")
    with service(queue.folder.path, workers=1) as running:
        running.run_until_empty(DEADLINE)
    assert queue.show(number).result["there"]


def test_settings_of_the_interpreter_are_those_of_a_fresh_process(queue: Queue):
    fresh = {
        "collects": True,
        "threshold": list(gc.get_threshold()),
        "half": str(torch.get_autocast_dtype("cpu")),
        "library": "wave",
        "other": "csv",
    }
    submit(queue, "changes_settings", memory="1M")
    number = submit(queue, "tells_settings", memory="1M")
    with service(queue.folder.path, workers=1) as running:
        running.run_until_empty(DEADLINE)
    assert {name: queue.show(number).result[name] for name in fresh} == fresh


MADE_OF_ITSELF = f"""
import importlib.util, mailbox, sys
from {NAME} import linear

def job(at):
    is_there = "mailbox.made" in sys.modules
    spec = importlib.util.spec_from_file_location("mailbox.made", at)
    sys.modules["mailbox.made"] = importlib.util.module_from_spec(spec)
    return linear(evaluate=lambda model: {{"is_there": is_there}})
"""


def test_what_a_library_makes_of_itself_in_another_folder_stays(queue: Queue, tmp_path: Path):
    """As PyG does: it would make it anew in each job, which takes longer than many a job."""
    folder = tmp_path / "of the job"
    folder.mkdir()
    (folder / "own.py").write_text(MADE_OF_ITSELF)
    (tmp_path / "made.py").write_text("")
    given, environment = {"at": str(tmp_path / "made.py")}, {"PYTHONPATH": str(FOLDER)}
    numbers = [
        queue.submit("own:job", given, folder=folder, environment=environment, memory="1M", seed=seed)
        for seed in range(2)
    ]
    with service(queue.folder.path, workers=1) as running:
        running.run_until_empty(DEADLINE)
    assert [queue.show(number).result["is_there"] for number in numbers] == [False, True]


INSTEAD_OF_A_LIBRARY = f"""
import mailbox, sys
from {NAME} import linear

def job(own=False):
    if own:
        del sys.modules["mailbox"]
        import mailbox as other
        assert other.OWN
    return linear(evaluate=lambda model: {{"own": hasattr(sys.modules["mailbox"], "OWN")}})
"""


def test_a_module_of_a_user_goes_though_a_library_of_its_name_was_imported(queue: Queue, tmp_path: Path):
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "own.py").write_text(INSTEAD_OF_A_LIBRARY)
    (tmp_path / "1" / "mailbox.py").write_text("OWN = True\n")
    environment = {"PYTHONPATH": str(FOLDER)}
    numbers = [
        queue.submit("own:job", {"own": each == "1"}, folder=tmp_path / each, environment=environment, memory="1M")
        for each in "012"
    ]
    with service(queue.folder.path, workers=1) as running:
        running.run_until_empty(DEADLINE)
    assert [queue.show(number).result["own"] for number in numbers] == [False, True, False]


CALLED_AS_A_LIBRARY = f"""
import mailbox, sys
from importlib.util import module_from_spec, spec_from_file_location
from {NAME} import linear

def job(at):
    spec = spec_from_file_location("mailbox.own", at)
    sys.modules.setdefault("mailbox.own", module_from_spec(spec))
    own = sys.modules["mailbox.own"]
    if not hasattr(own, "VALUE"):
        spec.loader.exec_module(own)
    return linear(evaluate=lambda model: {{"value": own.VALUE}})
"""


def test_a_file_of_a_user_is_read_anew_by_each_job_whatever_it_is_called(queue: Queue, tmp_path: Path):
    (tmp_path / "own.py").write_text(CALLED_AS_A_LIBRARY)
    given, environment, told = {"at": str(tmp_path / "part.py")}, {"PYTHONPATH": str(FOLDER)}, []
    with service(queue.folder.path, workers=1) as running:
        for value in (1, 22):
            (tmp_path / "part.py").write_text(f"VALUE = {value}\n")
            number = queue.submit("own:job", given, folder=tmp_path, environment=environment, memory="1M")
            running.run_until_empty(DEADLINE)
            told.append(queue.show(number).result["value"])
    assert told == [1, 22]


def test_the_first_job_of_a_worker_has_what_the_next_ones_have():
    said = run_code(
        "import torch; from gnnsys.jobs.fresh_state import FreshState\n"
        "torch.set_float32_matmul_precision('high')\n"
        "FreshState(1)\n"
        "print(torch.get_float32_matmul_precision(), flush=True)"
    )
    assert "highest" in said.stdout


def test_graphs_are_released_when_the_jobs_modules_are_gone_and_before_memory_is_given_back(tmp_path: Path):
    (tmp_path / "own.py").write_text("")
    said = run_code(
        "import sys, torch; from gnnsys.jobs.fresh_state import FreshState\n"
        "seen = []\n"
        "state = FreshState(1, release=lambda: seen.append(('own' in sys.modules, torch.get_default_dtype())))\n"
        "state.enter(sys.argv[1])\n"
        "import own; torch.set_default_dtype(torch.float64)\n"
        "state.restore()\n"
        "print(seen, torch.get_default_dtype(), flush=True)",
        tmp_path,
    )
    assert "[(False, torch.float64)] torch.float32" in said.stdout


def test_a_part_of_a_library_that_imports_when_it_is_asked_is_not_asked(tmp_path: Path):
    """A library's old name for a part that nobody has used yet: what it would import takes longer than many a job."""
    said = run_code(
        "import pytest, sys, types; from gnnsys.jobs.fresh_state import FreshState\n"
        "asked = []\n"
        "class OldName(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        asked.append(name)\n"
        "        raise AttributeError(name)\n"
        "state = FreshState(1)\n"
        "state.enter(sys.argv[1])\n"
        "sys.modules['pytest.old'] = OldName('pytest.old')\n"
        "state.restore()\n"
        "print(asked, 'pytest.old' in sys.modules, flush=True)",
        tmp_path,
    )
    assert "[] True" in said.stdout


FORWARDS = """
import sys, types
class Forwards({base}):
    def __init__(self, inner, *args):
        super().__init__(*args)
        self.__dict__["inner"] = inner
    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)
sys.modules[__name__] = Forwards(sys.modules[__name__]{name})
"""
LIBRARY = """
import json, pathlib, sys
path = json.__file__
class Slot:
    __slots__ = ("__file__",)
class Property:
    __file__ = property(lambda self: path)
slot = Slot()
slot.__file__ = path
plain = type(sys)("plain_path")
plain.__file__ = pathlib.Path(path)
sys.modules |= {"with_slot": slot, "with_property": Property(), "plain_path": plain}
"""


def test_modules_of_users_go_and_libraries_stay_however_they_tell_their_file(tmp_path: Path):
    (tmp_path / "wraps.py").write_text(FORWARDS.format(base="object", name=""))
    (tmp_path / "wraps_as_module.py").write_text(FORWARDS.format(base="types.ModuleType", name=", __name__"))
    (tmp_path / "own.py").write_text(LIBRARY)
    said = run_code(
        "import sys; from gnnsys.jobs.fresh_state import FreshState\n"
        "state = FreshState(1)\n"
        "state.enter(sys.argv[1])\n"
        "import own, wraps, wraps_as_module\n"
        "sys.modules['no path'] = type('X', (), {'__file__': 5})()\n"
        "state.restore()\n"
        "names = ['own', 'wraps', 'wraps_as_module', 'no path', 'with_slot', 'with_property', 'plain_path']\n"
        "print([name for name in names if name in sys.modules], flush=True)",
        tmp_path,
    )
    assert "['with_slot', 'with_property', 'plain_path']" in said.stdout, said


def test_what_a_script_has_sent_into_a_session_of_its_own_ends_with_it(queue: Queue, tmp_path: Path):
    (tmp_path / "leave.py").write_text(
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():\n"
        "    time.sleep(0.01)\n"
    )
    queue.submit("leave.py", words=[str(tmp_path / "pid")], folder=tmp_path, memory="1M")
    with service(queue.folder.path) as running:
        running.run_until_empty(DEADLINE)
    child = int((tmp_path / "pid").read_text())
    await_true(lambda: not alive(child), "the end of a process that left its group")


def test_a_job_that_writes_answers_of_its_worker_harms_no_other(queue: Queue, tmp_path: Path):
    forged = submit(queue, "forges", {"at": str(tmp_path / "forged")}, memory="1M")
    after = submit(queue, "job", dict(KINDS[0]), memory="1M")
    with service(queue.folder.path, workers=1) as running:
        ended = {job.number: job for job in running.run_until_empty(DEADLINE)}
    assert (ended[forged].state, ended[forged].attempts) == (JobState.DONE, 2)
    assert ended[after].result == expected(dict(KINDS[0]))


def test_alarms_and_the_mask_of_a_job_are_not_those_of_the_next(queue: Queue):
    submit(queue, "sets_alarm", memory="1M")
    number = submit(queue, "tells_alarm", memory="1M")
    with service(queue.folder.path, workers=1) as running:
        running.run_until_empty(DEADLINE)
    result = queue.show(number).result
    assert (result["alarm"], result["handler"]) == (0.0, True) and result["mask"] != 0o777


def test_what_a_job_prints_on_a_full_disk_is_lost_and_no_job_with_it(queue: Queue):
    numbers = [submit(queue, "job", dict(KINDS[0]), memory="1M") for _ in range(2)]
    with service(queue.folder.path, workers=1) as running:
        queue.folder.log(numbers[0]).symlink_to("/dev/full")
        ended = running.run_until_empty(DEADLINE)
    assert [(job.state, job.attempts) for job in ended] == [(JobState.DONE, 1)] * 2
    assert queue.logs(numbers[1]) == "hidden 4, seed 0\n"
