"""What kernels read stays theirs until they have read it, however soon whoever called them lets go of it.

torch gives memory to others as soon as no tensor refers to it, in the order of the stream that it was allocated on. A
kernel on another stream, and any kernel that reads pinned host memory where it is, would then read what others write.
Told once that a stream reads a block, torch's allocators wait for that stream's work when the block is let go of.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceReads:
    """Says, for tensors that live as long as this does, which streams read them. Costs a lookup where it is known."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()  # addresses and streams

    def __call__(self, device: torch.device, *tensors: Tensor | None) -> None:
        """The current stream of `device` reads these, on the device or in pinned memory; others are left alone."""
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor is None or tensor.numel() == 0:
                continue
            key = tensor.data_ptr(), stream.cuda_stream
            if key in self._known:
                continue
            if tensor.is_cuda:
                tensor.record_stream(stream)
            elif tensor.is_pinned():
                # A copy that nobody waits for is how torch's allocator of pinned memory learns of a stream.
                tensor.detach().as_strided((1,), (1,)).to(device, non_blocking=True)
            self._known.add(key)
