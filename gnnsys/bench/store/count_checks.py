"""Counts what a pull takes, and what all that is checked in it takes, in a process of its own.

`python -m gnnsys.bench.store.count_checks ROWS` prints both per pull, as JSON. Server and client are in this one
process, so that both ends are counted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
import zmq

from gnnsys.bench.instructions import Counter
from gnnsys.comm import Client, Kind, Limits, Server, wire
from gnnsys.comm.accounts import Accounts
from gnnsys.comm.arrays import INLINE_BELOW, export_array
from gnnsys.comm.turns import Turns
from gnnsys.ops import BufferPool
from gnnsys.store import Pull, Shard, Store, TableSpec
from gnnsys.store.serve import pull_chunks
from gnnsys.store.table import Table
from gnnsys.store.wire import CHUNK_BYTES

_DIM = 128  # values: 512 bytes
_SPEC_NAME = "x"
_PULLS = 20


def prepare_pull(num_rows: int) -> Callable[[], object]:
    """A pull of random rows from a server of this process."""
    rows = torch.rand(2 * num_rows, _DIM)
    spec = TableSpec(_SPEC_NAME, (_DIM,), torch.float32, (0, rows.shape[0]))
    shard = Shard()
    shard.add(spec, 0, rows)
    server = Server(shard.handlers()).start()
    client = Client({0: server.endpoints[0]}, sender=0, incarnation=1, timeout=600, lost_after=600)
    store = Store(machine_of_part=[0], machine=1, client=client, rank=0, world_size=1)
    store.register(spec)
    ids, out = torch.randperm(rows.shape[0])[:num_rows], torch.empty(num_rows, _DIM)
    pull = lambda: store.pull([Pull(_SPEC_NAME, ids, out)]).result()  # noqa: E731
    pull()
    return pull


def prepare_checks(num_rows: int) -> Callable[[], object]:
    """What is checked and accounted for in such a pull: of its request, of every message of the reply, of its ids, and
    a heartbeat, which in truth comes every two seconds. Making tensors of a message is not a check."""
    limits, ids = Limits(), torch.randint(0, 2 * num_rows, (num_rows,), dtype=torch.int32)
    spec = TableSpec(_SPEC_NAME, (_DIM,), torch.float32, (0, 2 * num_rows))
    plan = torch.tensor([[spec.number, 0, 1, -1, -1]])
    request = _received(wire.encode(wire.make_header(Kind.PULL, 1, timeout_us=10**8), [plan, ids], None, limits))
    num_chunks = -(-num_rows * _DIM * 4 // CHUNK_BYTES)
    piece = [torch.tensor([[0, 0, 8192]]), torch.zeros(CHUNK_BYTES // 512, _DIM)]
    head = wire.reply_header(wire.make_header(Kind.PULL, 1))
    chunk = _received(wire.encode(head, piece, None, limits))
    ping = _received(wire.encode(wire.make_header(Kind.PING, 2), (), None, limits))
    accounts, turns = Accounts(limits, lambda job: None), Turns()
    shard = Shard()
    shard.add(spec, 0, torch.empty(2 * num_rows, _DIM))
    table: Table = shard.table(_SPEC_NAME)
    buffers, array = BufferPool(1), piece[1].numpy()

    described = {id(frames): _described(frames, limits) for frames in (request, chunk)}

    def check_arrays(frames: list[zmq.Frame]) -> None:
        wire.locate_arrays(*described[id(frames)], frames, limits)

    def check() -> None:
        header = wire.read_header(request[0].buffer, limits)
        wire.check_request(header)
        account = accounts.of(b"client")
        accounts.enter(account, wire.num_bytes(request))
        turns.put(header.priority, b"client", header)
        turns.take()
        check_arrays(request)
        pull_chunks([plan, ids], lambda number: table, buffers)
        int(ids.min()), int(ids.max())  # as native code looks at them
        for _ in range(num_chunks):
            sent = array.view()
            account.window.enter(sent)
            account.window.park(None)
            del sent
            wire.read_header(chunk[0].buffer, limits)
            check_arrays(chunk)
        accounts.leave(b"client", wire.num_bytes(request))
        for _ in range(2):  # the ping and its answer
            wire.read_message(
                wire.read_header(ping[0].buffer, limits), ping, limits
            )  # all of it: it is for nothing else

    check()
    return check


def _described(frames: list[zmq.Frame], limits: Limits) -> tuple[bytes, tuple[int, ...], int]:
    """Descriptors, dimensions and where the arrays of the first frame begin, as `read_message` finds them."""
    arrays = wire.read_message(wire.read_header(frames[0].buffer, limits), frames, limits).arrays
    kinds = bytes(number for array in arrays for number in (export_array(array)[0], array.dim()))
    dims = tuple(size for array in arrays for size in array.shape)
    inline = sum(-(-array.nbytes // 8) * 8 for array in arrays if array.nbytes < INLINE_BELOW)
    return kinds, dims, len(frames[0]) - inline


def _received(frames: list[wire.Buffer]) -> list[zmq.Frame]:
    return [zmq.Frame(frame if isinstance(frame, bytes) else frame.tobytes()) for frame in frames]


def main(num_rows: int) -> None:
    counter = Counter()
    torch.set_num_threads(1)
    found: dict[str, float | str] = {"unit": counter.unit}
    for what, prepare, times in (("pull", prepare_pull, _PULLS), ("checks", prepare_checks, 10 * _PULLS)):
        work = prepare(num_rows)
        before = counter.read()
        for _ in range(times):
            work()
        found[what] = (counter.read() - before) / times
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
