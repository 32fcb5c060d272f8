"""What torch itself decides by the kind of device, decided in a trace on the CPU as the target device would.

Two choices change memory by much: dropout on a device keeps a byte per value where the CPU keeps a float, and
optimizers update all weights at once (foreach), which holds temporaries of the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class _DeviceDropout(TorchFunctionMode):
    """Dropout by the op of devices, with a mask of bytes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is torch.dropout:
            return self._native(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if inplace:
            return F.dropout(input, p, training, inplace)
        return self._native(input, p, training)

    @staticmethod
    def _native(input: torch.Tensor, p: float, train: bool) -> Any:
        if not train or not 0 < p < 1 or input.numel() == 0:
            return torch.dropout(input, p, train)
        return torch.native_dropout(input, p, train)[0]


@contextmanager
def as_on_device(device_type: str) -> Iterator[None]:
    """Torch's choices that differ between CPU and devices are those of `device_type`."""
    if device_type == "cpu":
        yield
        return
    with _DeviceDropout():
        yield


def choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Where the user left it open, optimizers on a device update all weights at once."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused") and not group["differentiable"]:
            group["foreach"] = True
