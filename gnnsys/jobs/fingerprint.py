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
import math
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
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from operator import attrgetter, itemgetter
from pathlib import Path
from types import FunctionType, ModuleType
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
    is_grad_enabled is_inference_mode_enabled _check_sparse_tensor_invariants
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
    "divergences",
    "picklers",
    "finders",
    "builtins",
    "C variables",
    "caught signals",
    "names of log levels",
    "open files",
}
# Left out, to keep a comparison fast: the compiler of torch, its private modules, and what few scripts use.
_UNWATCHED = (
    "torch.ao torch.contrib torch.distributed torch.export torch.fx torch.jit torch.masked torch.nested torch.onnx "
    "torch.package torch.profiler torch.quantization torch.testing"
)
_REWRITTEN = ("torch.", "numpy.")  # users may give functions of these another body or other defaults
_PRIVATE = "torch._C torch._VF torch._tensor"  # watched though private
# Packages whose classes have settings as attributes. Classes of others count in such attributes.
_WITH_SETTINGS = ("torch.nn", "torch.optim", "torch.autograd", "torch.utils.data", "torch.distributions",
                  "torch.backends", "gnnsys")  # fmt: skip
# What Python itself adds to a class when it is used, copied or looked at.
_OF_PYTHON = {
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__",
    "__firstlineno__", "__parameters__", "__signature__", "__slotnames__", "__static_attributes__",
    "__type_params__", "__weakref__",
}  # fmt: skip
_MOST_GROWTH = 512 << 20
_code_of, _defaults_of = attrgetter("__code__"), attrgetter("__defaults__")
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # flags of a class, in C
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
        if imported:
            self._patches.watch(imported)
        if _anonymous_bytes() > self._memory + _MOST_GROWTH:
            getattr(_libc, "malloc_trim", lambda _: None)(0)
            if (grown := _anonymous_bytes() - self._memory) > _MOST_GROWTH:
                changed.append(f"memory, by {grown >> 20} MiB")
        return changed


class WatchedFunctions:
    """Functions, classes and constants of modules that users patch: torch, numpy, Python's own, this package."""

    def __init__(self) -> None:
        self._spaces: list[_Space] = []
        self._classes: dict[type, tuple[str, set[str]]] = {}
        self._functions: dict[int, FunctionType] = {}
        self._codes: list[Any] = []
        self._defaults: list[Any] = []
        self.watch(list(sys.modules))
        self._add("math", vars(math), _constants_in(vars(math)))

    def watch(self, names: Iterable[str]) -> None:
        """These modules too, as far as they are of the packages that users patch."""
        for name in names:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType) and _is_watched(name):
                self._add(name, vars(module), _names_in(module))
                for each in list(vars(module).values()):
                    if isinstance(each, type) and each not in self._classes and _can_be_patched(each):
                        self._add_class(each)
        functions = self._functions.values()
        self._codes, self._defaults = list(map(_code_of, functions)), list(map(_defaults_of, functions))

    def _add_class(self, kind: type) -> None:
        name, has_settings = f"{kind.__module__}.{kind.__name__}", _is_below(str(kind.__module__), _WITH_SETTINGS)
        self._classes[kind] = name, set(kind.__dict__)
        self._add(name, kind.__dict__, _methods_in(kind) | (_constants_in(kind.__dict__) if has_settings else {}))

    def _add(self, name: str, space: Mapping[str, Any], values: dict[str, Any]) -> None:
        if values:
            self._spaces.append(_Space(name, space, values))
        for value in values.values():
            inner = _function_in(value)
            if isinstance(inner, FunctionType) and str(inner.__module__).startswith(_REWRITTEN):
                self._functions[id(inner)] = inner

    def changes(self, imported: set[str]) -> list[str]:
        """Names whose object was replaced or added, except by an object from a module in `imported`."""
        return self._added(imported) + self._replaced(imported) + self._rewritten()

    def _added(self, imported: set[str]) -> list[str]:
        """A class that inherits a method may get its own one."""
        changed = []
        for kind, (name, before) in self._classes.items():
            if len(kind.__dict__) != len(before):
                new = {key for key in kind.__dict__ if key not in before and not key.startswith("_abc")}
                before |= new
                foreign = [key for key in new - _OF_PYTHON if _module_of(kind.__dict__[key]) not in imported]
                changed += [f"{name}.{key}" for key in sorted(foreign)]
        return changed

    def _replaced(self, imported: set[str]) -> list[str]:
        changed = []
        for each in self._spaces:
            if not each.is_same():
                for key, before in each.values.items():
                    now = each.space.get(key)
                    if now is not before and now != before:
                        if _module_of(now) in imported or _is_wrapped_by_torch(now, before):
                            each.accept(key, now)
                        else:
                            changed.append(f"{each.name}.{key}")
        return changed

    def _rewritten(self) -> list[str]:
        """Functions that have another body or other defaults."""
        functions = self._functions.values()
        codes, defaults = list(map(_code_of, functions)), list(map(_defaults_of, functions))
        if codes == self._codes and defaults == self._defaults:  # quick: what is identical is not compared
            return []
        before, now = zip(self._codes, self._defaults, strict=True), zip(codes, defaults, strict=True)
        pairs = zip(functions, before, now, strict=True)
        return [f"{each.__module__}.{each.__qualname__}" for each, old, new in pairs if old != new]


