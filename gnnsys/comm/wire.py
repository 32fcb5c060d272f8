"""What a message is, as bytes: frame 0 a fixed little-endian header and array descriptors, frame 1 options (JSON, may
be empty), then one raw buffer per array.

Every field is checked against `Limits` before anything is allocated; received arrays are views of the received frames.
Buffers from `COPY_BELOW` bytes on are sent without a copy: nobody may write into them until the reply is there.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor

from gnnsys.comm.errors import WireError

MAGIC = b"GNNS"
VERSION = 1
COPY_BELOW = 1 << 16  # bytes; copying less is cheaper than telling Python that libzmq is done with the memory

REPLY = 1  # flag: an answer
END = 2  # flag: no data, tells only that the reply is complete

OK = 0
FAILED = 1  # the handler raised; options say what
EXPIRED = 2  # its time had passed before work began
MALFORMED = 3
OTHER_VERSION = 4
UNKNOWN_KIND = 5
BUSY = 6

_HEADER = struct.Struct("<4sHHBBHQqiiQqqiIQII")
_PREFIX = struct.Struct("<4sHHBBHQ")  # the same in every version, so that one can tell another what is wrong

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
_CODE_OF = {dtype: (code, plain) for dtype, code, plain in _DTYPES}
_DTYPE_OF = {code: (dtype, dtype.itemsize) for dtype, code, _ in _DTYPES}

Buffer = bytes | np.ndarray  # what is sent as one frame


@dataclass(frozen=True)
class Limits:
    """The largest message that is accepted or sent; a peer that exceeds a frame's limit is disconnected by libzmq."""

    max_arrays: int = 1024
    max_dims: int = 8
    max_frame_bytes: int = 1 << 32
    max_options_bytes: int = 1 << 16
    max_queue: int = 1 << 16  # requests that wait in a server

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_arrays > 0xFFFF or self.max_dims > 0xFF:
            raise ValueError("the header counts at most 65535 arrays of at most 255 dimensions")


class Header(NamedTuple):
    """The fixed fields, in the order of the wire. Times are microseconds, -1 in `batch` and `layer` is none."""

    magic: bytes
    version: int
    kind: int
    flags: int
    status: int
    num_arrays: int
    request_id: int
    timeout_us: int
    priority: int
    sender: int
    incarnation: int
    sequence: int
    batch: int
    layer: int
    path: int
    service_us: int
    chunk: int
    num_chunks: int


class Message:
    """A received request or one message of a reply. `arrays` are views of what was received: never write into them."""

    __slots__ = ("arrays", "header", "options")

    def __init__(self, header: Header, arrays: list[Tensor], options: dict[str, Any]) -> None:
        self.header = header
        self.arrays = arrays
        self.options = options

    @property
    def kind(self) -> int:
        return self.header.kind

    @property
    def status(self) -> int:
        return self.header.status

    @property
    def request_id(self) -> int:
        return self.header.request_id

    @property
    def timeout_us(self) -> int:
        return self.header.timeout_us

    @property
    def priority(self) -> int:
        return self.header.priority

    @property
    def sender(self) -> int:
        return self.header.sender

    @property
    def incarnation(self) -> int:
        return self.header.incarnation

    @property
    def sequence(self) -> int:
        return self.header.sequence

    @property
    def batch(self) -> int:
        return self.header.batch

    @property
    def layer(self) -> int:
        return self.header.layer

    @property
    def path(self) -> int:
        return self.header.path

    @property
    def service_us(self) -> int:
        return self.header.service_us

    @property
    def chunk(self) -> int:
        return self.header.chunk

    @property
    def num_chunks(self) -> int:
        """Of the whole reply, in its last message; 0 in those before."""
        return self.header.num_chunks

    def __repr__(self) -> str:
        arrays = ", ".join(f"{str(array.dtype)[6:]}{list(array.shape)}" for array in self.arrays)
        return f"Message(kind={self.kind}, request_id={self.request_id}, chunk={self.chunk}, arrays=[{arrays}])"


