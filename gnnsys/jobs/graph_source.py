"""What a shared graph is made of, and its name. Equal names are equal graphs, in every process.

A function's graph is named by all that it may depend on and that can be known before the call. The files that
it reads are stored with the graph, and a job that finds the graph later compares them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.graph import Graph, load
from gnnsys.jobs.fresh_state import library_folders
from gnnsys.jobs.generators import kept_generators
from gnnsys.jobs.graph_holder import HOLDER, JOB_DEVICE
from gnnsys.jobs.job_spec import JOB_VARIABLES
from gnnsys.jobs.opened_files import FileState, opened_files, opened_on_import, states_below

AnyShared: TypeAlias = Graph | dict[str, Tensor]
_MANIFEST = "manifest.json"
_START = Path("/proc/self/environ")
_HIDDEN = ("__self__", "__closure__", "__wrapped__")  # where a function keeps values that its name does not tell
# Variables that a worker or torch sets, and that say nothing of the job.
_NOT_OF_JOB = {
    JOB_VARIABLES, HOLDER, JOB_DEVICE, "PYTHONSAFEPATH", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip


class GraphSource:
    """`make` loads the graph or calls the function; after that `opened` has the files that were read on the way.

    `modules`: files of the user's modules that the function depends on. What they read on import counts as well.
    `seed` is where generators begin in the call, so that the graph is the same in whichever job it is made. The job's
    own generators are put back: a job that makes a graph draws what a job draws that finds it.
    """

    def __init__(
        self, name: str, make: Callable[..., Any], *, is_mapped: bool = False, seed: int | None = None,
        modules: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self._make, self._seed, self._modules = name, make, seed, modules
        self.is_mapped = is_mapped  # loaded, it is a map of its files, whose pages processes share
        self.opened: list[tuple[str, FileState]] = []

    @classmethod
    def of(
        cls, source: Any, arguments: Mapping[str, Any], depends: Sequence[str | os.PathLike[str]] | None = None
    ) -> GraphSource:
        text = _as_json(arguments)
        arguments = json.loads(text)  # what equal text gives every job: lists for tuples, names in order
        if isinstance(depends, str | os.PathLike):
            raise ValueError(f"depends must be a list of files and folders, got {depends!r}: write [{depends!r}]")
        if isinstance(source, str | os.PathLike):
            if depends is not None:
                raise ValueError("depends is for a function: a graph at a path depends on its own files alone")
            return cls._at_path(Path(source).resolve(), arguments, text)
        if not callable(source) or not hasattr(source, "__qualname__"):
            raise ValueError(f"source must be a path or a function, got a {type(source).__name__}")
        module, function = source.__module__, source.__qualname__
        if "<" in function or any(getattr(source, name, None) is not None for name in _HIDDEN):
            raise ValueError(
                f"source {function!r} is not known to other jobs by its name alone: give a function of a module, and "
                "what it needs as arguments"
            )
        modules = _sources_of(source)
        if depends is None:
            parts = [*modules.values(), *_surroundings()]
        else:
            parts = [*list(modules.values())[:1], repr([states_below(each) for each in depends])]
        return cls(
            _name(f"{module}:{function}", text, *parts),
            lambda: source(**arguments),
            seed=int.from_bytes(hashlib.sha256(f"{function}\0{text}".encode()).digest()[:4], "big"),
            modules=list(modules) if depends is None else None,
        )

    @classmethod
    def _at_path(cls, path: Path, arguments: Mapping[str, Any], text: str) -> GraphSource:
        if not path.exists():
            raise ValueError(f"source: there is no graph at {str(path)!r}")
        about = (path / _MANIFEST if (path / _MANIFEST).exists() else path).stat()
        state = f"{path} {about.st_dev} {about.st_ino} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"
        make = lambda **options: load(path, **{**arguments, **options})  # noqa: E731
        return cls(_name(path.name, state, text), make, is_mapped=path.is_dir())

    def make(self, **options: Any) -> AnyShared:
        """Loads it, or calls the function; ValueError where that returns something else."""
        if self._modules is not None:
            with kept_generators(self._seed), opened_files() as opened:
                made = self._make(**options)
            self.opened = [*opened.items(), *opened_on_import(self._modules)]
        elif self._seed is not None:
            with kept_generators(self._seed):
                made = self._make(**options)
        else:
            made = self._make(**options)
        if isinstance(made, Graph):
            return made
        if isinstance(made, Mapping) and all(isinstance(key, str) for key in made):
            return dict(made)
        raise ValueError(f"{self.name} returned a {type(made).__name__}: return a gnnsys Graph, or a dict of tensors")


def _name(label: str, *parts: str) -> str:
    digest = hashlib.sha256("\0".join([label, *parts]).encode()).hexdigest()[:12]
    return f"{label}#{digest}"


def _as_json(arguments: Mapping[str, Any]) -> str:
    """ValueError for arguments that JSON changes: `{1: 0}` and `{"1": 0}` have the same text."""
    try:
        text = json.dumps(arguments, sort_keys=True, allow_nan=False)
        is_same = json.loads(text) == _with_lists(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments of a shared graph must be JSON, got {dict(arguments)!r}: {error}") from error
    if not is_same:
        raise ValueError(f"arguments of a shared graph must be JSON, got {dict(arguments)!r}: names must be text")
    return text


def _with_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_lists(each) for name, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, list | tuple) else value


def _surroundings() -> list[str]:
    """What a function sees of its job: the folder, the job's variables, torch's defaults."""
    defaults = f"{torch.get_default_dtype()} {torch.get_default_device()}"
    return [os.getcwd(), json.dumps(_variables_of_job(), sort_keys=True), defaults]


def _variables_of_job() -> dict[str, str | None]:
    """In a job: the variables that it was given, and those that differ from the start of its process."""
    given = os.environ.get(JOB_VARIABLES)
    if given is None:
        return {}
    try:
        entries = os.fsdecode(_START.read_bytes()).split("\0")
    except OSError:  # it may not look at itself: all variables count
        entries = []
    start = {name: value for name, _, value in (entry.partition("=") for entry in entries if entry)}
    changed = {name for name in start.keys() | os.environ.keys() if start.get(name) != os.environ.get(name)}
    return {name: os.environ.get(name) for name in (changed - _NOT_OF_JOB) | set(json.loads(given or "[]"))}


def _sources_of(function: Callable[..., Any]) -> dict[str, str]:
    """The file that a function is written in, the user's modules that this file imports, and so on; with digests.

    Libraries are left out: a worker that runs keeps those that it has loaded.
    """
    try:
        first = inspect.getsourcefile(function)
    except TypeError:  # of C, or typed at a prompt
        first = None
    if first is None:
        return {}
    libraries = library_folders(sys.path)
    package = getattr(sys.modules.get(function.__module__), "__package__", None) or ""
    todo, digests = [(package, first)], dict[str, str]()
    while todo:
        package, file = todo.pop(0)
        if file in digests:
            continue
        try:
            source = Path(file).read_bytes()
        except OSError:
            continue
        digests[file] = hashlib.sha256(source).hexdigest()
        if not file.startswith(libraries):
            found = [_place_of(name) for name in _imported(package, source)]
            todo += [each for each in found if each is not None and not each[1].startswith(libraries)]
    return digests


@functools.lru_cache(maxsize=256)
def _imported(package: str, source: bytes) -> list[str]:
    """Names of the modules that a file of this package imports, in its order. Some may be names of other things."""
    names = []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            try:
                full = importlib.util.resolve_name(base, package) if node.level else base
            except ImportError:
                continue
            names += [full, *(f"{full}.{alias.name}" for alias in node.names)]
    whole = [".".join(name.split(".")[: at + 1]) for name in names for at in range(name.count(".") + 1)]
    return [name for name in dict.fromkeys(whole) if name.partition(".")[0] not in sys.stdlib_module_names]


def _place_of(name: str) -> tuple[str, str] | None:
    """The package and file of a Python module, found without importing it.

    So a graph's name does not depend on which modules the job has imported already.
    """
    path: Any = None
    parts = name.split(".")
    for at in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: at + 1]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and at < len(parts) - 1:
            return None
    file = spec.origin if spec is not None else None
    if file is None or not file.endswith(".py"):
        return None
    return (name if path is not None else name.rpartition(".")[0]), file
