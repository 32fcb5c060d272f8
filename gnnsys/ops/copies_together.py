"""Copies from a device to the host, several at once: who waits for each waits for the device each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of a device on the host: the host waits once, however many they are."""
    moved = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream(next(t.device for t in tensors if t.is_cuda)).synchronize()
    return moved
