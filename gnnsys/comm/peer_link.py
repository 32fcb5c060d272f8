"""A client's connections to one peer, and what it knows of the peer's life.

One DEALER per traffic class. Anything a peer sends counts as a sign of life; its silence matters only while something
is outstanding. A request that was silent for long, or since before the peer returned, is asked for on its own
connection, behind itself: an answer that does not know it proves that it was lost, and only then is it sent again.
"""

from __future__ import annotations

import math
import os
import struct
import time
from typing import Any

import torch
import zmq

from gnnsys.comm import wire
from gnnsys.comm.errors import ShardLost
from gnnsys.comm.keys import Keys
from gnnsys.comm.kinds import BULK, CONTROL, kind_name
from gnnsys.comm.pending import Pending
from gnnsys.comm.sockets import SharedSocket, WakeUp, connect, make_socket

CLASSES = (CONTROL, BULK)


class Connection:
    """One connection: its socket, the requests outstanding on it, and the question about them that is under way."""

    def __init__(self, traffic_class: str) -> None:
        self.traffic_class = traffic_class
        self.socket: Any = None  # a SharedSocket, made on first use
        self.outstanding: dict[int, Pending] = {}
        self.ping_id = 0  # 0: none is under way
        self.ping_at = 0.0
        self.asked: list[int] = []

    def silent(self, since: float) -> list[int]:
        """Requests of which nothing was heard since then."""
        return [pending.request_id for pending in list(self.outstanding.values()) if pending.last_sign < since]


class Link:
    """One peer: where it is, the connections to it, when it was last heard of."""

    def __init__(self, peer: int, endpoint: str, name: bytes) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.last_heard = 0.0  # never
        self.returned_at = 0.0  # when it was heard of again after a silence: what was asked before may be lost
        self.last_said = -math.inf  # never: a new one is told at once that this end lives
        self.end = ""  # why nothing will come of it any more
        self.waiting_since = 0.0  # when requests began to be outstanding
        self.connections = {each: Connection(each) for each in CLASSES}
        self._name = name

    def open(self, traffic_class: str, context: zmq.Context, keys: Keys | None, wake_up: WakeUp) -> SharedSocket:
        """Makes the socket of a connection, on first use."""
        socket = make_socket(context, zmq.DEALER)
        socket.routing_id = self._name + struct.pack("<iB", self.peer, CLASSES.index(traffic_class))
        try:
            connect(socket, self.endpoint, keys)
        except (zmq.ZMQError, ValueError):
            socket.close()
            raise
        shared = self.connections[traffic_class].socket = SharedSocket(socket, wake_up)
        return shared

    def hear(self, now: float, silence: float) -> None:
        """Something came; after more than `silence` seconds without anything the peer has returned.

        The first sign of a peer is no return: what was asked until then waited for the connection.
        """
        if self.last_heard and now - self.last_heard > silence:
            self.returned_at = now
        self.last_heard = now

    def num_outstanding(self) -> int:
        return sum(len(connection.outstanding) for connection in self.connections.values())

    def silent_for(self, now: float) -> float:
        """Seconds without a sign of life while one was due."""
        return now - max(self.last_heard, self.waiting_since)

    def lost(self, pending: Pending, rank: int, silent_for: float) -> ShardLost:
        """What is said of a request to a peer that is silent for too long."""
        text = (
            f"machine {self.peer}'s shard at {self.endpoint} was not heard of for {silent_for:.1f} s while rank {rank} "
            f"waited for {kind_name(pending.kind)}: it has ended, is stopped, cannot be reached from here, or has "
            "another key. Look at its log; raise lost_after if it may pause that long; otherwise start again from the "
            "last checkpoint"
        )
        return ShardLost(text, machine=self.peer, rank=rank, silent_for=silent_for)

    def overdue(self, pending: Pending, rank: int) -> str:
        """What is said of a request that was not answered in its time."""
        busy = f"; it had no room for the request: {pending.refusal}" if pending.refusal else ""
        heard = f"last heard of {time.monotonic() - self.last_heard:.1f} s ago" if self.last_heard else "never heard of"
        return (
            f"rank {rank} waited {pending.timeout:.1f} s for machine {self.peer} at {self.endpoint} to answer "
            f"{kind_name(pending.kind)} (request {pending.request_id}, sent {1 + pending.resent} times); "
            f"it was {heard}{busy}. If it lives and is slow, raise timeout; otherwise look at its log"
        )

    def close(self, linger_ms: int) -> None:
        for connection in self.connections.values():
            if connection.socket is not None:
                connection.socket.close(linger_ms)


def make_name() -> bytes:
    """What a client is called by servers: unlike any other's, and the same after a reconnect."""
    return b"g" + os.urandom(8)  # a first byte of zero is libzmq's own


def ids_array(request_ids: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(request_ids, dtype=torch.int64, device="cpu")] if request_ids else []


def states_of(message: wire.Message, num_asked: int) -> list[int]:
    """The peer's answer to a ping, one state per request asked for; none where it is not such an answer."""
    if len(message.arrays) != 1 or message.arrays[0].dtype != torch.uint8 or message.arrays[0].numel() != num_asked:
        return []
    return list(message.arrays[0].reshape(-1).tolist())
