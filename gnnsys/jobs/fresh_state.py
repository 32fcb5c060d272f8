"""What a job may change in a process, put back to how a fresh process has it: the next job sees nothing of it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnsys.jobs.process_identity import descendants

_THREAD_SECONDS = 2.0


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Inside the block generators may be drawn from; behind it they are where they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class FreshState:
    """Made once, when a worker is ready; `restore` before every job, `leftovers` after it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._path, self._words = list(sys.path), list(sys.argv)
        self._modules = set(sys.modules)
        self._streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
        self._filters = list(warnings.filters)
        self._handlers, self._level = list(logging.getLogger().handlers), logging.getLogger().level
        self._signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._threads = set(threading.enumerate())
        self._stays = _library_folders()
        gc.collect()
        gc.freeze()  # what was imported is no garbage: to look through it takes longer than many a job

    def restore(self, folder: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        """As it was, but in `folder`, with these variables, and with what they say of PYTHONPATH."""
        self._streams = tuple(
            os.fdopen(number, "w", closefd=False) if stream.closed else stream  # a job may close them
            for number, stream in zip((1, 2), self._streams, strict=True)
        )
        sys.stdout, sys.stderr = self._streams
        os.environ.clear()
        os.environ.update({**self._environment, **(environment or {})})
        os.chdir(folder or self._folder)
        here = [] if folder is None else [folder]
        given = [] if environment is None else filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:] = [*here, *given, *self._path]
        sys.argv[:] = self._words
        sys.path_importer_cache.clear()
        self._forget_modules()
        warnings.filters[:] = self._filters  # type: ignore[index]
        logging.getLogger().handlers[:] = self._handlers
        logging.getLogger().setLevel(self._level)
        for number, handler in self._signals.items():
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
        self._reset_torch()

    def leftovers(self) -> str | None:
        """What a job has left running that cannot be put back: such a worker ends, and another one takes its place."""
        deadline = time.monotonic() + _THREAD_SECONDS
        for thread in set(threading.enumerate()) - self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        threads = [
            thread.name for thread in set(threading.enumerate()) - self._threads
            if thread is not threading.current_thread()
        ]  # fmt: skip
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended by themselves
                pass
        children = descendants(os.getpid())
        if threads:
            return f"threads {', '.join(sorted(threads))}"
        return f"processes {children}" if children else None

    def _forget_modules(self) -> None:
        """Modules of users are imported anew by each job: they may have changed, on disk or in memory."""
        theirs = [name for name, module in list(sys.modules.items()) if self._is_of_user(name, module)]
        for name in theirs:  # a folder without __init__.py looks for the one that it is in: all are found before
            sys.modules.pop(name, None)

    def _is_of_user(self, name: str, module: Any) -> bool:
        if name in self._modules or module is None:
            return False
        try:
            file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
        except Exception:  # whatever a job has put there
            return True
        return file is not None and not str(file).startswith(self._stays)

    def _reset_torch(self) -> None:
        gc.collect()
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", False)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = False
        if torch.cuda.is_initialized():
            torch.set_autocast_enabled("cuda", False)
            torch.cuda.synchronize()
            clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()
            torch.cuda.reset_peak_memory_stats()


def _library_folders() -> tuple[str, ...]:
    """Where libraries are, which stay imported: Python's own, installed ones, and this package."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_paths()[name] for name in names}
    return tuple(f"{folder}{os.sep}" for folder in [*folders, Path(__file__).parents[1]])
