"""Mutations that know the format: a message is changed where it hurts, and some are changed anywhere.

What becomes of a message depends on (seed, number) alone, so that any one of a million can be made again.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence

from gnnsys.comm.wire import _HEADER, Header

Frames = list[bytes]

_EDGES = (0, 1, -1, 2, 7, 127, 128, 255, 256, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**61,
          2**63 - 1, -(2**31), -(2**63), 10**15)  # fmt: skip
_RANGES = {"s": None, "B": (0, 2**8), "H": (0, 2**16), "I": (0, 2**32), "Q": (0, 2**64), "i": (-(2**31), 2**31),
           "q": (-(2**63), 2**63)}  # fmt: skip
_TEXTS = ("", "../../etc/passwd", "/etc/passwd", "/dev/null", "a/../..", "x" * 5000, "\0", "\ud800", "nan", "~root")
_VALUES = (None, True, [], {}, -1, 2**63, 10**30, 1e308, float("nan"), [[]] * 50, *_TEXTS)


def message(seed: int, number: int, recorded: Sequence[Frames]) -> Frames:
    """Message `number` of a run."""
    chance = random.Random(f"{seed}/{number}")
    frames = list(chance.choice(recorded))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        frames = chance.choice(_MUTATIONS)(frames, chance)
    if len(frames[0]) >= _HEADER.size and chance.random() < 0.9:  # or they would all be one request, sent again
        header = Header._make(_HEADER.unpack_from(frames[0]))
        if header.timeout_us > 10**6:
            header = header._replace(timeout_us=10**6)
        frames[0] = _HEADER.pack(*header._replace(request_id=number)) + frames[0][_HEADER.size :]
    return frames


def _flip_bits(frames: Frames, chance: random.Random) -> Frames:
    at = chance.randrange(len(frames))
    data = bytearray(frames[at])
    for _ in range(chance.randint(1, 8) if data else 0):
        bit = chance.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    return [*frames[:at], bytes(data), *frames[at + 1 :]]


def _set_field(frames: Frames, chance: random.Random) -> Frames:
    if len(frames[0]) < _HEADER.size:
        return frames
    values = list(_HEADER.unpack_from(frames[0]))
    codes = [code for code in _HEADER.format[1:].replace("4s", "s")]
    at = chance.randrange(1, len(values))
    low, high = _RANGES[codes[at]] or (0, 1)
    value = chance.choice(_EDGES) if chance.random() < 0.7 else chance.randrange(low, high)
    values[at] = min(max(value, low), high - 1)
    return [_HEADER.pack(*values) + frames[0][_HEADER.size :], *frames[1:]]


def _set_number(frames: Frames, chance: random.Random) -> Frames:
    """Eight bytes somewhere behind the header: a dimension, a plan's entry, an id."""
    at = chance.randrange(len(frames))
    data, first = frames[at], _HEADER.size if at == 0 else 0
    width = chance.choice((4, 8, 8))
    if len(data) < first + width:
        return frames
    place = chance.randrange(first, len(data) - width + 1)
    place = place if chance.random() < 0.2 else max(first, place // width * width)
    value = chance.choice(_EDGES) & (2 ** (8 * width) - 1)
    return [*frames[:at], data[:place] + value.to_bytes(width, "little") + data[place + width :], *frames[at + 1 :]]


def _set_descriptor(frames: Frames, chance: random.Random) -> Frames:
    if len(frames[0]) < _HEADER.size:
        return frames
    num_arrays = Header._make(_HEADER.unpack_from(frames[0])).num_arrays
    data, end = bytearray(frames[0]), min(len(frames[0]), _HEADER.size + 2 * num_arrays)
    if end > _HEADER.size:
        data[chance.randrange(_HEADER.size, end)] = chance.choice((0, 1, 2, 3, 4, 5, 8, 9, 10, 14, 15, 16, 200, 255))
    return [bytes(data), *frames[1:]]


def _set_dimension(frames: Frames, chance: random.Random) -> Frames:
    if len(frames[0]) < _HEADER.size:
        return frames
    num_arrays = Header._make(_HEADER.unpack_from(frames[0])).num_arrays
    first = _HEADER.size + 2 * num_arrays
    num_dims = sum(frames[0][_HEADER.size + 1 : first : 2])
    if not num_dims or first + 8 * num_dims > len(frames[0]):
        return frames
    place = first + 8 * chance.randrange(num_dims)
    value = struct.pack("<q", min(max(chance.choice(_EDGES), -(2**63)), 2**63 - 1))
    return [frames[0][:place] + value + frames[0][place + 8 :], *frames[1:]]


def _change_options(frames: Frames, chance: random.Random) -> Frames:
    """Another value in the options, which stay JSON, and a header that says how long they are."""
    if len(frames[0]) < _HEADER.size:
        return frames
    header = Header._make(_HEADER.unpack_from(frames[0]))
    first = _HEADER.size + 2 * header.num_arrays
    first += 8 * sum(frames[0][_HEADER.size + 1 : first : 2])
    try:
        options = json.loads(frames[0][first : first + header.num_option_bytes] or b"{}")
        _change_inside(options, chance)
        text = json.dumps(options, separators=(",", ":")).encode()
    except (ValueError, AttributeError, IndexError, TypeError):
        return frames
    arrays = frames[0][first + header.num_option_bytes :].lstrip(b"\0") if not header.num_arrays else b""
    front = frames[0][:first] + text
    if header.num_arrays:
        old = first + header.num_option_bytes
        arrays = bytes(-len(front) % 8) + frames[0][old + -old % 8 :]
    changed = _HEADER.pack(*header._replace(num_option_bytes=len(text)))
    return [changed + (front + arrays)[_HEADER.size :], *frames[1:]]


def _change_inside(value: object, chance: random.Random) -> None:
    keys: list[object] = list(value) if isinstance(value, dict) else list(range(len(value)))  # type: ignore[arg-type]
    key = chance.choice(keys)
    inner = value[key]  # type: ignore[index]
    if isinstance(inner, (dict, list)) and inner and chance.random() < 0.7:
        _change_inside(inner, chance)
    elif chance.random() < 0.2:
        del value[key]  # type: ignore[attr-defined]
    else:
        value[key] = chance.choice((*_VALUES, *_EDGES))  # type: ignore[index]


def _cut(frames: Frames, chance: random.Random) -> Frames:
    at = chance.randrange(len(frames))
    return [*frames[:at], frames[at][: chance.randint(0, len(frames[at]))], *frames[at + 1 :]]


def _lengthen(frames: Frames, chance: random.Random) -> Frames:
    at = chance.randrange(len(frames))
    return [*frames[:at], frames[at] + chance.randbytes(chance.choice((1, 7, 8, 64, 4096))), *frames[at + 1 :]]


def _drop_frame(frames: Frames, chance: random.Random) -> Frames:
    at = chance.randrange(len(frames))
    return [*frames[:at], *frames[at + 1 :]] or [b""]


def _repeat_frame(frames: Frames, chance: random.Random) -> Frames:
    at = chance.randrange(len(frames))
    return [*frames[:at], *[frames[at]] * chance.choice((2, 3, 20)), *frames[at + 1 :]]


def _swap_frames(frames: Frames, chance: random.Random) -> Frames:
    return chance.sample(frames, len(frames))


ANYWHERE = (_flip_bits, _cut, _lengthen, _drop_frame, _repeat_frame, _swap_frames)  # whatever the format

_MUTATIONS = (
    _flip_bits, _set_field, _set_field, _set_number, _set_number, _set_number, _set_descriptor, _set_dimension,
    _change_options, _change_options, _cut, _lengthen, _drop_frame, _repeat_frame, _swap_frames,
)  # fmt: skip