class _Space:
    """The watched names of a module or a class, and their values."""

    def __init__(self, name: str, space: Mapping[str, Any], values: dict[str, Any]) -> None:
        self.name, self.space, self.values = name, space, values
        first, *others = values
        self._take = itemgetter(first, *others, first)  # twice: of a single name it would give no tuple
        self._taken = self._take(values)

    def is_same(self) -> bool:
        """Quick: what is identical is not compared."""
        try:
            return bool(self._take(self.space) == self._taken)
        except KeyError:
            return False

    def accept(self, name: str, value: Any) -> None:
        self.values[name] = value
        self._taken = self._take(self.values)


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
    found["the fast path of attention"] = torch.backends.mha.get_fastpath_enabled()
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    found["the cache of parametrizations"] = getattr(parametrize, "_cache_enabled", 0)
    divergences = getattr(sys.modules.get("torch.distributions.kl"), "_KL_REGISTRY", {})
    found["divergences"] = [*map(id, divergences.values())]
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
        "floating-point exceptions": getattr(_libc, "fegetexcept", int)(),
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
    if _is_below(name, ("gnnsys",)) or name in _PRIVATE.split():
        return True
    first, *inner = name.split(".")
    is_known = first in ("torch", "numpy") or first in sys.stdlib_module_names
    return is_known and not any(part.startswith("_") for part in inner) and not _is_below(name, _UNWATCHED.split())


def _is_below(name: str, packages: Iterable[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def _can_be_patched(kind: type) -> bool:
    """Whether Python can set its attributes: not if it was written in C."""
    return bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE and _is_watched(kind.__module__)


def _names_in(module: ModuleType) -> dict[str, Any]:
    """Its functions, classes and modules. Of ours only what it defines, not what it imports for itself."""
    space = dict(vars(module))
    if _is_below(module.__name__, ("gnnsys",)) and not hasattr(module, "__path__"):
        return {name: value for name, value in space.items() if _module_of(value) == module.__name__}
    return {name: value for name, value in space.items() if callable(value) or isinstance(value, ModuleType)}


def _methods_in(kind: type) -> dict[str, Any]:
    kinds = (property, classmethod, staticmethod)
    return {name: value for name, value in kind.__dict__.items() if callable(value) or isinstance(value, kinds)}


def _constants_in(space: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (bool, int, float, str, tuple)
    names = [name for name, value in space.items() if isinstance(value, kinds)]
    return {name: space[name] for name in names if not name.startswith(("__", "_abc"))}


def _function_in(value: Any) -> Any:
    """What a method of a class, or a property, calls."""
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _module_of(value: Any) -> str | None:
    """Where a function, a class or a method was written; the name of a module."""
    if isinstance(value, ModuleType):
        return value.__name__
    found = getattr(_function_in(value), "__module__", None)
    return found if isinstance(found, str) else None
