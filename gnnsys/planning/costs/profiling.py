"""The profile of this machine: real operators at a dozen sizes each, in turns, then a fit."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from gnnsys.observe import num_usable_cores
from gnnsys.planning.costs.device_probes import DeviceProbes
from gnnsys.planning.costs.facts import context_of, facts_of, gpu_of
from gnnsys.planning.costs.host_probes import HostProbes, random_block, random_graph, sampling_threads
from gnnsys.planning.costs.model import CostModel
from gnnsys.planning.costs.pairs import DEVICE_PAIRS, HOST_PAIRS, measure_pairs
from gnnsys.planning.costs.profile import MachineProfile
from gnnsys.planning.costs.timing import CostProbe, ProbeTimer, time_probes
from gnnsys.store import MemoryBudget

BUDGET_SECONDS = 20.0
_FOR_PAIRS = 0.15  # of the budget
_HOST_SHARE, _HOST_BYTES = 0.5, 4 << 30  # of what the host has left; what probes take at most
_FULL_SECONDS = 10.0  # from which sizes are as large as those of batches
_RESERVE = 1.0  # seconds: the fit, and the call under way when time is up


def profile_machine(
    device: torch.device | None = None,
    threads: int | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> MachineProfile:
    """Measures what operators cost here: on the host by `threads` threads (all cores, where nobody says), and on
    `device`. Takes `budget_seconds` at most, unless they are very few. `clock` is that of host operators."""
    began = time.perf_counter()
    threads = num_usable_cores() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, got {threads}")
    device = gpu_of(device)
    context = context_of(device, threads)
    on_device = nullcontext() if device is None else torch.cuda.device(device)
    optimizers = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))  # seconds, at the first step
    optimizers.start()
    with on_device, compute_threads(threads), sampling_threads(threads) as pool, torch.no_grad():
        room = _HOST_SHARE * MemoryBudget.of("cpu").left() / _HOST_BYTES
        scale = min(1.0, budget_seconds / _FULL_SECONDS)
        host = HostProbes(context, pool, scale=min(scale, room))
        probes = host.all()
        there = None if device is None else DeviceProbes(device, context, scale=scale)
        if there is not None:
            probes += there.all()
        for_pairs = _FOR_PAIRS * budget_seconds
        optimizers.join()
        deadline = began + budget_seconds - for_pairs - min(_RESERVE, 0.1 * budget_seconds)
        seen = time_probes(probes, deadline, ProbeTimer(device, clock))
        pairs = measure_pairs(_of_pairs(host, there), HOST_PAIRS + DEVICE_PAIRS, for_pairs, threads)
    costs = CostModel.fit(seen, context)
    if device is not None:
        del probes, there
        give_back_memory()
    return MachineProfile(facts_of(device, threads), costs, pairs, time.perf_counter() - began)


def _of_pairs(host: HostProbes, there: DeviceProbes | None) -> dict[str, CostProbe]:
    """One call of each operator, of some milliseconds."""
    num_rows = min(80_000, host.rows.numel() // 200)
    block = random_block(num_rows * 3 // 2, num_rows // 4, num_rows, host.generator)
    graph = random_graph(2 * num_rows, 40 * num_rows, 1.0, host.generator)
    probes = [
        host.spmm_of(block, 100),
        host.product_of(num_rows // 8, 100, 64),
        host.sample_of(graph, (15, 10), max(16, num_rows // 300)),
    ]
    if there is not None:
        num_rows = min(640_000, there.rows.numel() // 256)
        large = random_block(num_rows * 3 // 2, num_rows // 4, num_rows, host.generator)
        probes += [
            there.copy_of("copy/up", 6.4e7),
            there.copy_of("copy/down", 6.4e7),
            there.over_bus_of(150_000, 100),
            there.spmm_of(large, 128),
            there.product_of(num_rows // 4, 256, 256),
            there.sample_of(graph, (15, 10, 5), 1024, True),
            there.sample_of(graph, (15, 10, 5), 1024, False),
        ]
    return {probe.operator: probe for probe in probes}


def give_back_memory() -> None:
    """Of the device, and pinned memory, which torch would keep for others."""
    torch.cuda.empty_cache()
    empty_pinned = getattr(torch._C, "_host_emptyCache", None)
    if empty_pinned is not None:
        empty_pinned()


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """torch's threads while something is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
