"""What a process is like apart from the job that it runs: modes, flags, hooks, limits, generators, patched functions.

A worker compares its fingerprint after each job with that of its start, and is replaced where they differ. So we
need not know how a job changed something, only that it did.

A library that a job imports stays imported, and may register things and patch others. Such changes are accepted: those
of `_OF_IMPORTS`, and functions that are replaced by those of a library that was imported since.
"""

from __future__ import annotations

import ctypes
import decimal
import faulthandler
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.modules.module as torch_modules
import torch.optim.optimizer as torch_optimizers

# Getters of torch._C without arguments. One that this torch does not have is left out.
_TORCH = """
    _get_autograd_fallback_mode _get_backcompat_broadcast_warn _get_backcompat_keepdim_warn
    _get_blas_preferred_backend _get_cpu_allow_fp16_reduced_precision_reduction
    _get_cublas_allow_bf16_reduced_precision_reduction _get_cublas_allow_fp16_accumulation
    _get_cublas_allow_fp16_reduced_precision_reduction _get_cublas_allow_tf32 _get_cudnn_allow_tf32
    _get_cudnn_benchmark _get_cudnn_deterministic _get_cudnn_enabled _get_cudnn_sdp_enabled _get_default_device
    _get_deterministic_algorithms _get_deterministic_algorithms_warn_only _get_deterministic_fill_uninitialized_memory
    _get_flash_sdp_enabled _get_float32_matmul_precision _get_linalg_preferred_backend
    _get_math_sdp_allow_fp16_bf16_reduction _get_math_sdp_enabled _get_mem_efficient_sdp_enabled
    _get_mkldnn_deterministic _get_mkldnn_enabled _get_nnpack_enabled _get_onednn_allow_tf32
    _get_overrideable_sdp_enabled _get_qengine _get_sdp_priority_order _get_torch_function_state _get_tracing_state
    _get_warnAlways _is_any_autocast_enabled _is_fwd_grad_enabled _is_grad_layout_enforcement_enabled
    _is_multithreading_enabled _is_torch_function_all_disabled _is_torch_function_enabled
    _is_torch_function_mode_enabled _is_tracing _is_view_replay_enabled _len_torch_dispatch_stack
    _len_torch_function_stack _dispatch_tls_local_exclude_set _dispatch_tls_local_include_set get_default_dtype
    get_num_interop_threads get_num_threads is_anomaly_check_nan_enabled is_anomaly_enabled is_autocast_cache_enabled
    is_grad_enabled is_inference_mode_enabled
"""
_PRECISIONS = [("generic", "all")] + [
    (where, what) for where in ("mkldnn", "cuda") for what in ("all", "matmul", "conv", "rnn")
]
_STATUS = (
    "Umask Uid Gid Groups SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Seccomp_filters "
    "THP_enabled Cpus_allowed Mems_allowed VmLck"
)
_FILES = ("oom_score_adj", "personality", "coredump_filter", "timerslack_ns")
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_PRCTLS = {"its signal at its parent's death": 2, "its place as a reaper": 37}
_OF_IMPORTS = {
    "ops",
    "trees",
    "picklers",
    "finders",
    "builtins",
    "C variables",
    "caught signals",
    "names of log levels",
    "open files",
}
_WATCHED = (
    "torch torch.nn torch.optim torch.autograd torch.utils.data torch.linalg torch.fft torch.random torch.functional "
    "torch.serialization torch._tensor torch.overrides torch.distributions torch.amp torch.cuda.random torch.backends "
    "torch.multiprocessing numpy numpy.random numpy.linalg random math builtins os posixpath time json copy warnings "
    "logging threading gnnsys"
)
_WHOLE = ("torch.nn", "torch.optim", "torch.autograd", "torch.utils.data", "torch.distributions", "torch.backends",
          "gnnsys")  # fmt: skip
_MOST_GROWTH = 512 << 20
_libc = ctypes.CDLL(None)


