"""Resets what jobs often change in a process, so that the next job starts as in a fresh one.

The next job waits for this, so it must be fast. It resets only what many scripts change and what it can surely reset.
The worker's fingerprint detects any other change, and then the worker is replaced.
"""

from __future__ import annotations

import _thread
import contextlib
import decimal
import gc
import inspect
import io
import json
import logging
import os
import signal
import site
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from gnnsys.jobs.fingerprint import Fingerprint
from gnnsys.jobs.job_spec import JOB_VARIABLES
from gnnsys.jobs.opened_files import watch_imports
from gnnsys.jobs.process_identity import descendants
from gnnsys.jobs.queue_folder import NO_ROOM

_THREAD_SECONDS = 2.0
_LOOK_SECONDS = 0.002
_MOST_COLLECTIONS = 5
_OF_CYTHON = ("cython_runtime", "_cython_")  # modules that extensions share, made in C
LoggerState: TypeAlias = tuple[list[Any], list[Any], int, bool, bool]  # handlers, filters, level, propagates, disabled
_NEW_LOGGER: LoggerState = ([], [], logging.NOTSET, True, False)


class _LogFile(io.FileIO):
    """What a job prints on a full disk is lost, and the job goes on."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return memoryview(data).nbytes


def _print_options() -> Any:
    return sys.modules["torch._tensor_str"].__dict__["PRINT_OPTS"]


def _log_stream(number: int, errors: str) -> io.TextIOWrapper:
    """Line by line: it can be read while the job runs, and after the job was killed."""
    raw = io.BufferedWriter(_LogFile(number, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


def _open_streams() -> None:
    """New ones for each job: the last one may have closed them, or changed how they write."""
    sys.stdout, sys.stderr = _log_stream(1, "strict"), _log_stream(2, "backslashreplace")


class FreshState:
    """Made once, when a worker is ready. `enter` before every job; after it `leftovers`, `restore` and `changes`.

    `restore` calls `release` once nothing of the job holds the memory that `release` frees. The process can run
    another job if it has no leftovers and no changes.
    """

    def __init__(self, threads: int, release: Callable[[], None] = lambda: None) -> None:
        self.threads, self._release = threads, release
        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._path, self._words = list(sys.path), list(sys.argv)
        self._filters = list(warnings.filters)
        self._loggers = {logger: _logger_state(logger) for logger in _loggers()}
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._mask = _umask()
        self._threads, self._num_threads = set(sys._current_frames()), _thread._count()
        self._stays = library_folders(self._path)
        self._modules, self._num_kept = dict(sys.modules), 0
        self._libraries: dict[str, Any] = {}  # that jobs have imported, or put there
        self._theirs: tuple[str, ...] = ()  # folders of the job
        self._collection, self._depth = gc.get_threshold(), sys.getrecursionlimit()
        self._printing = dict(vars(_print_options()))
        _open_streams()
        self._keep_modules()
        self._reset_signals()
        self._reset_torch()
        self._fingerprint = Fingerprint()

    def enter(self, folder: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        """To `folder`, with these variables, and with what they say of PYTHONPATH. All else is as `restore` left it."""
        os.chdir(folder or self._folder)
        os.environ.update(environment or {})
        os.environ[JOB_VARIABLES] = json.dumps(sorted(environment or {}))
        here = [] if folder is None else [folder]
        given = [] if environment is None else list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
        sys.path[:] = [*here, *given, *self._path]
        self._theirs = tuple(f"{os.path.realpath(each)}{os.sep}" for each in [*here, *given])
        sys.path_importer_cache.clear()  # files may have come since
        watch_imports()  # for graphs that jobs share: modules may keep what they read on import

    def restore(self) -> None:
        """As it was, but for libraries that the job has imported: they stay."""
        _open_streams()
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.path[:] = self._path
        sys.argv[:] = self._words
        warnings.filters[:] = self._filters  # type: ignore[index]
        os.umask(self._mask)
        self._reset_signals()
        self._forget_modules()
        self._reset_loggers()
        if "multiprocessing" in sys.modules:
            sys.modules["multiprocessing"].set_start_method(None, force=True)
        if (events := sys.modules.get("asyncio.events")) is not None:
            events.__dict__["_event_loop_policy"] = None  # as before the first `asyncio.run`
        decimal.setcontext(decimal.DefaultContext)  # which is copied
        sys.setrecursionlimit(self._depth)
        vars(_print_options()).update(self._printing)
        gc.enable()
        gc.set_threshold(*self._collection)
        _collect()
        self._release()
        _collect()
        self._keep_modules()
        self._reset_torch()

    def changes(self) -> list[str]:
        """What is not as it was, in words: such a worker ends, and another one takes its place."""
        return self._fingerprint.changes()

    def leftovers(self) -> str | None:
        """What a job has left running: such a worker ends too."""
        are_busy = self._are_others_busy()  # first: a thread that has not begun yet has no name
        deadline = time.monotonic() + _THREAD_SECONDS
        while (left := self._threads_left()) is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended by themselves
                pass
        children = descendants(os.getpid())
        if left is not None:
            return left
        if children:
            return f"processes {children}"
        return "threads of a library" if are_busy else None

    def _threads_left(self) -> str | None:
        """Those that the job has started, in words. One that runs a function of C has no name here."""
        left, num_more = set(sys._current_frames()) - self._threads, _thread._count() - self._num_threads
        if not left and num_more <= 0:
            return None
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return f"threads {', '.join(sorted(names.get(each, 'without a name') for each in left)) or num_more}"

    def _are_others_busy(self) -> bool:
        """Whether threads that Python does not know have yet to begin, or compute. Those of a pool soon sleep."""
        deadline = time.monotonic() + _THREAD_SECONDS
        known, before = {threading.get_native_id(), *self._native()}, _thread_times()
        while True:
            time.sleep(_LOOK_SECONDS)
            now = _thread_times()
            if all(now[each] == before.get(each) != "0" for each in now if each not in known):
                return False
            if time.monotonic() > deadline:
                return True
            before = now

    def _native(self) -> set[int]:
        return {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}

    def _reset_loggers(self) -> None:
        """Handlers and levels, of a library's loggers too. Those of a library that came with the job are its own."""
        for logger in _loggers():
            state = self._loggers.get(logger)
            if state is None and logger.name.partition(".")[0] in sys.modules:
                self._loggers[logger] = _logger_state(logger)
            elif _logger_state(logger) != (state or _NEW_LOGGER):
                handlers, filters, level, logger.propagate, logger.disabled = state or _NEW_LOGGER
                logger.handlers[:], logger.filters[:] = handlers, filters
                logger.setLevel(level)

    def _forget_modules(self) -> None:
        """Modules of users are imported anew by each job: they may have changed, on disk or in memory."""
        for key in [key for key in sys.modules if not isinstance(key, str)]:
            del sys.modules[key]
        sys.modules.update(self._modules)  # a job may have put others in their places, or removed them
        theirs = [name for name, module in list(sys.modules.items()) if self._is_of_user(name, module)]
        for name in theirs:  # a folder without __init__.py looks for the one that it is in: all are found before
            sys.modules.pop(name, None)

    def _keep_modules(self) -> None:
        """What is imported now is no garbage: to look through it takes longer than many a job."""
        if len(sys.modules) > self._num_kept:
            gc.freeze()
        self._num_kept = len(sys.modules)

    def _is_of_user(self, name: str, module: Any) -> bool:
        """Not what a library makes of itself in a folder that is not the job's, as PyG writes modules into a cache."""
        if name in self._modules:
            return False
        if module is None:  # by which a job keeps others from importing it
            return True
        if self._libraries.get(name) is module:
            return False
        is_part = self._is_part_of_library(name)
        place = _place(module, is_asked=not is_part)
        if place is None and not is_part and not _is_imported(name, module):
            return True
        if place is None or place.startswith(self._stays):
            self._libraries[name] = module
            return False
        if os.path.realpath(place).startswith(self._theirs) or not is_part:
            return True
        self._libraries[name] = module
        return False

    def _is_part_of_library(self, name: str) -> bool:
        """Whether the package that it is in is installed. A folder without __init__.py may have parts of users."""
        file = _path(_attribute(sys.modules.get(name.partition(".")[0]), "__file__"))
        return file is not None and file.startswith(self._stays)

    def _reset_signals(self) -> None:
        """Without alarms that a job has set: one would end the next job."""
        if threading.current_thread() is not threading.main_thread():
            return
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0.0)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _reset_torch(self) -> None:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = False
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()
            torch.cuda.reset_peak_memory_stats()


