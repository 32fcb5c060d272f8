"""What a message is, as bytes.

Frame 0 is a fixed little-endian header, array descriptors, options (JSON, may be empty) and the bytes of small arrays,
each at a multiple of eight; every array from INLINE_BELOW bytes on is a frame of its own, or several where it has more
than FRAME_BYTES, sent without a copy: nobody may write into it until the reply is there. A frame costs more than its
bytes (the GIL changes hands for each), and one that arrives in several is copied once: replies are cut to one.
Every field is checked against `Limits` before anything is allocated; received arrays are views of the received frames.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gnnsys.comm.arrays import (
    DTYPE_OF,
    FRAME_BYTES,
    Buffer,
    ReceivedFrame,
    aligned,
    cut,
    export_array,
    import_array,
    is_inline,
    join,
)
from gnnsys.comm.errors import WireError

MAGIC = b"GNNS"
VERSION = 4
_OURS = (MAGIC, VERSION)

REPLY = 1  # flag: an answer
END = 2  # flag: no data, tells only that the reply is complete

OK = 0
FAILED = 1  # the handler raised; options say what
EXPIRED = 2  # its time had passed before work began
MALFORMED = 3
OTHER_VERSION = 4
UNKNOWN_KIND = 5
BUSY = 6

_HEADER = struct.Struct("<4sHHBBHQqiiQqqiIIQIIIII")
HEADER_BYTES = _HEADER.size
_PREFIX = struct.Struct("<4sHHBBHQ")  # the same in every version, so that one can tell another what is wrong
_NOT_OF_REQUESTS = slice(17, 21)  # fields of a header that say how a request was served
_NO_REPLY = (0, 0, 0, 0)
_NO_FLAGS = (0, 0)
# of each array: its frames (none: it lies in the first), offset, dtype, shape and count
Plan: TypeAlias = list[tuple[Any, int, torch.dtype, tuple[int, ...], int]]
_MAX_US = (1 << 32) - 1  # over an hour, which is as long as a server keeps a request
_PADDING = tuple(bytes(-position % 8) for position in range(8))


@dataclass(frozen=True)
class Limits:
    """The largest message that is accepted or sent, and what of them is kept."""

    max_arrays: int = 1024
    max_dims: int = 8
    max_array_bytes: int = 1 << 32
    max_frames: int = 1 << 12  # of a message
    max_options_bytes: int = 1 << 16
    max_queue: int = 1 << 16  # requests that a server has and has not answered
    max_client_requests: int = 1 << 14  # of them, those of one client
    max_client_bytes: int = 1 << 30  # of one client's unanswered requests, and one more beyond it
    max_bytes: int = 1 << 33  # of all clients' unanswered requests, and one more beyond it
    max_unread: int = 1 << 13  # messages to a client that does not read; what comes after them is dropped
    max_seconds: int = 3600  # that a server keeps a request, whatever time its sender gave it

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_arrays > 0xFFFF or self.max_dims > 0xFF:
            raise ValueError("the header counts at most 65535 arrays of at most 255 dimensions")


class Header(NamedTuple):
    """The fixed fields, in the order of the wire. Times are microseconds.

    `batch` is the batch number (the position counted across epochs), `layer` the hop or layer, `loader` the loader that
    the message belongs to; -1, -1 and 0 where there is none. `share` is how many bytes per second the sender can take
    of what this peer answers; 0: whatever comes. A reply repeats all but `share`, and says in `queued_us` how long the
    request waited for a worker and in `served_us` how long it was worked on.
    """

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
    loader: int
    share: int
    queued_us: int
    served_us: int
    chunk: int
    num_chunks: int
    num_option_bytes: int


_make: Callable[[type[Header], tuple[Any, ...]], Header] = tuple.__new__  # Header._make is three calls


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
    def loader(self) -> int:
        return self.header.loader

    @property
    def share(self) -> int:
        return self.header.share

    @property
    def queued_us(self) -> int:
        return self.header.queued_us

    @property
    def served_us(self) -> int:
        return self.header.served_us

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
    loader: int = 0,
    share: int = 0,
) -> Header:
    """A request's header; what depends on the arrays and options is filled in by `encode`."""
    return Header(
        MAGIC, VERSION, kind, flags, OK, 0, request_id, timeout_us, priority, sender, incarnation, sequence, batch,
        layer, path, loader, share, 0, 0, 0, 0, 0,
    )  # fmt: skip


