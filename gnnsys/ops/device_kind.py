"""The kind of device that work is planned for: where a choice depends on it, this is the one place to ask.

An estimate traces a job on the CPU and wants the choices of the device that will run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_AS_IF_ON: ContextVar[str | None] = ContextVar("gnnsys_as_if_on", default=None)


def device_kind(tensor: Tensor) -> str:
    """The type of the device that `tensor` is on ("cpu", "cuda"), or that it is traced for."""
    if torch.compiler.is_compiling():
        return tensor.device.type
    return _AS_IF_ON.get() or tensor.device.type


def planned_kind() -> str | None:
    """The type of the device that something is made ready for by an estimate; None where it is made to be used."""
    return _AS_IF_ON.get()


@contextmanager
def as_if_on(device_type: str) -> Iterator[None]:
    """Inside, `device_kind` answers `device_type`, whatever tensors are on. Of this thread, and of this alone."""
    token = _AS_IF_ON.set(device_type)
    try:
        yield
    finally:
        _AS_IF_ON.reset(token)