def make_header(
    kind: int,
    request_id: int,
    *,
    flags: int = 0,
    timeout_us: int = 0,
    priority: int = 0,
    sender: int = -1,
    incarnation: int = 0,
    sequence: int = 0,
    batch: int = -1,
    layer: int = -1,
    path: int = 0,
) -> Header:
    """A request's header; the number of arrays is filled in by `encode`."""
    return Header(
        MAGIC, VERSION, kind, flags, OK, 0, request_id, timeout_us, priority, sender, incarnation, sequence, batch,
        layer, path, 0, 0, 0,
    )  # fmt: skip


def encode(header: Header, arrays: Sequence[Tensor], options: dict[str, Any] | None, limits: Limits) -> list[Buffer]:
    """The frames of a message; ValueError where it is larger than `limits` allow or an array cannot be sent."""
    buffers: list[Buffer] = []
    kinds, dims = bytearray(), list[int]()
    for array in arrays:
        code, buffer = _export(array)
        shape = array.shape
        kinds += bytes((code, len(shape)))
        dims += shape
        buffers.append(buffer)
    if arrays:
        _check_sendable(arrays, limits)
    text = b""
    if options:
        text = json.dumps(options, separators=(",", ":")).encode()
        if len(text) > limits.max_options_bytes:
            raise ValueError(
                f"the options of a message take {len(text)} bytes, at most {limits.max_options_bytes} are allowed: "
                "send what is large as an array"
            )
    try:
        front = _HEADER.pack(*header[:5], len(buffers), *header[6:])
    except struct.error as error:
        raise ValueError(f"a field of the message does not fit the header ({error}): {header}") from None
    if buffers:
        front += kinds + _dims_struct(len(dims)).pack(*dims)
    return [front, text, *buffers]


def reply_header(
    request: Header, *, status: int = OK, service_us: int = 0, chunk: int = 0, num_chunks: int = 1, flags: int = 0
) -> Header:
    """The header of one message that answers `request`; `num_chunks` is 0 while more follow, then the number of all."""
    return Header(
        MAGIC, VERSION, request.kind, REPLY | flags, status, 0, request.request_id, 0, request.priority,
        request.sender, request.incarnation, request.sequence, request.batch, request.layer, request.path, service_us,
        chunk, num_chunks,
    )  # fmt: skip


def with_timeout(front: Buffer, timeout_us: int) -> bytes:
    """The first frame of a request again, for sending it later with less time left."""
    assert isinstance(front, bytes)
    header = Header._make(_HEADER.unpack_from(front))._replace(timeout_us=timeout_us)
    return _HEADER.pack(*header) + front[_HEADER.size :]


def read_header(front: bytes, limits: Limits) -> Header:
    """The fixed fields of a first frame; WireError where they are not ours or beyond the limits."""
    if len(front) < _HEADER.size:
        raise WireError("truncated", f"the header has {len(front)} bytes instead of {_HEADER.size}")
    header = Header._make(_HEADER.unpack_from(front))
    if header.magic != MAGIC:
        raise WireError("magic", f"the header begins with {header.magic!r} instead of {MAGIC!r}")
    if header.version != VERSION:
        raise WireError("version", f"the message has version {header.version}, this process speaks {VERSION}")
    if header.num_arrays > limits.max_arrays:
        raise WireError("arrays", f"{header.num_arrays} arrays in a message, at most {limits.max_arrays} are allowed")
    return header


def read_prefix(front: bytes) -> Header | None:
    """What can be known of a broken or foreign message: enough to tell its sender, or None."""
    if len(front) < _PREFIX.size:
        return None
    magic, version, kind, flags, status, _, request_id = _PREFIX.unpack_from(front)
    if magic != MAGIC:
        return None
    return make_header(kind, request_id, flags=flags)._replace(version=version, status=status)


