"""The copy stage: a batch goes to the device on a stream of its own while the previous one is being used."""

from __future__ import annotations

import torch

from gnnsys.loader.batch import Batch
from gnnsys.pipeline import Stage


def copy_stages(device: torch.device, threads: int) -> list[Stage]:
    """Starts the copy, one batch ahead, and makes the consumer's stream wait for it when the batch is handed out."""
    copy = _Copy(device)
    return [Stage("copy", copy.begin, threads, depth=1), Stage("arrive", copy.arrive, threads=0)]


class _Copy:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def begin(self, batch: Batch) -> tuple[Batch, torch.Event]:
        # What was not gathered into pinned memory (structure) is pinned here: only then is a copy asynchronous.
        pinned = batch.apply(lambda t: t if t.is_pinned() or not t.is_cpu else t.pin_memory())
        with self._stream:
            moved = pinned.to(self._device, non_blocking=True)
        return moved, self._stream.record_event()

    def arrive(self, item: tuple[Batch, torch.Event]) -> Batch:
        batch, copied = item
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied)
        batch.record_stream(stream)
        return batch


def resolve(device: torch.device | str | None) -> torch.device | None:
    """The device to copy to, None for none; ValueError where it is not there."""
    if device is None or torch.device(device).type == "cpu":
        return None
    wanted = torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != wanted.type:
        raise ValueError(f"device={str(wanted)!r} is not available here: torch finds {accelerator or 'no accelerator'}")
    return wanted if wanted.index is not None else torch.device(wanted.type, torch.accelerator.current_device_index())
