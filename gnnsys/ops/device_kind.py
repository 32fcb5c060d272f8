"""The kind of device that work is planned for: where a choice depends on it, this is the one place to ask.

An estimate traces a job on the CPU and wants the choices of the device that will run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

ASK_DOCTOR = "Run gnnsys doctor: it says what is missing"
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


def check_device(device: torch.device | str | None, name: str = "device") -> torch.device | None:
    """The device with its number; ValueError that says what is there where it is not. `name` is the argument's."""
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} must be one of torch's, such as 'cpu' or 'cuda:0', got {device!r}") from error
    if wanted.type in ("cpu", "meta"):
        return wanted
    if wanted.type != "cuda":
        try:
            torch.empty(0, device=wanted)
        except (RuntimeError, AssertionError, ImportError) as error:  # by kind of device
            raise ValueError(f"{name}={str(wanted)!r} is not available here: torch finds {_devices()}") from error
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = (torch.cuda.current_device() if count else 0) if wanted.index is None else wanted.index
    if index >= count:
        found = f"{count} CUDA devices" if count else f"no CUDA device. {ASK_DOCTOR}"
        raise ValueError(f"{name}={str(wanted)!r} is not available here: torch finds {found}")
    return torch.device("cuda", index)


def _devices() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "the CPU alone"
    return f"the CPU and {torch.accelerator.device_count()} of type {accelerator.type!r}"
