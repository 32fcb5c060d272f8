"""The copy stage: a batch goes to the device on a stream of its own while the previous one is being used.

What is copied is structure and rows apart, before they are made a Batch, so that compacting can be the device's work;
or a Batch, where a transform of the user's ran on the host. Both have `apply`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.loader.join import Sampled


class Copied(NamedTuple):
    """Something whose tensors are on the device once `event` has happened."""

    item: Any  # Sampled or Batch
    event: torch.Event


class Copy:
    """`begin` starts the copy; `arrive` makes the consumer's stream wait for it when the batch is handed out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def begin(self, item: Any) -> Copied:
        num_bytes = 0

        def pin(tensor: Tensor) -> Tensor:
            """What was not gathered into pinned memory (structure): only then is a copy asynchronous."""
            nonlocal num_bytes
            num_bytes += tensor.nbytes
            return tensor if tensor.is_pinned() or not tensor.is_cpu else tensor.pin_memory()

        pinned = item.apply(pin)
        with self._stream:
            moved = pinned.apply(lambda t: t.to(self._device, non_blocking=True))
        if isinstance(item, Sampled) and item.trace is not None:
            item.trace.bytes["device"] = num_bytes
        return Copied(moved, self._stream.record_event())

    def arrive(self, copied: Copied) -> Any:
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied.event)

        def record(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        copied.item.apply(record)
        return copied.item


def resolve(device: torch.device | str | None) -> torch.device | None:
    """The device to copy to, None for none; ValueError where it is not there."""
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one of torch's, such as 'cpu' or 'cuda:0', got {device!r}") from error
    if wanted.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != wanted.type:
        raise ValueError(f"device={str(wanted)!r} is not available here: torch finds {accelerator or 'no accelerator'}")
    return wanted if wanted.index is not None else torch.device(wanted.type, torch.accelerator.current_device_index())
