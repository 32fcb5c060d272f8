"""A process of the benchmark of urgent replies: `serve ADDRESS`, `bulk NUMBER` (asks while it is told to), or `ask`.

They meet in the folder of the task: the server writes where it listens, and the one that asks says who is to send bulk.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gnnsys.bench.await_file import await_file
from gnnsys.comm import BACKGROUND, Client, Keys, Kind, Pending, Reply, Request, Server

FIGURES = "urgent-figures "
AUTO, FIFO = "auto", "fifo"
ALONE, SAME, OTHERS, BULK, BULK_ALONE = "alone", "behind its own", "behind others", "bulk and urgent", "bulk alone"
_TASK, _PEERS, _ACTIVE = "task.json", "peers.json", "active"
_WARM_SECONDS = 1.5  # of bulk before a short reply is asked for: all links are full
_PAUSE_SECONDS = 0.2  # between two short replies
_CHUNK = 4 << 20


@dataclass(frozen=True)
class UrgentTask:
    """Bytes of the long and of the short reply, how often each is timed, and whether rows are sealed."""

    bulk: int
    urgent: int
    turns: int
    encrypts: bool

    def save(self, folder: Path) -> None:
        (folder / _TASK).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> UrgentTask:
        return cls(**json.loads((folder / _TASK).read_text()))


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def chunks(request: Request) -> Iterator[Reply]:
    """`options["bytes"]` bytes."""
    left = int(request.options["bytes"])
    while True:
        rows = torch.zeros(min(left, request.chunk_bytes(_CHUNK)), dtype=torch.uint8)
        left -= rows.numel()
        yield Reply([rows], last=not left)
        if not left:
            return


def serve(folder: Path, address: str) -> None:
    keys = Keys.generate(encrypts=UrgentTask.load(folder).encrypts)
    servers = {
        order: Server({Kind.PULL: chunks}, bind=[f"tcp://{address}:*"], keys=keys, threads=2, order=order).start()
        for order in (AUTO, FIFO)
    }
    endpoints = {order: server.endpoints[0] for order, server in servers.items()}
    _write(folder / _PEERS, {"keys": keys.to_json(), "endpoints": endpoints})
    threading.Event().wait()  # until the lab ends it


def _client(folder: Path, sender: int) -> tuple[Client, dict[str, int]]:
    await_file(folder / _PEERS)
    told = json.loads((folder / _PEERS).read_text())
    peers = {order: number for number, order in enumerate(told["endpoints"])}
    client = Client(
        {peers[order]: endpoint for order, endpoint in told["endpoints"].items()}, sender=sender, incarnation=1,
        keys=Keys.from_json(told["keys"]), lanes=2,
    )  # fmt: skip
    return client, peers


def _ask(client: Client, peer: int, num_bytes: int, priority: int | None = None) -> Pending:
    return client.request(peer, Kind.PULL, options={"bytes": num_bytes}, priority=priority, reply_bytes=num_bytes)


def _read(pending: Pending) -> None:
    for _ in pending.chunks():
        pass


def _timed(pending: Pending) -> float:
    began = time.perf_counter()
    _read(pending)
    return time.perf_counter() - began


def bulk(folder: Path, number: int) -> None:
    """Asks the server that is named in a file, as long as the file is there."""
    task, (client, peers) = UrgentTask.load(folder), _client(folder, number)
    while True:
        try:
            order = (folder / _ACTIVE).read_text()
        except FileNotFoundError:
            time.sleep(0.02)
            continue
        _read(_ask(client, peers[order], task.bulk, BACKGROUND))


def ask(folder: Path) -> None:
    task, (client, peers) = UrgentTask.load(folder), _client(folder, 1)
    names = (ALONE, SAME, OTHERS, BULK, BULK_ALONE)
    found: dict[str, dict[str, list[float]]] = {order: {name: [] for name in names} for order in peers}
    for turn in range(-1, task.turns):  # the first one opens connections, and is not counted
        for order in peers if turn % 2 else reversed(peers):
            figures = _turn(client, peers[order], task)
            for name, seconds in figures.items() if turn >= 0 else ():
                found[order][name].append(seconds)
    for order in peers:
        (folder / "order").write_text(order)
        os.replace(folder / "order", folder / _ACTIVE)
        time.sleep(_WARM_SECONDS + 16e-8 * task.bulk)
        for _ in range(2 * task.turns):
            found[order][OTHERS].append(_timed(_ask(client, peers[order], task.urgent)))
            time.sleep(_PAUSE_SECONDS)
        (folder / _ACTIVE).unlink()
        time.sleep(_WARM_SECONDS + 6 * 8e-8 * task.bulk)  # what is under way ends
    print(FIGURES + json.dumps(found), flush=True)
    client.close()


def _turn(client: Client, peer: int, task: UrgentTask) -> dict[str, float]:
    alone = _timed(_ask(client, peer, task.urgent))
    bulk_alone = _timed(_ask(client, peer, task.bulk, BACKGROUND))
    began = time.perf_counter()
    reader = threading.Thread(target=_read, args=(_ask(client, peer, task.bulk, BACKGROUND),))
    reader.start()
    time.sleep(0.3 * bulk_alone)
    behind = _timed(_ask(client, peer, task.urgent))
    reader.join()
    together = time.perf_counter() - began
    return {ALONE: alone, BULK_ALONE: bulk_alone, SAME: behind, BULK: together}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, role, *words = sys.argv[1:]
    if role == "serve":
        serve(Path(place), words[0])
    elif role == "bulk":
        bulk(Path(place), int(words[0]))
    else:
        ask(Path(place))
