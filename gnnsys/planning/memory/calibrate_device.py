"""Measures what this machine's device takes beside tensors: `gnnsys estimate --calibrate`.

Scratch of an operator is what torch's allocator had at most during the call, less what it has after it with the results
still there. Everything runs once before, so that nothing is measured that only a first call takes.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from gnnsys.planning.memory.device_profile import DeviceProfile, ScratchCurve, device_kind_of
from gnnsys.planning.memory.scratch_probes import ScratchProbe, scratch_probes

SIZES = (1_000, 16_000, 100_000, 500_000, 2_000_000, 8_000_000)
_SHORT = (1_000, 100_000)
_NEGLIGIBLE = 64 << 10  # what no curve is kept for, if it is never more
_CHILD = """
import sys, torch
torch.cuda.init(); torch.empty(1, device="cuda"); torch.cuda.synchronize()
print(torch.cuda.memory_reserved(), flush=True); sys.stdin.readline()
rows = torch.ones(4096, 64, device="cuda", requires_grad=True)
layer = torch.nn.Linear(64, 64, device="cuda")
index = torch.arange(4096, device="cuda")
torch.nn.functional.cross_entropy(layer(rows)[index].relu(), index % 64).backward()
torch.optim.Adam(layer.parameters()).step(); index.sort(); index.unique(); torch.cuda.synchronize()
print(torch.cuda.memory_reserved(), flush=True); sys.stdin.readline()
"""


def calibrate_device(
    sizes: Sequence[int] = SIZES, show: Callable[[str], None] = lambda line: None, is_quick: bool = False
) -> DeviceProfile:
    """The profile of the current CUDA device with this torch; ValueError where there is none."""
    if not torch.cuda.is_available():
        raise ValueError("--calibrate measures this machine's GPU, and torch finds none: run it where the GPU is")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    context = _context_bytes()
    show(f"context of a process: {context:,} bytes")
    product, linear, scratch, backward = _cublas()
    show(f"cuBLAS: {product:,} bytes at the first product, {linear:,} more and {scratch:,} meanwhile with a bias")
    show(f"cuBLAS: {backward:,} bytes more at the first backward pass")
    curves = measure_curves(scratch_probes(), _SHORT if is_quick else sizes, show)
    return DeviceProfile(
        kind=device_kind_of(properties.name), name=properties.name, torch=torch.__version__,
        capacity=properties.total_memory, context=context, product_workspace=product, backward_workspace=backward,
        linear_workspace=linear, linear_scratch=scratch, processors=properties.multi_processor_count,
        threads_per_processor=properties.max_threads_per_multi_processor, curves=curves,
    )  # fmt: skip


def measure_curves(
    probes: Sequence[ScratchProbe], sizes: Sequence[int], show: Callable[[str], None] = lambda line: None
) -> tuple[ScratchCurve, ...]:
    """Those that are more than negligible somewhere. Of several calls of one operator the most is kept."""
    most: dict[tuple[str, int, str], dict[int, int]] = {}
    for probe in probes:
        key = probe.op, probe.argument, str(probe.dtype).removeprefix("torch.")
        found = most.setdefault(key, {})
        for size in sizes:
            try:
                taken = _scratch_of(probe, size)
            except (RuntimeError, NotImplementedError, TypeError) as error:  # an operator that this torch has not so
                show(f"{probe.op} of {key[2]}: not measured, {str(error).splitlines()[0]}")
                break
            found[size] = max(found.get(size, 0), taken)
    curves = []
    for (op, argument, dtype), found in sorted(most.items()):
        if found and max(found.values()) > _NEGLIGIBLE:
            curves.append(ScratchCurve(op, argument, dtype, tuple(sorted(found.items()))))
        told = ", ".join(f"{size:,}: {taken:,}" for size, taken in sorted(found.items()))
        show(f"{op} of {dtype}: {told or 'not measured'}")
    return tuple(curves)


def _scratch_of(probe: ScratchProbe, size: int) -> int:
    call = probe.make(size)
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del out
    return taken


def _cublas() -> tuple[int, int, int, int]:
    """(kept by the first product, kept by the first with a bias, held during one, kept by the backward thread)."""
    rows, weight = torch.ones(512, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    bias, out = torch.ones(64, device="cuda"), torch.empty(512, 64, device="cuda")
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()

    def kept(call: Callable[[], object]) -> tuple[int, int]:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        held = torch.cuda.memory_allocated()
        del result
        after = torch.cuda.memory_allocated()
        return after - before, most - held

    product, _ = kept(lambda: torch.mm(rows, weight, out=out))
    linear, _ = kept(lambda: F.linear(rows, weight, bias))
    _, scratch = kept(lambda: F.linear(rows, weight, bias))
    weight.requires_grad_(True)
    weight.grad = torch.zeros_like(weight)
    loss = torch.mm(rows, weight).sum()
    backward, _ = kept(loss.backward)
    return product, linear, scratch, backward


def _context_bytes() -> int:
    """What a process that trains takes of the device outside of torch's allocator: seen by this process, of another."""
    torch.cuda.init()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        taken = 0
        for _ in range(2):
            line = child.stdout.readline()
            if not line:
                raise ValueError("a second process cannot use the GPU beside this one: end what holds it")
            taken = max(taken, free - torch.cuda.mem_get_info()[0] - int(line))
            child.stdin.write("\n")
            child.stdin.flush()
        child.stdin.close()
    return taken
