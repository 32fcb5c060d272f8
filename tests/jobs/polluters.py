"""What a job may leave behind in its process (`POLLUTERS`), and what the next job computes there (`IDIOMS`).

`python -c "from tests.jobs.polluters import report; report()"` forks a process per polluter. There a job pollutes, the
worker puts back what it puts back, and either says that it must be replaced or has all idioms give the bits that they
give in a fresh process. A line of JSON per polluter says which.
"""

from __future__ import annotations

import _thread
import asyncio
import builtins
import collections
import contextvars
import ctypes
import decimal
import faulthandler
import functools
import gc
import hashlib
import importlib
import json
import locale
import logging
import math
import multiprocessing
import os
import pathlib
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.backends.mha
import torch.nn.functional as F
import torch.nn.utils.parametrize
import torch.optim.optimizer as torch_optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gnnsys
from gnnsys.graph import sbm
from gnnsys.jobs import fresh_state
from gnnsys.jobs.fingerprint import read_settings
from gnnsys.jobs.fresh_state import FreshState
from gnnsys.jobs.process_identity import kill_descendants
from gnnsys.jobs.train_job import seed_all

_DEADLINE = 60.0
HELD: list[Any] = []  # so that nothing ends by itself
LIBC: Any = ctypes.CDLL(None)


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.rand else made


