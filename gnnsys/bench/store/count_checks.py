"""The work whose instructions `checks` counts, in a process of its own under callgrind: a pull, or all that is checked.

`python -m gnnsys.bench.store.count_checks pull|checks ROWS` prepares, has the counting begin, does it once and ends.
Server and client are in this one process, so that both ends are counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import torch
import zmq

from gnnsys.comm import Client, Kind, Limits, Server, wire
from gnnsys.comm.accounts import Accounts
from gnnsys.comm.turns import Turns
from gnnsys.ops import BufferPool
from gnnsys.store import Pull, Shard, Store, TableSpec
from gnnsys.store.serve import pull_chunks
from gnnsys.store.table import Table
from gnnsys.store.wire import CHUNK_BYTES

_DIM = 128  # values: 512 bytes
_SPEC_NAME = "x"


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
    a heartbeat, which in truth comes every two seconds. Reading a message is counted whole, though most of it is work
    that would be done without any check."""
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

    def check() -> None:
        header = wire.read_header(request[0].buffer, limits)
        wire.check_request(header)
        account = accounts.of(b"client")
        accounts.enter(account, wire.num_bytes(request))
        turns.put(header.priority, b"client", header)
        turns.take()
        message = wire.read_message(header, request, limits)
        pull_chunks(message.arrays, lambda number: table, buffers)
        int(ids.min()), int(ids.max())  # as native code looks at them
        for _ in range(num_chunks):
            sent = array.view()
            account.window.enter(sent)
            account.window.park(None)
            del sent
            wire.read_message(wire.read_header(chunk[0].buffer, limits), chunk, limits)
        accounts.leave(b"client", wire.num_bytes(request))
        for _ in range(2):  # the ping and its answer
            wire.read_message(wire.read_header(ping[0].buffer, limits), ping, limits)

    check()
    return check


def _received(frames: list[wire.Buffer]) -> list[zmq.Frame]:
    return [zmq.Frame(frame if isinstance(frame, bytes) else frame.tobytes()) for frame in frames]


def main(what: str, num_rows: int) -> None:
    torch.set_num_threads(1)
    work = {"pull": prepare_pull, "checks": prepare_checks}[what](num_rows)
    count = ["callgrind_control", "--instr=on", str(os.getpid())]
    subprocess.run(count, check=True, timeout=300, stdout=subprocess.DEVNULL)
    work()
    subprocess.run([*count[:1], "--instr=off", count[2]], check=True, timeout=300, stdout=subprocess.DEVNULL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