class Fingerprint:
    """A worker's state at its start. `changes` lists what a job changed; if it is empty, the worker goes on."""

    def __init__(self) -> None:
        self._libraries = set(sys.modules)
        self._packages = {name.partition(".")[0] for name in self._libraries} | sys.stdlib_module_names
        self._patches = WatchedFunctions()
        self._memory = _anonymous_bytes()
        self._before = read_settings()

    def changes(self) -> list[str]:
        """What differs now, in words. What a newly imported library has changed is taken as it is."""
        now = read_settings()
        imported = set(sys.modules) - self._libraries
        names = [name for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name)]
        libraries = {name.partition(".")[0] for name in imported} - self._packages
        if libraries:
            names = [name for name in names if name not in _OF_IMPORTS]
            self._before |= {name: now[name] for name in _OF_IMPORTS}
            self._packages |= libraries
        self._libraries |= imported
        changed = sorted(names) + self._patches.changes(imported)
        if _anonymous_bytes() > self._memory + _MOST_GROWTH:
            getattr(_libc, "malloc_trim", lambda _: None)(0)
            if (grown := _anonymous_bytes() - self._memory) > _MOST_GROWTH:
                changed.append(f"memory, by {grown >> 20} MiB")
        return changed


class WatchedFunctions:
    """Functions, classes and constants of modules that users patch: torch, numpy, Python's own, this package."""

    def __init__(self) -> None:
        self._spaces: list[tuple[str, Mapping[str, Any], list[str], list[Any]]] = []
        self._classes: list[tuple[str, type, set[str]]] = []
        seen = set[int]()
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and _is_watched(name):
                space = vars(module)
                self._add(name, space, lambda key, value: callable(value))
                for each in list(space.values()):
                    if isinstance(each, type) and id(each) not in seen and each.__module__ == name:
                        seen.add(id(each))
                        self._add(f"{name}.{each.__name__}", each.__dict__, _is_constant)
                        self._classes.append((f"{name}.{each.__name__}", each, set(each.__dict__)))
        self._add("math", vars(sys.modules["math"]), _is_constant)

    def _add(self, name: str, space: Mapping[str, Any], takes: Callable[[str, Any], bool]) -> None:
        items = [(key, value) for key, value in list(space.items()) if takes(key, value)]
        self._spaces.append((name, space, [key for key, _ in items], [value for _, value in items]))

    def changes(self, imported: set[str]) -> list[str]:
        """Names whose object was replaced, except by an object from a module in `imported`."""
        changed = []
        for name, kind, before in self._classes:
            if len(kind.__dict__) != len(before):
                new = {key for key in kind.__dict__ if key not in before and not key.startswith(("__", "_abc"))}
                if not imported:
                    changed += [f"{name}.{key}" for key in sorted(new)]
                before |= new
        for name, space, keys, values in self._spaces:
            if list(map(space.get, keys)) == values:  # quick: what is identical is not compared
                continue
            for at, key in enumerate(keys):
                now = space.get(key)
                if now is not values[at] and now != values[at]:
                    if getattr(now, "__module__", None) in imported or _is_wrapped_by_torch(now, values[at]):
                        values[at] = now
                    else:
                        changed.append(f"{name}.{key}")
        return changed


def read_settings() -> dict[str, Any]:
    """By name, values that compare by `==`. No operator runs: a job may have left a mode that would see it."""
    return {**_of_torch(), **_of_python(), **_of_numpy(), **_of_kernel()}


