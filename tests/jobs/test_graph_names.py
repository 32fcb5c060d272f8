"""A job finds another job's graph only where the function would return it: whatever it reads, and wherever it draws."""

from __future__ import annotations

import importlib
import json
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnsys.jobs import GraphHolder, Queue, noted_graphs, release_graphs, shared_graph
from gnnsys.jobs.job_spec import JOB_VARIABLES
from gnnsys.jobs.opened_files import watch_imports
from tests.jobs.queue_jobs import FOLDER
from tests.jobs.queue_services import DEADLINE, service

DATA = """
import functools, glob, json, os, random, sqlite3, tempfile
from pathlib import Path
import numpy as np, torch
from graph_helper import SCALE

def count():
    with open(os.environ["TEST_GRAPHS_MADE"], "a") as file:
        file.write("x")

def made(value):
    count()
    return {"x": torch.tensor(float(value))}

def reads(path):
    return made(Path(path).read_text())

def updates(path):
    with open(path, "a+") as file:
        file.seek(0)
        return made(file.read())

def tries(path):
    try:
        return made(open(path).read())
    except FileNotFoundError:
        return made(-1)

def globs(path):
    return made(sum(float(Path(each).read_text()) for each in glob.glob(f"{path}/*.txt")))

def selects(path):
    with sqlite3.connect(path) as db:
        return made(db.execute("select value from t").fetchone()[0])

def asks(name):
    return made(os.environ.get(name, -1))

def scales():
    return made(SCALE)

def fills():
    count()
    return {"x": torch.ones(3) / 3}

def draws(seed=0):
    count()
    return {"x": torch.cat([torch.rand(4), torch.tensor([np.random.rand(), random.random()])])}

class Reader:
    value = 0

    def __init__(self, value):
        self.value = value

    def read(self):
        return made(self.value)

    @classmethod
    def default(cls):
        return made(cls.value)

class Other(Reader):
    value = 1

def times(factor):
    def decorate(function):
        @functools.wraps(function)
        def call():
            return {"x": function()["x"] * factor}
        return call
    return decorate

def one():
    return made(1)

two = times(2)(one)
bound = Reader(1).read
default = Other.default

def first(of):
    return made(next(iter(of)) if isinstance(of, dict) else of[0])

def writes(path):
    with tempfile.TemporaryFile() as file:
        file.write(b"1")
    Path(path).write_text("5")
    return reads(path)
"""