class Negates(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return -made if func is torch.ops.aten.mm.default else made


def enter(context: Any) -> None:
    context.__enter__()
    HELD.append(context)


def patch(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def override_op() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", lambda x: x.abs(), "CPU")
    HELD.append(library)


def register_tree() -> None:
    class Pair:
        pass

    torch.utils._pytree.register_pytree_node(Pair, lambda pair: ([], None), lambda values, _: Pair())


def begin_process_group() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def leak() -> None:
    LIBC.malloc.restype = ctypes.c_void_p
    LIBC.memset(ctypes.c_void_p(LIBC.malloc(ctypes.c_size_t(600 << 20))), 1, ctypes.c_size_t(600 << 20))


def keep_open() -> None:
    import fcntl

    file = open(f"{tempfile.gettempdir()}/held-{os.getpid()}", "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    os.unlink(file.name)
    HELD.append(file)


def lower(name: int, is_hard: bool = False) -> None:
    _, hard = resource.getrlimit(name)
    resource.setrlimit(name, (512, 512 if is_hard else hard))


def handle_logs(name: str | None) -> None:
    logger = logging.getLogger(name)
    logger.addHandler(logging.StreamHandler(sys.__stdout__))
    logger.setLevel(logging.DEBUG)


def change_zone() -> None:
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def new_dropout(self: Any, p: float = 0.5, inplace: bool = False) -> None:
    super(torch.nn.Dropout, self).__init__(0.0, inplace)


def patch_beside_a_library() -> None:
    importlib.import_module("xmlrpc.client")
    patch(torch.nn.Dropout, "train", lambda self, mode=True: self)


def replace_module(name: str) -> None:
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__["dumps"] = str


def override_divergence() -> None:
    normal = torch.distributions.Normal
    torch.distributions.kl.register_kl(normal, normal)(lambda p, q: torch.zeros(1))


def write_as_last_step(module: Any, args: Any, out: Any) -> Any:
    return out * 1.5


# By name: what is done, and whether the worker can go on: what many scripts do costs the next job no new process.
# None: that depends on the libraries and the machine.
POLLUTERS: dict[str, tuple[Callable[[], Any], bool | None]] = {
    "hooks of saved tensors": (
        lambda: enter(torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x)), False),
    "saved tensors hooks disabled": (lambda: enter(torch.autograd.graph.disable_saved_tensors_hooks("no")), False),
    "function mode": (lambda: enter(Doubles()), False),
    "dispatch mode": (lambda: enter(Negates()), False),
    "device meta": (lambda: enter(torch.device("meta")), False),
    "default device": (lambda: torch.set_default_device("meta"), True),
    "inference mode": (lambda: enter(torch.inference_mode()), False),
    "no grad": (lambda: enter(torch.no_grad()), True),
    "grad disabled": (lambda: torch.set_grad_enabled(False), True),
    "autocast": (lambda: enter(torch.autocast("cpu", dtype=torch.bfloat16)), False),
    "autocast dtype": (lambda: torch.set_autocast_dtype("cpu", torch.float16), False),
    "autocast cache": (lambda: torch.set_autocast_cache_enabled(False), False),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), True),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), True),
    "unfilled memory": (lambda: patch(torch.utils.deterministic, "fill_uninitialized_memory", False), False),
    "matmul precision": (lambda: torch.set_float32_matmul_precision("medium"), True),
    "onednn off": (lambda: patch(torch.backends.mkldnn, "enabled", False), False),
    "einsum strategy": (lambda: patch(torch.backends.opt_einsum, "enabled", False), None),
    "denormals": (lambda: torch.set_flush_denormal(True), False),
    "rounding": (lambda: LIBC.fesetround(0x800), False),
    "threads of torch": (lambda: torch.set_num_threads(3), True),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), True),
    "forward gradients": (lambda: enter(torch.autograd.forward_ad.dual_level()), False),
    "a level of vmap": (lambda: torch._C._functorch._vmap_increment_nesting(2, "error"), False),
    "one-threaded gradients": (lambda: torch.autograd.set_multithreading_enabled(False), False),
    "functions not overridden": (lambda: enter(torch._C.DisableTorchFunction()), False),
    "sharing of tensors": (lambda: torch.multiprocessing.set_sharing_strategy("file_system"), False),
    "forward hook of all": (
        lambda: torch.nn.modules.module.register_module_forward_hook(write_as_last_step), False),
    "hook of all optimizers": (
        lambda: torch_optimizers.register_optimizer_step_post_hook(lambda *_: None), False),
    "hook of all parameters": (
        lambda: torch.nn.modules.module.register_module_parameter_registration_hook(lambda *_: None), False),
    "torch's generator": (lambda: patch(torch.random, "default_generator", torch.Generator()), False),
    "a function of torch": (lambda: patch(torch, "relu", torch.sigmoid), False),
    "a function of nn": (lambda: patch(F, "dropout", lambda x, *_, **__: x), False),
    "a layer": (lambda: patch(torch.nn.Linear, "forward", lambda self, x: x @ self.weight.T), False),
    "a method of tensors": (lambda: patch(torch.Tensor, "softmax", torch.Tensor.log_softmax), False),
    "an optimizer": (lambda: patch(torch.optim.SGD, "step", lambda self, closure=None: None), False),
    "a layer of ours": (lambda: patch(gnnsys.nn.GCN, "forward", lambda self, x, edges: x), False),
    "a constructor that was inherited": (lambda: patch(torch.nn.Dropout, "__init__", new_dropout), False),
    "a call that was inherited": (lambda: patch(torch.nn.Linear, "__call__", lambda self, x: x), False),
    "a length of ours": (lambda: patch(gnnsys.NeighborLoader, "__len__", lambda self: 1), False),
    "a method beside a library": (patch_beside_a_library, False),
    "defaults of a function": (lambda: patch(F.dropout, "__defaults__", (0.0, True, False)), False),
    "the body of a function": (lambda: patch(F.relu, "__code__", F.relu6.__code__), False),
    "functions of nn": (lambda: patch(torch.nn, "functional", ModuleType("functional")), False),
    "a sparse product": (lambda: patch(torch.sparse, "mm", torch.mm), False),
    "a special function": (lambda: patch(torch.special, "expit", torch.tanh), False),
    "checkpoints": (lambda: patch(torch.utils.checkpoint, "checkpoint", print), False),
    "checks of sparse tensors": (lambda: torch.sparse.check_sparse_tensor_invariants.enable(), False),
    "fast attention": (lambda: torch.backends.mha.set_fastpath_enabled(False), False),
    "cached parametrizations": (lambda: enter(torch.nn.utils.parametrize.cached()), False),
    "divergences": (override_divergence, False),
    "checks of distributions": (lambda: torch.distributions.Distribution.set_default_validate_args(False), False),
    "an op": (lambda: torch.library.define("of_a_job::op", "(Tensor x) -> Tensor"), False),
    "an op of torch": (override_op, False),
    "a tree": (register_tree, False),
    "process group": (begin_process_group, False),
    "how tensors print": (lambda: torch.set_printoptions(precision=1), True),
    "how modules convert": (lambda: torch.__future__.set_overwrite_module_params_on_conversion(True), False),
    "dynamo": (lambda: patch(torch._dynamo.config, "suppress_errors", True), None),
    "numpy's bits": (lambda: np.random.set_bit_generator(np.random.PCG64(1)), False),  # type: ignore[attr-defined]
    "numpy's errors": (lambda: np.seterr(all="raise"), True),
    "how arrays print": (lambda: np.set_printoptions(precision=1), True),
    "a function of numpy": (lambda: patch(np, "sum", np.prod), False),
    "a transform of numpy": (lambda: patch(np.fft, "fft", lambda x: x), False),
    "a draw of Python": (lambda: patch(random, "random", lambda: 0.5), False),
    "asyncio.run": (lambda: asyncio.run(asyncio.sleep(0)), True),
    "recursion": (lambda: sys.setrecursionlimit(200), True),
    "tracing": (lambda: sys.settrace(lambda *_: None), False),
    "profiling": (lambda: sys.setprofile(lambda *_: None), False),
    "tracing of threads": (lambda: threading.settrace(lambda *_: None), False),
    "decimals": (lambda: patch(decimal.getcontext(), "prec", 5), True),
    "decimals of all": (lambda: patch(decimal.DefaultContext, "prec", 5), False),
    "locale": (lambda: locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"),
               False),
    "time zone": (change_zone, False),
    "warnings are errors": (lambda: warnings.simplefilter("error"), True),
    "how warnings print": (lambda: patch(warnings, "showwarning", lambda *_: None), False),
    "a variable": (lambda: os.environ.update(POLLUTED="1"), True),
    "a variable of C": (lambda: os.putenv("POLLUTED", "1"), False),
    "the folder": (lambda: os.chdir("/"), True),
    "umask": (lambda: os.umask(0o777), True),
    "sys.path": (lambda: sys.path.insert(0, "/nowhere"), True),
    "words": (lambda: sys.argv.append("--lr"), True),
    "a builtin": (lambda: patch(builtins, "sum", max), False),
    "a new builtin": (lambda: patch(builtins, "POLLUTED", 1), False),
    "mathematics": (lambda: patch(math, "pi", 3), False),
    "JSON": (lambda: patch(json, "dumps", lambda *_, **__: "{}"), False),
    "a method of JSON": (lambda: patch(json.JSONEncoder, "default", lambda self, value: "X"), False),
    "a method of paths": (lambda: patch(pathlib.PurePath, "with_name", lambda self, name: self), False),
    "pickles": (lambda: patch(pickle, "loads", lambda data: 0), False),
    "a reduction": (lambda: patch(functools, "reduce", max), False),
    "counters": (lambda: patch(collections.Counter, "most_common", lambda self: []), False),
    "programs": (lambda: patch(subprocess, "run", lambda *_, **__: None), False),
    "exits": (lambda: patch(sys, "exit", lambda *_: None), False),
    "a module of Python": (lambda: replace_module("json"), True),
    "a stand-in for a library": (lambda: replace_module("wandb"), True),
    "how output is written": (lambda: sys.stdout.reconfigure(encoding="ascii", line_buffering=False), True),
    "what writes output": (lambda: patch(sys.stdout, "write", len), True),
    "exceptions of arithmetic": (lambda: LIBC.feenableexcept(4), None),
    "time": (lambda: patch(time, "time", lambda: 0.0), False),
    "excepthook": (lambda: patch(sys, "excepthook", lambda *_: None), False),
    "a finder": (lambda: sys.meta_path.append(type("Finds", (), {"find_spec": lambda *_: None})()), False),
    "digits": (lambda: sys.set_int_max_str_digits(700), False),
    "handlers of the root": (lambda: handle_logs(None), True),
    "handlers of a logger": (lambda: handle_logs("of.a.job"), True),
    "handlers of a library": (lambda: handle_logs("gnnsys"), True),
    "logging disabled": (lambda: logging.disable(logging.CRITICAL), False),
    "collector off": (lambda: gc.disable(), True),
    "collector's thresholds": (lambda: gc.set_threshold(1, 1, 1), True),
    "collector debugs": (lambda: gc.set_debug(gc.DEBUG_SAVEALL), False),
    "collector's calls": (lambda: gc.callbacks.append(lambda *_: None), False),
    "a signal": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), True),
    "an alarm": (lambda: signal.setitimer(signal.ITIMER_REAL, 600.0), True),
    "blocked signals": (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}), True),
    "soft limit": (lambda: lower(resource.RLIMIT_NOFILE), False),
    "hard limit": (lambda: lower(resource.RLIMIT_NOFILE, True), False),
    "cores": (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), None),
    "priority": (lambda: os.nice(1), False),
    "start method": (lambda: multiprocessing.set_start_method("spawn"), True),
    "sockets": (lambda: socket.setdefaulttimeout(0.001), False),
    "faulthandler": (lambda: faulthandler.enable(sys.__stderr__), False),
    "an open file": (keep_open, False),
    "a raw thread": (lambda: _thread.start_new_thread(time.sleep, (600,)), False),
    "a thread": (lambda: threading.Thread(target=time.sleep, args=(600,), daemon=True).start(), False),
    "a process": (lambda: HELD.append(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)), False),
    "temporary files": (lambda: patch(tempfile, "tempdir", "/nowhere"), False),
    "asyncio": (lambda: asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy()), True),
    "parent's death": (lambda: LIBC.prctl(1, signal.SIGTERM, 0, 0, 0), False),
    "memory": (leak, False),
}  # fmt: skip