def _of_torch() -> dict[str, Any]:
    inner: Any = torch._C
    names = [name for name in _TORCH.split() if hasattr(inner, name)]
    found: dict[str, Any] = {f"torch's {name.strip('_')}": str(getattr(inner, name)()) for name in names}
    for kind in ("cpu", "cuda"):
        found[f"torch's autocast on {kind}"] = inner.is_autocast_enabled(kind), inner.get_autocast_dtype(kind)
    if hasattr(inner, "_get_fp32_precision_getter"):
        found["torch's precisions"] = [_precision(*each) for each in _PRECISIONS]
    found["hooks of saved tensors"] = (
        id(inner._autograd._top_saved_tensors_default_hooks(True)) if _has_saved_hooks() else None,
        inner._autograd._saved_tensors_hooks_is_enabled(),
    )
    found["functorch's levels"] = getattr(inner._functorch, "get_dynamic_layer_stack_depth", int)()
    for module in (torch_modules, torch_optimizers):
        for name, hooks in vars(module).items():
            if name.startswith("_global_"):
                found[f"hooks of all modules ({name})"] = hooks if hooks is None else str(hooks)
    found["levels of forward gradients"] = sys.modules["torch.autograd.forward_ad"].__dict__.get("_current_level")
    found["default generator"] = id(torch.default_generator), id(torch.random.default_generator)
    found["the process group"] = torch.distributed.is_available() and torch.distributed.is_initialized()
    found["sharing of tensors"] = torch.multiprocessing.get_sharing_strategy()
    found["how torch prints"] = str(sys.modules["torch._tensor_str"].__dict__.get("PRINT_OPTS"))
    future = torch.__future__
    found["how modules convert"] = (
        future.get_overwrite_module_params_on_conversion(),
        future.get_swap_module_params_on_conversion(),
    )
    found["opt_einsum"] = torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy
    found["torch.hub"] = getattr(sys.modules.get("torch.hub"), "_hub_dir", None)
    library: Any = torch.library
    found["ops"] = [len(getattr(library, name, ())) for name in ("_defs", "_impls", "_keep_alive")]
    found["trees"] = len(sys.modules["torch.utils._pytree"].__dict__["SUPPORTED_NODES"])
    registry = getattr(torch.serialization, "_package_registry", ())
    found["picklers"] = len(sys.modules["copyreg"].__dict__["dispatch_table"]), len(registry), _safe_globals()
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
        entries = getattr(dynamo, "_config", {}).values()
        chosen = [getattr(each, "user_override", None) for each in entries]
        found["torch._dynamo.config"] = [str(each.get() if isinstance(each, ContextVar) else each) for each in chosen]
    if (frames := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        found["the stance of torch.compile"] = str(getattr(frames, "_stance", None))
    if torch.cuda.is_initialized():
        found["the current GPU"] = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    return found


def _precision(where: str, what: str) -> str | None:
    try:
        return str(torch._C._get_fp32_precision_getter(where, what))
    except RuntimeError:  # this torch has no such one
        return None


def _has_saved_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _safe_globals() -> int:
    return len(torch.serialization.get_safe_globals())


def _of_numpy() -> dict[str, Any]:
    random_: Any = np.random
    return {
        "numpy's bit generator": (id(random_.get_bit_generator()), id(random_.mtrand._rand)),
        "numpy's error state": (str(np.geterr()), id(np.geterrcall()), np.getbufsize()),
        "how numpy prints": str(np.get_printoptions()),
    }


def _of_python() -> dict[str, Any]:
    root = logging.getLogger().manager
    one, tiny, least = float("1.0"), 2.0**-60, sys.float_info.min
    hooks = [getattr(sys, name, None) for name in ("displayhook", "excepthook", "unraisablehook", "breakpointhook")]
    wakeup = signal.set_wakeup_fd(-1) if threading.current_thread() is threading.main_thread() else -1
    if wakeup != -1:
        signal.set_wakeup_fd(wakeup)
    monitoring = getattr(sys, "monitoring", None)
    multiprocessing = sys.modules.get("multiprocessing.process")
    current = None if multiprocessing is None else multiprocessing.__dict__["current_process"]()
    policy = getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None)
    return {
        "arithmetic": (one + tiny == one, one - tiny == one, least / 4 == 0.0),
        "limits of the interpreter": (
            sys.getrecursionlimit(), sys.getswitchinterval(), getattr(sys, "get_int_max_str_digits", int)(),
            threading.stack_size(), getattr(sys, "tracebacklimit", None),
        ),
        "tracing": (
            sys.gettrace() is None, sys.getprofile() is None, getattr(threading, "_trace_hook", None) is None,
            getattr(threading, "_profile_hook", None) is None, sys.get_coroutine_origin_tracking_depth(),
            monitoring and [monitoring.get_tool(number) for number in range(6)], faulthandler.is_enabled(),
            getattr(sys.modules.get("tracemalloc"), "is_tracing", bool)(),
        ),
        "hooks of sys": [*map(id, hooks), id(threading.excepthook), id(sys.stdin), *map(id, sys.get_asyncgen_hooks())],
        "finders": ([*map(id, sys.meta_path)], [*map(id, sys.path_hooks)]),
        "how modules are written": (sys.dont_write_bytecode, sys.pycache_prefix, sys.getdlopenflags()),
        "builtins": sorted(name for name in vars(sys.modules["builtins"]) if name != "_"),
        "the collector of garbage": (gc.get_debug(), len(gc.callbacks)),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the time zone": (time.tzname, time.timezone),
        "decimal": (str(decimal.DefaultContext), str(decimal.BasicContext), str(decimal.getcontext())),
        "Python's generator": id(random._inst),  # type: ignore[attr-defined]
        "logging": (
            root.disable, logging.raiseExceptions, id(logging.getLoggerClass()), id(logging.getLogRecordFactory()),
            id(logging.lastResort),
        ),
        "names of log levels": str(logging.getLevelName(10)) + str(len(logging._levelToName)),
        "signals": wakeup,
        "sockets": socket.getdefaulttimeout(),
        "temporary files": tempfile.tempdir,
        "this process's name": None if current is None else (current.name, bytes(current.authkey)),
        "asyncio": id(policy),
    }  # fmt: skip