def encode(header: Header, arrays: Sequence[Tensor], options: dict[str, Any] | None, limits: Limits) -> list[Buffer]:
    """The frames of a message; ValueError where it is larger than `limits` allow or an array cannot be sent."""
    text = _write_options(options, limits) if options else b""
    try:
        front = _HEADER.pack(*header[:5], len(arrays), *header[6:-1], len(text))
    except struct.error as error:
        raise ValueError(f"a field of the message does not fit the header ({error}): {header}") from None
    if not arrays:
        return [front + text]
    if len(arrays) > limits.max_arrays:
        raise ValueError(f"{len(arrays)} arrays in a message, at most {limits.max_arrays} are allowed")
    kinds = bytearray()
    dims: list[int] = []
    inside: list[bytes] = []  # of the first frame, behind descriptors and options
    frames: list[Buffer] = []
    at = len(front) + 2 * len(arrays) + 8 * sum(array.dim() for array in arrays) + len(text)
    for array in arrays:
        shape = array.shape
        if len(shape) > limits.max_dims:
            raise ValueError(f"an array of {len(shape)} dimensions, at most {limits.max_dims} can be sent")
        if array.nbytes > limits.max_array_bytes:
            what = f"an array of {array.nbytes} bytes, at most {limits.max_array_bytes} fit a message"
            raise ValueError(f"{what}: send it in pieces")
        code, buffer = export_array(array)
        kinds += bytes((code, len(shape)))
        dims += shape
        padding = _PADDING[at % 8]
        if isinstance(buffer, bytes) and is_inline(at + len(padding), len(buffer)):
            inside += (padding, buffer)
            at += len(padding) + len(buffer)
        else:
            frames += cut(buffer)
    if len(frames) >= limits.max_frames:
        raise ValueError(
            f"a message of {num_bytes(frames)} bytes, at most {limits.max_frames} frames of {FRAME_BYTES} bytes can be "
            "sent: send it in pieces"
        )
    return [b"".join((front, kinds, _dims_struct(len(dims)).pack(*dims), text, *inside)), *frames]


def put_header(front: bytearray, header: Header, num_arrays: int) -> None:
    """Fills the room that was left for the header of a message which somebody else has encoded. It has no options."""
    _HEADER.pack_into(front, 0, *header[:5], num_arrays, *header[6:])


def put_reply(front: bytearray, request: Header, served_us: int, num_arrays: int) -> None:
    """The same for a reply of one message: the header of the request, but for what tells a reply apart."""
    _HEADER.pack_into(
        front, 0, *request[:3], REPLY, OK, num_arrays, request[6], 0, *request[8:16], 0, 0,
        served_us if served_us < _MAX_US else _MAX_US, 0, 1, 0,
    )  # fmt: skip


def put_request(
    front: bytearray, kind: int, num_arrays: int, request_id: int, timeout_us: int, priority: int, sender: int,
    incarnation: int, batch: int, layer: int, path: int, loader: int, share: int = 0,
) -> None:  # fmt: skip
    """The same for a request, from its fields."""
    _HEADER.pack_into(
        front, 0, MAGIC, VERSION, kind, 0, OK, num_arrays, request_id, timeout_us, priority, sender, incarnation, 0,
        batch, layer, path, loader, share, 0, 0, 0, 0, 0,
    )  # fmt: skip