def read_message(header: Header, front: bytes, frames: Sequence[zmq.Frame], limits: Limits) -> Message:
    """The message whose first frame was `front` and whose other frames are `frames`; WireError where they disagree."""
    num_arrays = header.num_arrays
    if len(frames) != 1 + num_arrays:
        raise WireError("frames", f"{len(frames) + 1} frames in a message that announces {num_arrays} arrays")
    options = _read_options(frames[0], limits)
    if num_arrays == 0:
        if len(front) != _HEADER.size:
            raise WireError("descriptors", f"{len(front) - _HEADER.size} bytes of descriptors for no array")
        return Message(header, [], options)
    at = _HEADER.size + 2 * num_arrays
    kinds = front[_HEADER.size : at]
    ndims = kinds[1::2]
    if len(ndims) != num_arrays or len(front) != at + 8 * sum(ndims):
        raise WireError("descriptors", f"a header of {len(front)} bytes does not describe {num_arrays} arrays")
    if max(ndims) > limits.max_dims:
        raise WireError("dims", f"an array of {max(ndims)} dimensions, at most {limits.max_dims} are allowed")
    dims = _dims_struct(sum(ndims)).unpack_from(front, at)
    plan, begin = [], 0
    for code, ndim, frame in zip(kinds[::2], ndims, frames[1:]):
        shape = dims[begin : begin + ndim]
        begin += ndim
        dtype, itemsize = _DTYPE_OF.get(code, (None, 0))
        if dtype is None:
            raise WireError("dtype", f"dtype {code} is unknown; known are 1 to {len(_DTYPES)}")
        # Python's integers do not overflow: an absurd shape cannot look like a small one.
        if (shape and min(shape) < 0) or math.prod(shape) * itemsize != len(frame):
            raise WireError("shape", f"a buffer of {len(frame)} bytes for {dtype} of shape {list(shape)}")
        if len(frame) == 0 and math.prod(size or 1 for size in shape) > limits.max_frame_bytes:
            raise WireError("shape", f"an empty array of shape {list(shape)}")
        plan.append((frame, dtype, itemsize, shape))
    return Message(header, [_import(*each) for each in plan], options)


def num_bytes(frames: Iterable[Buffer | zmq.Frame]) -> int:
    """Bytes of a message's frames, without libzmq's own."""
    return sum(frame.nbytes if isinstance(frame, np.ndarray) else len(frame) for frame in frames)


@lru_cache(maxsize=4096)
def _dims_struct(num_dims: int) -> struct.Struct:
    return struct.Struct(f"<{num_dims}q")


def _export(array: Tensor) -> tuple[int, Buffer]:
    known = _CODE_OF.get(array.dtype)
    if known is None or not array.is_cpu:
        names = ", ".join(str(dtype)[6:] for dtype in DTYPES)
        raise ValueError(f"cannot send {array.dtype} on {array.device}: a message takes CPU tensors of {names}")
    if array.requires_grad:
        array = array.detach()
    if not array.is_contiguous():
        array = array.contiguous()
    code, plain = known
    size = array.nbytes
    if size < COPY_BELOW:
        return code, ctypes.string_at(array.data_ptr(), size) if size else b""
    if plain is not None:
        array = array.view(plain)
    return code, array.numpy()  # a new object: the memory is in use for as long as it lives


def _check_sendable(arrays: Sequence[Tensor], limits: Limits) -> None:
    if len(arrays) > limits.max_arrays:
        raise ValueError(f"{len(arrays)} arrays in a message, at most {limits.max_arrays} are allowed")
    for array in arrays:
        if array.ndim > limits.max_dims:
            raise ValueError(f"an array of {array.ndim} dimensions, at most {limits.max_dims} can be sent")
        if array.nbytes > limits.max_frame_bytes:
            raise ValueError(
                f"an array of {array.nbytes} bytes, at most {limits.max_frame_bytes} fit a frame: send it in pieces"
            )


def _read_options(frame: zmq.Frame, limits: Limits) -> dict[str, Any]:
    size = len(frame)
    if size == 0:
        return {}
    if size > limits.max_options_bytes:
        raise WireError("options", f"{size} bytes of options, at most {limits.max_options_bytes} are allowed")
    try:
        options = json.loads(frame.bytes)
    except (ValueError, RecursionError) as error:
        raise WireError("options", f"the options are not JSON: {error}") from None
    if not isinstance(options, dict):
        raise WireError("options", f"the options are a JSON {type(options).__name__}, not an object")
    return options


def _import(frame: zmq.Frame, dtype: torch.dtype, itemsize: int, shape: tuple[int, ...]) -> Tensor:
    if len(frame) == 0:
        return torch.empty(shape, dtype=dtype)
    array = torch.frombuffer(frame.buffer, dtype=dtype)
    if array.data_ptr() % itemsize:  # libzmq keeps small messages wherever they fell into its own buffer
        array = torch.frombuffer(bytearray(frame.buffer), dtype=dtype)
    return array if len(shape) == 1 else array.view(shape)