class Jobs:
    """Jobs of one queue in this process, one after the other; `num_made` calls of functions so far."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self._made = folder / "made"
        self._made.touch()
        self._patch.setenv("TEST_GRAPHS_MADE", str(self._made))
        (folder / "graph_data.py").write_text(DATA)
        self.write_helper("1.0")
        monkeypatch.syspath_prepend(str(folder))
        self.enter(folder)

    def write_helper(self, scale: str) -> None:
        (self.folder / "graph_helper.py").write_text(f"SCALE = {scale}  # {random.random()}\n")

    def enter(self, folder: Path, **variables: str) -> None:
        """The next job begins: its modules are imported again."""
        folder.mkdir(exist_ok=True)
        self._patch.chdir(folder)
        for name, value in variables.items():
            self._patch.setenv(name, value)
        self._patch.setenv(JOB_VARIABLES, json.dumps(sorted(variables)))
        for name in ("graph_data", "graph_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.path_importer_cache.clear()
        watch_imports()

    def set_variable(self, name: str, value: str) -> None:
        """As a job does by itself, in os.environ."""
        self._patch.setenv(name, value)

    @property
    def num_made(self) -> int:
        return len(self._made.read_text())

    def get(self, function: str, **arguments: Any) -> torch.Tensor:
        return self.get_by_depends(function, None, **arguments)

    def get_by_depends(self, function: str, depends: list[Path] | None, **arguments: Any) -> torch.Tensor:
        source = getattr(importlib.import_module("graph_data"), function)
        found = shared_graph(source, arguments, depends=depends)["x"].clone()
        release_graphs()
        return found

    def alone(self, function: str, **arguments: Any) -> torch.Tensor:
        """What the function gives outside of a queue."""
        with self._patch.context() as patch:
            patch.delenv("GNNSYS_GRAPH_HOLDER")
            return shared_graph(getattr(importlib.import_module("graph_data"), function), arguments, device="cpu")["x"]


@pytest.fixture
def jobs(holder: GraphHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    made = Jobs(tmp_path, monkeypatch)
    yield made
    made.enter(tmp_path)


def write_database(path: Path, value: float) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("create table if not exists t (value)")
        db.execute("delete from t")
        db.execute("insert into t values (?)", (value,))


def another_folder(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    jobs.enter(jobs.folder / f"of {value}")
    Path("value.txt").write_text(str(value))
    return "reads", {"path": "value.txt"}


def a_file_below(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    (jobs.folder / "data.txt").write_text(str(value))
    jobs.enter(jobs.folder)
    return "reads", {"path": str(jobs.folder / "data.txt")}


def a_file_that_was_not_there(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    if value > 1:
        (jobs.folder / "perhaps.txt").write_text(str(value))
    jobs.enter(jobs.folder)
    return "tries", {"path": str(jobs.folder / "perhaps.txt")}


def a_file_more(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    (jobs.folder / "many").mkdir(exist_ok=True)
    (jobs.folder / "many" / f"{value}.txt").write_text(str(value))
    jobs.enter(jobs.folder)
    return "globs", {"path": str(jobs.folder / "many")}


def a_database(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    write_database(jobs.folder / "data.db", value)
    jobs.enter(jobs.folder)
    return "selects", {"path": str(jobs.folder / "data.db")}


def a_variable(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    jobs.enter(jobs.folder, TEST_GRAPH_VALUE=str(value))
    return "asks", {"name": "TEST_GRAPH_VALUE"}


def a_variable_that_the_job_sets(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    jobs.enter(jobs.folder)
    jobs.set_variable("TEST_GRAPH_VALUE", str(value))
    return "asks", {"name": "TEST_GRAPH_VALUE"}


def a_file_that_is_updated(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    (jobs.folder / "updated.txt").write_text(str(value))
    jobs.enter(jobs.folder)
    return "updates", {"path": str(jobs.folder / "updated.txt")}


def a_file_with_the_time_of_another(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    (jobs.folder / "old.txt").write_text(str(value))
    os.utime(jobs.folder / "old.txt", (1, 1))
    jobs.enter(jobs.folder)
    return "reads", {"path": str(jobs.folder / "old.txt")}


def a_file_that_a_module_reads(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    (jobs.folder / "scale.txt").write_text(str(value))
    if value == 1:
        jobs.write_helper("float(open(__file__.replace('graph_helper.py', 'scale.txt')).read())")
    jobs.enter(jobs.folder)
    return "scales", {}


def a_module_that_its_own_imports(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    jobs.write_helper(f"{value} + {'0 + ' * value} 0")  # a new size: Python's own cache of modules goes by seconds
    jobs.enter(jobs.folder)
    return "scales", {}


def a_default_dtype(jobs: Jobs, value: int) -> tuple[str, dict[str, Any]]:
    jobs.enter(jobs.folder)
    torch.set_default_dtype(torch.float64 if value % 2 else torch.float32)
    return "fills", {}


CHANGES: tuple[Callable[[Jobs, int], tuple[str, dict[str, Any]]], ...] = (
    another_folder,
    a_file_below,
    a_file_that_was_not_there,
    a_file_more,
    a_database,
    a_variable,
    a_variable_that_the_job_sets,
    a_file_that_is_updated,
    a_file_with_the_time_of_another,
    a_file_that_a_module_reads,
    a_module_that_its_own_imports,
    a_default_dtype,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_gets_what_its_function_returns_for_it_and_shares_it_with_its_like(change, jobs: Jobs) -> None:
    try:
        seen = []
        for value in (1, 2):
            function, arguments = change(jobs, value)
            before = jobs.num_made
            found = [jobs.get(function, **arguments) for _ in range(2)]
            assert jobs.num_made == before + 1, "one of the two made it"
            wanted = jobs.alone(function, **arguments)
            assert all(torch.equal(each, wanted) and each.dtype == wanted.dtype for each in found)
            seen.append(wanted)
        assert seen[0].dtype != seen[1].dtype or not torch.equal(*seen), "the case changes nothing"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("function", ["bound", "default", "two"])
def test_a_function_that_keeps_values_of_its_own_is_refused(function: str, jobs: Jobs) -> None:
    with pytest.raises(ValueError, match="give a function of a module, and what it needs as arguments"):
        jobs.get(function)


def test_arguments_reach_the_function_as_the_json_that_names_the_graph(jobs: Jobs) -> None:
    assert jobs.get("first", of=(3, 4)).item() == jobs.get("first", of=[3, 4]).item() == 3
    assert jobs.get("first", of={"5": 0, "6": 0}).item() == jobs.get("first", of={"6": 0, "5": 0}).item() == 5
    assert jobs.num_made == 2
    with pytest.raises(ValueError, match=r"must be JSON, got .*: names must be text"):
        jobs.get("first", of={5: 0})


def states() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), np.random.randn()


def test_who_makes_a_graph_draws_what_who_finds_it_draws_and_the_graph_is_the_same_alone(jobs: Jobs) -> None:
    found = []
    for seed in (1, 2, 3):  # of jobs
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        np.random.randn()  # numpy keeps the second one of a pair
        if seed == 1:
            wanted = jobs.alone("draws")
        else:
            found.append(jobs.get("draws"))
        found.append(states())
    assert found[0] == found[2] == found[4] and jobs.num_made == 2
    assert torch.equal(found[1], wanted) and torch.equal(found[3], wanted)
    assert not torch.equal(jobs.get("draws", seed=1), wanted), "arguments seed it"
    bits = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        assert torch.equal(jobs.alone("draws"), wanted), "whatever numpy draws by"
        assert type(np.random.get_bit_generator()) is np.random.PCG64
    finally:
        np.random.set_bit_generator(bits)


def test_depends_replaces_the_guess(jobs: Jobs) -> None:
    data = jobs.folder / "inputs"
    data.mkdir()
    (data / "a.txt").write_text("1")
    names = []

    def get(**variables: str) -> float:
        with noted_graphs() as noted:
            value = jobs.get_by_depends("globs", [data], path=str(data)).item()
        names.extend(noted.graphs)
        return value

    assert get() == 1.0
    jobs.enter(jobs.folder / "elsewhere", TEST_GRAPH_VALUE="9")
    assert get() == 1.0 and jobs.num_made == 1 and names[0] == names[1]
    (data / "b.txt").write_text("2")
    assert get() == 3.0 and jobs.num_made == 2 and names[2] != names[0]
    for depends, said in (([data / "none"], "no file or folder"), (data, "must be a list of files")):
        with pytest.raises(ValueError, match=said):
            jobs.get_by_depends("globs", depends, path=str(data))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depends is for a function"):
        shared_graph(data, depends=[data])


def test_what_a_function_writes_itself_and_what_jobs_import_beside_it_change_nothing(jobs: Jobs) -> None:
    path = str(jobs.folder / "own.txt")
    assert jobs.get("writes", path=path).item() == 5.0
    (jobs.folder / "unrelated.py").write_text("import graph_helper\n")
    jobs.enter(jobs.folder)
    importlib.import_module("unrelated")
    with tempfile.NamedTemporaryFile():  # the folder of temporary files changes
        assert jobs.get("writes", path=path).item() == 5.0
    assert jobs.num_made == 1


ON_IMPORT = """
from pathlib import Path
import torch
from gnnsys.jobs import shared_graph
from tests.jobs.queue_jobs import linear

