"""The wire format alone: what is encoded comes back, and what is broken is refused before anything is allocated."""

from __future__ import annotations

import struct

import pytest
import torch
import zmq

from gnnsys.comm import Limits, Message, WireError, wire
from gnnsys.comm.arrays import DTYPES, FRAME_BYTES, FRONT_BYTES
from gnnsys.store.message_plan import CHUNK_BYTES
from tests.support.grid import grid


def decode(frames, limits=None) -> Message:
    limits = limits or Limits()
    received = [zmq.Frame(frame if isinstance(frame, bytes) else frame.tobytes()) for frame in frames]
    return wire.read_message(wire.read_header(received[0].buffer, limits), received, limits)


def encoded(arrays=(), options=None, **fields):
    return wire.encode(wire.make_header(16, 9, **fields), arrays, options, Limits())


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(size * dtype.itemsize, dtype=torch.int64).to(torch.uint8).view(dtype).reshape(shape)


@grid(
    shape=[(), (0,), (5,), (3, 4), (2, 0, 7), (1, 2, 3, 2), (40_000,), (300, 300)],
    dtype=[dtype for dtype in DTYPES if dtype != torch.bool],
)
def test_an_array_of_any_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    array = values(dtype, shape)
    (received,) = decode(encoded([array])).arrays
    assert received.dtype == dtype and received.shape == array.shape
    assert torch.equal(received.reshape(-1).view(torch.uint8), array.reshape(-1).view(torch.uint8))


def test_booleans_strided_and_differentiable_arrays_come_back():
    arrays = [torch.tensor([True, False, True]), torch.arange(12).view(3, 4).t(), torch.ones(3, requires_grad=True)]
    received = decode(encoded(arrays)).arrays
    assert all(torch.equal(a, b) for a, b in zip(received, arrays, strict=True))


def test_every_field_of_the_header_comes_back():
    fields = dict(timeout_us=5, priority=-3, sender=7, incarnation=2**63, sequence=11, batch=12, layer=2)
    fields |= dict(path=4, loader=2**32 - 1, share=2**64 - 1)
    message = decode(encoded([torch.zeros(2)], {"name": "é", "rows": [1, 2]}, **fields))
    assert {name: getattr(message, name) for name in fields} == fields
    assert message.kind == 16 and message.request_id == 9 and message.options == {"name": "é", "rows": [1, 2]}


def test_a_reply_says_how_long_it_was_queued_and_served_and_repeats_whose_request_it_was():
    request = wire.make_header(16, 9, batch=12, layer=2, path=4, loader=6, priority=-1, share=8)
    reply = wire.reply_header(request, queued_us=3, served_us=1 << 40)
    assert (reply.queued_us, reply.served_us) == (3, (1 << 32) - 1), "as much as the field holds"
    assert (reply.batch, reply.layer, reply.path, reply.loader, reply.priority) == (12, 2, 4, 6, -1)
    assert reply.share == 0, "that was the receiver's to say"
    wire.check_request(request)
    for name in ("queued_us", "served_us", "chunk", "num_chunks", "status", "flags"):
        with pytest.raises(WireError):
            wire.check_request(request._replace(**{name: 2}))


def test_received_arrays_are_views_of_their_frames_and_aligned():
    received = [
        zmq.Frame(frame) for frame in encoded([torch.arange(3), torch.arange(100_000), torch.rand(5)], {"a": 1})
    ]
    arrays = wire.read_message(wire.read_header(received[0].buffer, Limits()), received, Limits()).arrays
    assert arrays[1].data_ptr() == torch.frombuffer(received[1].buffer, dtype=torch.uint8).data_ptr()
    assert all(array.data_ptr() % array.dtype.itemsize == 0 for array in arrays)


@pytest.mark.parametrize("shift", range(8))
def test_arrays_are_aligned_wherever_the_first_frame_lies(shift):
    """libzmq hands out small frames at any address."""
    (front,) = encoded([torch.arange(3), torch.rand(5, dtype=torch.float64)], {"a": 1})
    memory = bytearray(shift) + front
    moved = [memoryview(memory)[shift:]]
    moved[0] = type("At", (), {"buffer": moved[0], "__len__": lambda self: len(self.buffer)})()
    arrays = wire.read_message(wire.read_header(front, Limits()), moved, Limits()).arrays
    assert arrays[0].tolist() == [0, 1, 2] and all(array.data_ptr() % 8 == 0 for array in arrays)


def test_small_arrays_are_copied_at_once_and_may_be_changed():
    array = torch.arange(8)
    frames = encoded([array])
    array.zero_()
    assert decode(frames).arrays[0].tolist() == list(range(8))