def _of_kernel() -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    found: dict[str, Any] = {f"the process's {name}": status.get(name) for name in _STATUS.split() if name != "SigCgt"}
    found["caught signals"] = status.get("SigCgt")
    found["resource limits"] = [resource.getrlimit(number) for number in _LIMITS]
    found["its priority"] = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    found["its cores"] = os.sched_getaffinity(0)
    found["its session"] = os.getsid(0), os.getpgid(0), os.getppid()
    found["its root"] = os.readlink("/proc/self/root")
    for name in _FILES:
        try:
            found[f"its {name}"] = Path(f"/proc/self/{name}").read_text()
        except OSError:  # of another kernel, or not for this user
            found[f"its {name}"] = None
    value = ctypes.c_int(0)
    for name, option in _PRCTLS.items():
        _libc.prctl(option, ctypes.byref(value), 0, 0, 0)
        found[name] = value.value
    found["open files"] = _open_files()
    found["C variables"] = _c_environment()
    return found


def _open_files() -> dict[int, tuple[int, int]]:
    """Open files on a disk, by descriptor. Others end with their user, or cost the next job nothing."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            about, target = os.fstat(number), os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # of the listing itself
            continue
        if stat.S_ISREG(about.st_mode) and not target.startswith(("/proc/", "/sys/", "/memfd:")):
            found[number] = about.st_dev, about.st_ino
    return found


def _c_environment() -> list[bytes]:
    """What C code gets from `getenv`, which os.environ need not know."""
    pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(_libc, "environ")
    found = list[bytes]()
    while pointer and (text := pointer[len(found)]) is not None:
        found.append(text)
    return sorted(found)


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _is_wrapped_by_torch(now: Any, before: Any) -> bool:
    """torch wraps the `step` of an optimizer's class when the first one is made."""
    file = getattr(getattr(now, "__code__", None), "co_filename", None)
    return getattr(now, "__wrapped__", None) is before and file == torch_optimizers.__file__


def _is_watched(name: str) -> bool:
    return name in _WATCHED.split() or any(name.startswith(f"{each}.") for each in _WHOLE)


def _is_constant(key: str, value: Any) -> bool:
    if isinstance(value, bool | int | float | str | tuple):
        return not (key.startswith("__") or key.startswith("_abc"))
    return callable(value) or isinstance(value, property | classmethod | staticmethod)
