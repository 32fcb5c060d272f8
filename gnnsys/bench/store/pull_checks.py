"""The steps of a pull with all checks, and the same steps as a server without checks would do them.

The difference is what the checks cost. Reading a message is not a check; validating what was read is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import zmq

from gnnsys.comm import DTYPE_OF, INLINE_BELOW, Accounts, Egress, Kind, Limits, Turns, export_array, wire
from gnnsys.ops import BufferPool, gather_rows
from gnnsys.store import CHUNK_BYTES, Shard, TableSpec, pull_chunks

Call = Callable[[], object]
Described = tuple[bytes, tuple[int, ...], int]  # descriptors, dimensions, where arrays of the first frame begin

_CLIENT = b"client"


class PullMessages:
    """The messages of one pull as they arrive, and the table they are about."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self.limits = Limits()
        self.num_chunks = -(-num_rows * dim * 4 // CHUNK_BYTES)
        self.ids = torch.randint(0, 2 * num_rows, (num_rows,), dtype=torch.int32)
        self.spec = TableSpec("x", (dim,), torch.float32, (0, 2 * num_rows))
        self.plan = torch.tensor([[self.spec.number, 0, 1, -1, -1]])
        self.request = self._received(wire.make_header(Kind.PULL, 1, timeout_us=10**8), [self.plan, self.ids])
        rows = torch.zeros(min(num_rows, CHUNK_BYTES // (4 * dim)), dim)
        self.buffer = rows.numpy()
        pieces = torch.tensor([[0, 0, rows.shape[0]]])
        self.chunk = self._received(wire.reply_header(wire.make_header(Kind.PULL, 1)), [pieces, rows])

    def _received(self, header: wire.Header, arrays: list[torch.Tensor]) -> list[zmq.Frame]:
        frames = wire.encode(header, arrays, None, self.limits)
        return [zmq.Frame(bytes(frame)) for frame in frames]

    def described(self, frames: list[zmq.Frame]) -> Described:
        """As `read_message` finds it."""
        arrays = wire.read_message(wire.read_header(frames[0].buffer, self.limits), frames, self.limits).arrays
        kinds = bytes(number for array in arrays for number in (export_array(array)[0], array.dim()))
        dims = tuple(size for array in arrays for size in array.shape)
        inline = sum(-(-array.nbytes // 8) * 8 for array in arrays if array.nbytes < INLINE_BELOW)
        return kinds, dims, len(frames[0]) - inline


def checked(traffic: PullMessages) -> Call:
    """All that is checked and accounted for: in the request, in its ids, in every message of the reply."""
    limits, request, chunk, plan, ids = traffic.limits, traffic.request, traffic.chunk, traffic.plan, traffic.ids
    request_described, chunk_described = traffic.described(request), traffic.described(chunk)
    shard = Shard()
    shard.add(traffic.spec, 0, torch.empty(traffic.spec.part_shape(0)))
    table, buffers = shard.table(traffic.spec.name), BufferPool(1)
    accounts, turns = Accounts(limits), Turns()
    egress = Egress(lambda job: None, lambda: None)
    job = SimpleNamespace(peer=_CLIENT, priority=0, is_paced=False, arrived=0.0)
    narrow, nothing = torch.empty(traffic.spec.part_shape(0)[0], 0), torch.empty(ids.numel(), 0)

    def call() -> None:
        header = wire.read_header(request[0].buffer, limits)
        wire.check_request(header)
        num_bytes = wire.num_bytes(request)
        account = accounts.of(_CLIENT)
        accounts.enter(account, num_bytes)
        turns.put(header.priority, _CLIENT, header)
        turns.take()
        wire.locate_arrays(*request_described, request, limits)
        pull_chunks([plan, ids], lambda number: table, buffers)
        gather_rows(narrow, ids, nothing)  # rows of no size: it looks at the ids, and that is all
        for _ in range(traffic.num_chunks):
            sent = traffic.buffer.view()
            egress.enter(_CLIENT, [sent], sent.nbytes)
            del sent
            egress.park(job)
            wire.read_header(chunk[0].buffer, limits)
            wire.locate_arrays(*chunk_described, chunk, limits)
        accounts.leave(_CLIENT, num_bytes)

    return call


def trusting(traffic: PullMessages) -> Call:
    """What is left of that where everything is believed: messages are read, requests wait in line."""
    request, chunk, plan, ids = traffic.request, traffic.chunk, traffic.plan, traffic.ids
    request_described, chunk_described = traffic.described(request), traffic.described(chunk)
    waiting: deque[Any] = deque()
    narrow, nothing = torch.empty(traffic.spec.part_shape(0)[0], 0), torch.empty(0, 0)

    def call() -> None:
        header = _believe(request[0].buffer)
        waiting.append(header)
        waiting.popleft()
        _find_arrays(*request_described, request)
        for number, part, ids_at, columns_at, dtype_at in plan.tolist():
            _ = number, part, [plan, ids][ids_at], columns_at, dtype_at
        gather_rows(narrow, ids[:0], nothing)
        for _ in range(traffic.num_chunks):
            sent = traffic.buffer.view()
            del sent
            _believe(chunk[0].buffer)
            _find_arrays(*chunk_described, chunk)

    return call


def _believe(front: Any) -> wire.Header:
    return wire.Header._make(wire._HEADER.unpack_from(front))


def _find_arrays(kinds: bytes, dims: tuple[int, ...], at: int, frames: list[zmq.Frame]) -> list[Any]:
    found: list[Any] = []
    begin, num_used = 0, 1
    for code, ndim in zip(kinds[::2], kinds[1::2], strict=True):
        shape = dims[begin : begin + ndim]
        begin += ndim
        dtype, itemsize = DTYPE_OF[code]
        count = math.prod(shape)
        if count * itemsize < INLINE_BELOW:
            at += -at % 8
            found.append((None, at, dtype, shape, count))
            at += count * itemsize
        else:
            found.append((frames[num_used].buffer, 0, dtype, shape, count))
            num_used += 1
    return found
