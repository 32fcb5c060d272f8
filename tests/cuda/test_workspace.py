"""What ops say they take beside their outputs on a GPU, against what they asked of torch's allocator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import told_workspaces, workspace_bytes
from gnnsys.ops._library import native
from gnnsys.ops._workspace import SMALL_BYTES
from tests.ops.measured_calls import MeasuredCall, calls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OF_TABLES = {"relabel", "relabel_seeds", "lookup", "compact", "id_table_init"}  # made for a device: test_relabel.py


def on_device(value: object) -> object:
    if isinstance(value, list):
        return [on_device(each) for each in value]
    return value.cuda() if isinstance(value, Tensor) else value


def tensors_of(result: object) -> list[Tensor]:
    if isinstance(result, list | tuple):
        return [t for each in result for t in tensors_of(each)]
    return [result] if isinstance(result, Tensor) else []


def transposed(case: str, call: MeasuredCall) -> MeasuredCall:
    """The gradient of an extreme gathers over the transposed structure on a GPU."""
    if not case.startswith("spmm_extreme_grad_x"):
        return call
    indptr, indices, arg, grad, weight, num_src, *_ = call.arguments
    turned = native.transpose(indptr, indices, num_src)
    return call._replace(arguments=(indptr, indices, arg, grad, weight, num_src, *turned))


def test_no_op_takes_more_of_a_device_than_it_says() -> None:
    of_cuda = {op for op, device_type in told_workspaces() if device_type == "cuda"}
    measured = {}
    for case, call in calls().items():
        op = case.split(":")[0]
        if op in of_cuda - OF_TABLES:
            measured[case] = measure(op, transposed(case, call))
    assert len(measured) > 20
    over = {case: each for case, each in measured.items() if each[0] > each[1] + SMALL_BYTES}
    assert not over


def measure(op: str, call: MeasuredCall) -> tuple[int, int]:
    """Bytes that a call asked for beside its outputs, and what was stated. A first call loads kernels."""
    arguments = [on_device(each) for each in call.arguments]
    stated = workspace_bytes(op, *arguments, device="cuda", **call.hints)
    run = getattr(native, op)
    run(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = run(*arguments)
    most = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(result)}
    return most - sum(kept.values()), stated