def trained(make: Callable[[], torch.optim.Optimizer | Any]) -> Any:
    """Weights after three steps of a small model with dropout."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    optimizer = make(model.parameters())  # type: ignore[call-arg]
    x, y = torch.rand(20, 6), torch.randint(3, (20,))
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return list(model.parameters())


def with_gradient(layer: torch.nn.Module, x: torch.Tensor) -> Any:
    out = layer(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return [each.grad for each in layer.parameters()]


def trained_gcn() -> Any:
    model = gnnsys.nn.GCN(4, 8, 2, 3)
    out = model(torch.rand(30, 4), torch.randint(30, (2, 90)))
    out.square().sum().backward()
    return [out, *(each.grad for each in model.parameters())]


def sampled() -> Any:
    loader = gnnsys.NeighborLoader(sbm(200, seed=1), [3, 3], input_nodes=torch.arange(20), batch_size=10, shuffle=True)
    return [batch.x for batch in loader]


def deep(depth: int) -> int:
    return 0 if depth == 0 else 1 + deep(depth - 1)


def logged() -> str:
    handler = logging.Handler()
    lines: list[str] = []
    patch(handler, "emit", lambda record: lines.append(record.getMessage()))
    logger = logging.getLogger("of.a.job")
    logger.addHandler(handler)
    logger.warning("said")
    told = f"{lines} {len(logger.handlers)} {len(logging.getLogger().handlers)} {logger.isEnabledFor(10)}"
    logger.removeHandler(handler)
    return told


def warned() -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("said", UserWarning, stacklevel=1)
    return str(len(seen))


IDIOMS: dict[str, Callable[[], Any]] = {
    "uniform draws": lambda: torch.rand(100),
    "normal draws": lambda: torch.randn(100, dtype=torch.float64),
    "a permutation": lambda: torch.randperm(50),
    "what tensors are": lambda: str((torch.tensor([1.0]).dtype, torch.tensor([1]).device, torch.ones(1) / 3)),
    "SGD": lambda: trained(lambda all_: torch.optim.SGD(all_, lr=0.1, momentum=0.9)),
    "Adam": lambda: trained(lambda all_: torch.optim.Adam(all_)),
    "a convolution": lambda: with_gradient(torch.nn.Conv1d(3, 4, 3), torch.rand(2, 3, 9)),
    "an LSTM": lambda: with_gradient(torch.nn.LSTM(3, 4), torch.rand(5, 2, 3)),
    "a product": lambda: torch.rand(64, 64) @ torch.rand(64, 64),
    "a long sum": lambda: torch.rand(50_000).sum(),
    "small numbers": lambda: torch.full((4,), 1e-39) * 0.5,
    "softmax": lambda: torch.rand(5, 5).softmax(1) + torch.relu(torch.randn(5, 5)),
    "einsum": lambda: torch.einsum("ij,jk,kl->il", torch.rand(3, 4), torch.rand(4, 5), torch.rand(5, 6)),
    "checkpointing": lambda: with_gradient(torch.nn.Linear(3, 3), checkpoint(torch.sin, torch.rand(2, 3), use_reentrant=False)),  # noqa: E501
    "vmap": lambda: torch.vmap(lambda x: x * torch.arange(3))(torch.rand(4, 3)),
    "forward gradients": lambda: torch.func.jvp(torch.sin, (torch.rand(3),), (torch.ones(3),))[1],
    "a distribution": lambda: torch.distributions.Normal(0.0, 1.0).sample((9,)),
    "GCN": trained_gcn,
    "our loader": sampled,
    "a loader of torch": lambda: [each for each in torch.utils.data.DataLoader(torch.arange(20), 4, shuffle=True)],
    "how a tensor prints": lambda: str(torch.rand(3)),
    "numpy's draws": lambda: np.random.rand(9),
    "numpy's arithmetic": lambda: np.sum(np.random.rand(50).astype(np.float32) ** 0.5) + np.float64(0.1),
    "a division by zero": lambda: np.log(np.arange(3.0)) if np.geterr()["divide"] == "raise" else np.geterr()["divide"],
    "Python's draws": lambda: str([random.random(), random.gauss(0, 1), random.sample(range(99), 9)]),
    "decimals": lambda: str(decimal.Decimal(1) / decimal.Decimal(7)),
    "text": lambda: str([f"{math.pi:n}", json.dumps({"a": sum([1.5, 2])}), time.strftime("%H", time.localtime(0))]),
    "a deep call": lambda: str(deep(400)),
    "surroundings": lambda: str([os.getcwd(), sorted(os.environ.items()), sys.path, sys.argv, os.umask(0o22)]),
    "modules": lambda: str([importlib.import_module("json").dumps(["a"]), "wandb" in sys.modules]),
    "output": lambda: str([sys.stdout.encoding, sys.stdout.line_buffering, "write" in vars(sys.stdout)]),
    "a log": logged,
    "warnings": warned,
    "settings": lambda: str([torch.get_num_threads(), gc.isenabled(), gc.get_threshold(), time.time() > 1e9,
                             signal.getsignal(signal.SIGTERM), multiprocessing.get_start_method(allow_none=True)]),
}  # fmt: skip


def digest(found: Any) -> str:
    """Of bits, not of values."""
    if isinstance(found, torch.Tensor):
        found = found.detach().contiguous()
        bits = found.reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{found.dtype} {found.shape}".encode() + bits).hexdigest()
    if isinstance(found, np.ndarray | np.generic):
        return hashlib.sha256(f"{found.dtype}".encode() + found.tobytes()).hexdigest()
    if isinstance(found, list):
        return " ".join(map(digest, found))
    return str(found)


def compute() -> dict[str, str]:
    """The digests of all idioms; an error is one, too."""
    found = {}
    for name, idiom in IDIOMS.items():
        try:
            seed_all(7)
            found[name] = digest(idiom())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def forked(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process, through JSON."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            faulthandler.dump_traceback_later(_DEADLINE, exit=True)
            data = json.dumps(work()).encode()
        except BaseException:
            data = json.dumps({"error": traceback.format_exc()}).encode()
        while data:
            data = data[os.write(writing, data) :]
        kill_descendants(os.getpid())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = file.read()
    os.waitpid(pid, 0)
    return json.loads(told or "null")


def between_jobs(state: FreshState, jobs: Sequence[Callable[[], Any]]) -> list[str]:
    """Runs them as a worker does, one after the other; why the worker is replaced after the last, if it is."""
    for job in jobs:
        state.enter("/tmp", {"GIVEN": "1"})
        contextvars.copy_context().run(job)
        if (left := state.leftovers()) is not None:
            return [left]
        try:
            state.restore()
            if changed := state.changes():
                return changed
        except Exception as error:
            return [repr(error)]
    return []


def try_polluters(state: FreshState, names: Sequence[str], wanted: dict[str, str]) -> dict[str, Any]:
    """In a process of its own: what is replaced, and what idioms give other bits."""

    def work() -> dict[str, Any]:
        state._fingerprint._before = read_settings()  # of this process, which is another than that of the start
        state._threads, state._num_threads = set(sys._current_frames()), _thread._count()
        dumps = json.dumps
        changed = between_jobs(state, [POLLUTERS[name][0] for name in names])
        found = {} if changed else contextvars.copy_context().run(compute)
        patch(json, "dumps", dumps)
        return {"changed": changed, "other": [each for each in found if found[each] != wanted[each]]}

    return forked(work)


def prepare() -> tuple[FreshState, dict[str, str]]:
    from gnnsys.jobs.work import warm

    warm("cpu", 1)
    fresh_state._THREAD_SECONDS = 0.05
    state = FreshState(1)
    wanted = forked(compute)
    failed = {name: value for name, value in wanted.items() if "Error: " in value}
    assert not failed, failed
    return state, wanted


def report(is_whole: str = "") -> None:
    """A line per polluter, or one of all that a worker puts back, one after the other; and that idioms repeat, without
    which no comparison means anything. `is_whole` tries each by itself."""
    state, wanted = prepare()
    assert forked(compute) == wanted
    kept = [name for name, (_, is_kept) in POLLUTERS.items() if is_kept]
    tried = [] if is_whole else [kept]
    tried += [[name] for name in POLLUTERS if is_whole or name not in kept]
    for names in tried:
        print(json.dumps({"names": names, **try_polluters(state, names, wanted)}), file=sys.__stdout__, flush=True)