def test_large_arrays_travel_in_frames_of_a_few_megabytes_and_many_small_ones_too():
    assert CHUNK_BYTES <= FRAME_BYTES, "chunks of rows are views of what arrives"
    large = torch.arange(3 * FRAME_BYTES // 8 + 5)
    arrays = [torch.arange(3), large, large[: FRAME_BYTES // 8], large[: FRAME_BYTES // 8 + 1].view(torch.int32)]
    arrays += [torch.full((8000,), number) for number in range(60)] + [torch.empty(0, 3), large[:9]]
    frames = encoded(arrays, {"a": 1})
    sizes = [len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in frames]
    assert sizes[1:8] == [FRAME_BYTES] * 3 + [40] + [FRAME_BYTES] * 2 + [8]
    assert len(frames) > 8 and max(sizes) <= FRAME_BYTES and sizes[0] <= FRONT_BYTES
    for sent, received in zip(arrays, decode(frames).arrays, strict=True):
        assert sent.dtype == received.dtype and torch.equal(sent, received)
    for broken in (frames[:-1], [*frames, b"x"], [*frames[:2], *frames[3:]], [frames[0], frames[4], *frames[2:]]):
        with pytest.raises(WireError):
            decode(broken)
    halves = [frames[1][: FRAME_BYTES // 2], frames[1][FRAME_BYTES // 2 :]]
    with pytest.raises(WireError):  # cut elsewhere: one message has one form
        decode([frames[0], *halves, *frames[2:]])


def message_with(payload=bytes(range(32)), options=b"", frames=(), **changed) -> list[bytes]:
    """A message of one array int64[4], written out by hand, with fields or the descriptor changed."""
    dtype, dims = changed.pop("dtype", 5), changed.pop("dims", (4,))
    ndim = changed.pop("ndim", len(dims))
    header = wire.make_header(16, 9)._replace(**({"num_arrays": 1, "num_option_bytes": len(options)} | changed))
    front = wire._HEADER.pack(*header) + struct.pack(f"<BB{len(dims)}q", dtype, ndim, *dims) + options
    return [front + bytes(-len(front) % 8) + payload, *frames]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (message_with(magic=b"HTTP"), "magic"),
        (message_with(version=1), "version"),
        (message_with(num_arrays=0xFFFF), "arrays"),
        (message_with(num_arrays=2), "shape"),
        (message_with(num_arrays=60), "descriptors"),
        (message_with(frames=[b"more"]), "frames"),
        (message_with(dtype=99), "dtype"),
        (message_with(dims=(5,)), "shape"),
        (message_with(dims=(3,)), "shape"),
        (message_with(dims=(-4,)), "shape"),
        (message_with(dims=(-2, -2)), "shape"),
        (message_with(dims=(2**62, 2**62)), "shape"),
        (message_with(dims=(2**32, 2**32, 4)), "shape"),
        (message_with(dims=(100_000,)), "shape"),
        (message_with(dims=(100_000,), frames=[b"short"]), "shape"),
        (message_with(dims=(0, 2**62, 2**62), payload=b""), "shape"),
        (message_with(dims=(1,) * 9), "dims"),
        (message_with(ndim=200), "descriptors"),
        (message_with(num_option_bytes=1000), "descriptors"),
        (message_with(num_option_bytes=2**31), "options"),
        (message_with(payload=bytes(31)), "shape"),
        (message_with(payload=bytes(33)), "shape"),
        ([message_with()[0][:30]], "truncated"),
        ([b""], "truncated"),
        (message_with(options=b"{"), "options"),
        (message_with(options=b"[1]"), "options"),
        (message_with(options=b"\xff\xfe"), "options"),
        (message_with(options=b"[" * 60_000), "options"),
        (message_with(options=b" " * 70_000), "options"),
    ],
)
def test_a_broken_message_is_refused_and_the_reason_named(frames, reason):
    with pytest.raises(WireError) as raised:
        decode(frames)
    assert raised.value.reason == reason


def test_the_unbroken_form_of_those_messages_is_what_is_sent():
    array = torch.frombuffer(bytearray(range(32)), dtype=torch.int64)
    assert message_with() == encoded([array])
    assert torch.equal(decode(message_with(options=b'{"a":1}')).arrays[0], array)


def test_a_truncated_message_never_decodes():
    front = message_with(options=b'{"a":1}')[0]
    for length in range(len(front)):
        with pytest.raises(WireError):
            decode([front[:length]])


@pytest.mark.parametrize(
    ("arrays", "options", "match"),
    [
        ([torch.zeros(2, dtype=torch.complex64)], None, "complex64"),
        ([torch.zeros(2, device="meta")], None, "meta"),
        ([torch.zeros([1] * 9)], None, "9 dimensions"),
        ([torch.zeros(1)] * 1025, None, "1025 arrays"),
        ([torch.empty(1, dtype=torch.uint8).expand(2**32 + 1)], None, "4294967297 bytes.*send it in pieces"),
        ([], {"text": "x" * 70_000}, "as an array"),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_is_asked_for(arrays, options, match):
    with pytest.raises(ValueError, match=match):
        encoded(arrays, options)


def test_a_field_that_does_not_fit_the_header_is_named():
    with pytest.raises(ValueError, match="priority=4294967296"):
        encoded(priority=2**32)


def test_headers_that_are_put_into_place_are_those_of_the_other_functions():
    header = wire.make_header(
        16,
        5,
        timeout_us=10**7,
        priority=-3,
        sender=4,
        incarnation=1 << 60,
        sequence=7,
        batch=9,
        layer=2,
        path=8,
        loader=6,
    )
    front = wire.encode(header, [torch.arange(3)], None, Limits())[0]
    for served_us in (0, 12, 1 << 40):
        reply = bytearray(b"x" * 200)
        wire.put_reply(reply, wire.read_header(front, Limits()), served_us, 2)
        wanted = bytearray(b"x" * 200)
        wire.put_header(wanted, wire.reply_header(header, served_us=served_us), 2)
        assert reply == wanted
        assert wire.read_header(reply, Limits()).num_arrays == 2
    request, wanted = bytearray(b"x" * 200), bytearray(b"x" * 200)
    wire.put_request(request, 16, 2, 5, 10**7, -3, 4, 1 << 60, 9, 2, 8, 6)
    wire.put_header(wanted, header._replace(sequence=0), 2)
    assert request == wanted