def reply_header(
    request: Header, *, status: int = OK, queued_us: int = 0, served_us: int = 0, chunk: int = 0, num_chunks: int = 1,
    flags: int = 0,
) -> Header:  # fmt: skip
    """The header of one message that answers `request`; `num_chunks` is 0 while more follow, then the number of all."""
    return Header(
        MAGIC, VERSION, request.kind, REPLY | flags, status, 0, request.request_id, 0, request.priority,
        request.sender, request.incarnation, request.sequence, request.batch, request.layer, request.path,
        request.loader, 0, min(queued_us, _MAX_US), min(served_us, _MAX_US), chunk, num_chunks, 0,
    )  # fmt: skip


def with_timeout(front: Buffer, timeout_us: int) -> bytes:
    """The first frame of a request again, for sending it later with less time left."""
    assert isinstance(front, (bytes, bytearray))
    header = Header._make(_HEADER.unpack_from(front))._replace(timeout_us=timeout_us)
    return _HEADER.pack(*header) + bytes(front[_HEADER.size :])


def read_header(front: bytes | memoryview, limits: Limits) -> Header:
    """The fixed fields of a first frame; WireError where they are not ours or beyond the limits."""
    try:
        header = _make(Header, _HEADER.unpack_from(front))
    except struct.error:
        found = read_prefix(front)
        if found is not None and found.version != VERSION:  # whose header may be shorter
            raise _other_version(found.version) from None
        raise WireError("truncated", f"the header has {len(front)} bytes instead of {_HEADER.size}") from None
    if header[:2] != _OURS or header[5] > limits.max_arrays or header[21] > limits.max_options_bytes:
        raise _what_is_wrong(header, limits)
    return header


def read_request(front: bytes | memoryview, limits: Limits) -> Header:
    """The same of a request: without flags, and with zero in the fields of replies."""
    header = read_header(front, limits)
    if header[3:5] != _NO_FLAGS or header[_NOT_OF_REQUESTS] != _NO_REPLY:
        check_request(header)
    return header


def _what_is_wrong(header: Header, limits: Limits) -> WireError:
    if header.magic != MAGIC:
        return WireError("magic", f"the header begins with {header.magic!r} instead of {MAGIC!r}")
    if header.version != VERSION:
        return _other_version(header.version)
    if header.num_arrays > limits.max_arrays:
        return WireError("arrays", f"{header.num_arrays} arrays in a message, at most {limits.max_arrays} are allowed")
    text = f"{header.num_option_bytes} bytes of options, at most {limits.max_options_bytes} are allowed"
    return WireError("options", text)


def _other_version(version: int) -> WireError:
    return WireError("version", f"the message has version {version}, this process speaks {VERSION}")


def check_request(header: Header) -> None:
    """WireError unless a header can be a request's: no flags, and zero in the fields of replies."""
    if header.flags & REPLY:
        raise WireError("flags", "a reply where a request was expected")
    if header.flags or header.status or header[_NOT_OF_REQUESTS] != _NO_REPLY:
        raise WireError(
            "flags", f"a request with flags {header.flags}, status {header.status} or other fields of replies"
        )


def read_prefix(front: bytes | memoryview) -> Header | None:
    """What can be known of a broken or foreign message: enough to tell its sender, or None."""
    if len(front) < _PREFIX.size:
        return None
    magic, version, kind, flags, status, _, request_id = _PREFIX.unpack_from(front)
    if magic != MAGIC:
        return None
    return make_header(kind, request_id, flags=flags)._replace(version=version, status=status)