VALUE = float(Path("value.txt").read_text())

def features():
    return {"x": torch.full((8,), VALUE)}

def job():
    x = shared_graph(features, device="cpu")["x"]
    return linear(evaluate=lambda model: {"sum": x.double().sum().item()})
"""


def test_a_job_of_a_queue_gets_no_graph_of_what_another_ones_modules_have_read(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ON_IMPORT)
    with service(queue.folder.path, workers=1) as running:
        for value in (1, 2):
            (tmp_path / "value.txt").write_text(str(value))
            queue.submit("own:job", folder=tmp_path, environment={"PYTHONPATH": str(FOLDER)}, memory="1M")
            (ended,) = running.run_until_empty(DEADLINE)
            assert ended.result["sum"] == 8 * value, ended.error


JOB = """
import os, torch
from pathlib import Path
from gnnsys.jobs import shared_graph
from tests.jobs.queue_jobs import linear

def features():
    with open(os.environ["MADE"], "a") as file:
        file.write("x")
    return {"x": torch.rand(8) + float(Path("value.txt").read_text()) + float(os.environ["SHIFT"])}

def job():
    x = shared_graph(features, device="cpu")["x"]
    return linear(evaluate=lambda model: {"sum": x.double().sum().item()})
"""


def test_jobs_of_a_queue_get_their_own_graphs_and_share_equal_ones(queue: Queue, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "own.py").write_text(JOB)
        (folder / "value.txt").write_text(str(number))
        for shift in ("0", "10"):
            variables = {"SHIFT": shift, "MADE": str(made), "PYTHONPATH": str(FOLDER)}
            for _ in range(2):
                queue.submit("own:job", folder=folder, environment=variables, memory="1M")
    with service(queue.folder.path, workers=1) as running:
        ended = running.run_until_empty(DEADLINE)
    sums = [job.result["sum"] for job in ended]
    base = sums[0]
    assert [round(each - base) for each in sums] == [0, 0, 80, 80, 8, 8, 88, 88], [job.error for job in ended]
    assert len({job.result["weights"] for job in ended}) == 1, "who made a graph has drawn nothing for it"
    assert len(made.read_text()) == 4
    assert os.environ.get(JOB_VARIABLES) is None