def _place(module: Any, is_asked: bool) -> str | None:
    """Its file; of a folder without __init__.py the folder. None where it has neither, "" where these are no paths.

    What lies in the module is looked at first. It is asked only then, and only if `is_asked`: a library's old name for
    a part of it imports that part when it is asked for anything, for seconds; an object of a user in the place of a
    module may have its file no other way.
    """
    found = _first_path(_attribute(module, "__file__"), _attribute(module, "__path__"))
    if found or not is_asked:
        return found or None
    try:
        return _first_path(getattr(module, "__file__", None), getattr(module, "__path__", None))
    except Exception:  # whatever a job has put there
        return ""


def _is_imported(name: str, module: Any) -> bool:
    """Whether a module without a file came by an import, and not as a stand-in that a job has made."""
    return getattr(_attribute(module, "__spec__"), "loader", None) is not None or name.startswith(_OF_CYTHON)


def _attribute(module: Any, name: str) -> Any:
    """What lies there, without asking the module."""
    try:
        return inspect.getattr_static(module, name, None)
    except Exception:  # whatever a job has put there
        return None


def _first_path(file: Any, folders: Any) -> str | None:
    if file is not None:
        return _path(file) or ""
    try:
        return next((_path(folder) or "" for folder in folders or ()), None)
    except Exception:  # a property, or whatever a job has put there
        return ""


def _path(found: Any) -> str | None:
    return os.fspath(found) if isinstance(found, (str, os.PathLike)) else None


def _collect() -> None:
    """All of it: what is called when one thing goes may let go of others."""
    for _ in range(_MOST_COLLECTIONS):
        if not gc.collect():
            break


def _loggers() -> list[logging.Logger]:
    known = logging.getLogger().manager.loggerDict.values()
    return [logging.getLogger(), *(each for each in list(known) if isinstance(each, logging.Logger))]


def _logger_state(logger: logging.Logger) -> LoggerState:
    return list(logger.handlers), list(logger.filters), logger.level, logger.propagate, logger.disabled


def _thread_times() -> dict[int, str]:
    """Nanoseconds that each thread of this process has computed."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found[int(task)] = Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]
    return found


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def library_folders(path: Sequence[str]) -> tuple[str, ...]:
    """Where libraries are, which stay imported: Python's own, installed ones, and this package."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_paths()[name] for name in names} | {site.getusersitepackages(), *site.getsitepackages()}
    folders |= {each for each in path if os.path.basename(each.rstrip(os.sep)) in ("site-packages", "dist-packages")}
    return tuple(f"{str(folder).rstrip(os.sep)}{os.sep}" for folder in [*folders, Path(__file__).parents[1]])