def read_message(
    header: Header, frames: Sequence[ReceivedFrame], limits: Limits, check: Callable[[Plan], None] | None = None
) -> Message:
    """The message whose first frame begins with `header`; WireError where its parts disagree.

    `check` may refuse what the message describes before any of it is copied.
    """
    front = frames[0].buffer
    num_arrays, at = header.num_arrays, _HEADER.size + 2 * header.num_arrays
    kinds = bytes(front[_HEADER.size : at])
    ndims = kinds[1::2]
    num_dims = sum(ndims)
    if len(kinds) != 2 * num_arrays or len(front) < at + 8 * num_dims + header.num_option_bytes:
        raise WireError("descriptors", f"a first frame of {len(front)} bytes does not describe {num_arrays} arrays")
    if num_arrays and max(ndims) > limits.max_dims:
        raise WireError("dims", f"an array of {max(ndims)} dimensions, at most {limits.max_dims} are allowed")
    dims = _dims_struct(num_dims).unpack_from(front, at)
    at += 8 * num_dims
    options = _read_options(bytes(front[at : at + header.num_option_bytes])) if header.num_option_bytes else {}
    plan = locate_arrays(kinds, dims, at + header.num_option_bytes, frames, limits)
    if check is not None:
        check(plan)
    if not plan:
        return Message(header, [], options)
    front = aligned(front)
    arrays = [
        import_array(join(own, count * dtype.itemsize) if own else front, offset, dtype, shape, count)
        for own, offset, dtype, shape, count in plan
    ]
    return Message(header, arrays, options)


def locate_arrays(
    kinds: bytes, dims: tuple[int, ...], at: int, frames: Sequence[ReceivedFrame], limits: Limits
) -> Plan:
    """Where each array lies.

    WireError where descriptors, dimensions and frames disagree; nothing is allocated for what they say.
    """
    plan: Plan = []
    begin, num_used = 0, 1
    for code, ndim in zip(kinds[::2], kinds[1::2], strict=True):
        shape = dims[begin : begin + ndim]
        begin += ndim
        dtype, itemsize = DTYPE_OF.get(code, (None, 0))
        if dtype is None:
            raise WireError("dtype", f"dtype {code} is unknown; known are 1 to {len(DTYPE_OF)}")
        count = math.prod(shape)  # Python's integers do not overflow: an absurd shape cannot look like a small one
        size = count * itemsize
        if (shape and min(shape) < 0) or (
            size == 0 and math.prod(each or 1 for each in shape) > limits.max_array_bytes
        ):
            raise WireError("shape", f"an array of shape {list(shape)}")
        if is_inline(at + -at % 8, size):
            at += -at % 8
            plan.append(([], at, dtype, shape, count))
            at += size
            continue
        end = num_used - -size // FRAME_BYTES
        lengths = [len(frame) for frame in frames[num_used:end]] if end <= len(frames) else []
        if sum(lengths) != size or lengths[:-1] != [FRAME_BYTES] * (len(lengths) - 1):
            raise WireError("shape", f"no frames of {size} bytes for {dtype} of shape {list(shape)}")
        plan.append((frames[num_used:end], 0, dtype, shape, count))
        num_used = end
    if num_used != len(frames):
        raise WireError("frames", f"{len(frames)} frames in a message whose arrays take {num_used}")
    if at != len(frames[0]):
        raise WireError("shape", f"a first frame of {len(frames[0])} bytes in a message that describes one of {at}")
    return plan


def num_bytes(frames: Iterable[Buffer | ReceivedFrame]) -> int:
    """Bytes of a message's frames, without libzmq's own."""
    total = 0
    for frame in frames:
        total += frame.nbytes if isinstance(frame, np.ndarray) else len(frame)
    return total


@lru_cache(maxsize=4096)
def _dims_struct(num_dims: int) -> struct.Struct:
    return struct.Struct(f"<{num_dims}q")


def _write_options(options: dict[str, Any], limits: Limits) -> bytes:
    text = json.dumps(options, separators=(",", ":")).encode()
    if len(text) > limits.max_options_bytes:
        raise ValueError(
            f"the options of a message take {len(text)} bytes, at most {limits.max_options_bytes} are allowed: "
            "send what is large as an array"
        )
    return text


def _read_options(text: bytes) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("options", f"the options are not JSON: {error}") from None
    if not isinstance(options, dict):
        raise WireError("options", f"the options are a JSON {type(options).__name__}, not an object")
    return options
