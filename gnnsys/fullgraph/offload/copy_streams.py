"""How bins are copied between host and device: one side stream in, one out, beside the stream that computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a stream's work, such as a CUDA event."""

    def synchronize(self) -> None:
        """Returns when the stream has come to it."""


class CopyStreams(Protocol):
    """The side streams of a device, one in and one out. What is computed runs on torch's current stream."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory that copies can go to and from, uint8."""
        ...

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory for rows of a layer, which copies can go to and from too. It holds anything yet."""
        ...

    def is_direct(self, tensor: Tensor) -> bool:
        """Whether copies can go to and from this host memory, as they can to and from a buffer."""
        ...

    def bring(self, sources: Sequence[Tensor], starts: Sequence[int], num_bytes: int) -> tuple[Tensor, Mark]:
        """A block on the device, uint8, with a copy of each source from its first byte on, there from the mark on."""
        ...

    def follow(self, mark: Mark) -> None:
        """What is computed from now on begins after the mark."""
        ...

    def fetch(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> Mark:
        """Copies what was computed so far into pieces of a buffer; they are there from the mark on."""
        ...

    def drain(self) -> None:
        """Returns when nothing is under way."""
        ...


class CudaStreams:
    """Those of a CUDA device. A block that comes in belongs to the stream that brought it, so it need not wait for
    kernels that were launched before; who drops it must know that those which read it are done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:  # so much cannot be page-locked: copies go through buffers
            return torch.empty(shape, dtype=dtype, device="cpu")

    def is_direct(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous() and tensor.is_pinned()

    def bring(self, sources: Sequence[Tensor], starts: Sequence[int], num_bytes: int) -> tuple[Tensor, Mark]:
        with torch.cuda.stream(self._in):
            block = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            copy_into(block, sources, starts)
            return block, self._in.record_event()

    def follow(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def fetch(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> Mark:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for tensor, place in zip(tensors, into, strict=True):
                place.copy_(tensor, non_blocking=True)
            return self._out.record_event()

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)


class _Past:
    """A mark that was passed."""

    def synchronize(self) -> None:
        pass


class HostStreams:
    """The same where the device is the CPU: a copy is over when it was asked for."""

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def is_direct(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous()

    def bring(self, sources: Sequence[Tensor], starts: Sequence[int], num_bytes: int) -> tuple[Tensor, Mark]:
        block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        copy_into(block, sources, starts)
        return block, _Past()

    def follow(self, mark: Mark) -> None:
        pass

    def fetch(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> Mark:
        for tensor, place in zip(tensors, into, strict=True):
            place.copy_(tensor)
        return _Past()

    def drain(self) -> None:
        pass


def copy_into(block: Tensor, sources: Sequence[Tensor], starts: Sequence[int]) -> None:
    """Copies each source to where it begins in a block of bytes."""
    for source, first in zip(sources, starts, strict=True):
        if source.numel():
            block[first : first + source.nbytes].copy_(source.view(-1).view(torch.uint8), non_blocking=True)


def streams_between(rows_device: torch.device, device: torch.device) -> CopyStreams | None:
    """What bins move by between where rows live and where they are computed; None where that is one place."""
    return CudaStreams(device) if (rows_device.type, device.type) == ("cpu", "cuda") else None
