"""Tensors as bytes and back, without a copy where memory allows it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import zmq
from torch import Tensor

# Part of the format, in bytes: smaller arrays travel in a message's first frame, while there is room; larger ones are
# cut into frames. libzmq takes memory for a frame once it is announced, whoever announces it: so frames are small.
INLINE_BELOW = 1 << 16
FRONT_BYTES = 2 << 20
FRAME_BYTES = 4 << 20

Buffer = bytes | bytearray | np.ndarray  # what is sent as one frame


class ReceivedFrame(Protocol):
    """A frame that came: libzmq's, or one that was sealed. `buffer` opens that."""

    @property
    def buffer(self) -> Any: ...

    def __len__(self) -> int: ...


# dtype, its number on the wire, and the type of the same width that numpy can export
_DTYPES = (
    (torch.uint8, 1, None),
    (torch.int8, 2, None),
    (torch.int16, 3, None),
    (torch.int32, 4, None),
    (torch.int64, 5, None),
    (torch.float16, 6, None),
    (torch.bfloat16, 7, torch.int16),
    (torch.float32, 8, None),
    (torch.float64, 9, None),
    (torch.bool, 10, None),
    (torch.uint16, 11, None),
    (torch.uint32, 12, None),
    (torch.uint64, 13, None),
    (torch.float8_e4m3fn, 14, torch.int8),
    (torch.float8_e5m2, 15, torch.int8),
)
DTYPES = tuple(dtype for dtype, _, _ in _DTYPES)
DTYPE_OF = {code: (dtype, dtype.itemsize) for dtype, code, _ in _DTYPES}
CODE_OF = {dtype: code for dtype, code, _ in _DTYPES}
_CODE_OF = {dtype: (code, plain) for dtype, code, plain in _DTYPES}


def export_array(array: Tensor) -> tuple[int, bytes | np.ndarray]:
    """The number of its dtype and its bytes: copied where it is small, otherwise numpy's view of its memory."""
    known = _CODE_OF.get(array.dtype)
    if known is None or not array.is_cpu:
        names = ", ".join(str(dtype)[6:] for dtype in DTYPES)
        raise ValueError(f"cannot send {array.dtype} on {array.device}: a message takes CPU tensors of {names}")
    if not array.is_contiguous():
        array = array.contiguous()
    code, plain = known
    size = array.nbytes
    if size < INLINE_BELOW:
        return code, ctypes.string_at(array.data_ptr(), size) if size else b""
    if array.requires_grad:
        array = array.detach()
    if plain is not None:
        array = array.view(plain)
    return code, array.numpy()  # a new object: the memory is in use for as long as it lives


def is_inline(at: int, size: int) -> bool:
    """Whether an array of `size` bytes lies in the first frame, of which `at` bytes (a multiple of eight) are taken."""
    return size < INLINE_BELOW and (not size or at + size <= FRONT_BYTES)


def cut(buffer: Buffer) -> list[Buffer]:
    """The frames of an array that is not in the first one; nothing is copied."""
    if isinstance(buffer, (bytes, bytearray)) or buffer.nbytes <= FRAME_BYTES:
        return [buffer]
    flat = buffer.reshape(-1).view(np.uint8)
    return [flat[begin : begin + FRAME_BYTES] for begin in range(0, flat.size, FRAME_BYTES)]


def join(frames: Sequence[Any], size: int) -> memoryview:
    """The array again that came in several frames, which have `size` bytes together: copied, unless it is one.

    Sealed frames are opened, each at its place.
    """
    if len(frames) == 1:
        return frames[0].buffer  # type: ignore[no-any-return]
    whole = np.empty(size, np.uint8)
    begin = 0
    for frame in frames:
        target = whole[begin : begin + len(frame)]
        if isinstance(frame, zmq.Frame):
            target[:] = frame.buffer
        else:
            frame.copy_to(target)
        begin += len(frame)
    return whole.data


def import_array(memory: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...], count: int) -> Tensor:
    """A view of received memory, which it keeps alive."""
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    array = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return array if len(shape) == 1 else array.view(shape)


def aligned(memory: memoryview) -> memoryview:
    """The same bytes where eight-byte numbers may lie: libzmq keeps small frames wherever they fell into its buffer."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory if address % 8 == 0 else memoryview(bytearray(memory))
