"""A client's connections to one peer, and whether the peer is alive.

One DEALER for control, and one or more for bulk traffic: its lanes. libzmq encrypts a connection in one thread, so
several carry more than one does. What is sent on a connection waits until all before it was sent, which takes long on a
slow link. So short replies keep off lanes that carry many rows: there is one more connection, aside, for structure and
for few rows. Otherwise no batch could be sampled while rows of others are sent, and a look-up of an embedding would
wait for features that are prefetched. Pushes and steps always have a connection of their own. A rank waits for the
reply to its step, which may come long after the request, when any lane may carry rows.
Anything a peer sends shows that it lives; its silence matters only while something is outstanding. Where nothing was
heard of a request for long, or since the peer came back, the peer is asked about it on the same connection. That
question arrives after the request. If the peer does not know the request then, it was lost, and only then is it sent
again.
"""

from __future__ import annotations

import math
import os
import select
import struct
import threading
import time

import torch
import zmq

from gnnsys.comm import urgency, wire
from gnnsys.comm.client_quotas import CLIENT_NAME_BYTES
from gnnsys.comm.errors import ShardLost
from gnnsys.comm.keys import Keys, protect_bulk_client
from gnnsys.comm.kinds import BULK, CONTROL, is_change, is_spread, is_structure, kind_name, traffic_class
from gnnsys.comm.lane_sealing import LaneSealing
from gnnsys.comm.led_socket import LedSocket
from gnnsys.comm.pending import Pending
from gnnsys.comm.sockets import WakeUp, bulk_place, connect, make_socket

CLASSES = (CONTROL, BULK)
_SHORT_REPLY = 1 << 18  # bytes; at 100 Mbit/s they take 20 ms
_LONG_WAIT = 1 << 20  # bytes outstanding on a lane, behind which a short reply would be late


class Connection:
    """One connection: its socket, the requests outstanding on it, and the question about them that is under way."""

    def __init__(self, traffic_class: str, lane: int = 0) -> None:
        self.traffic_class = traffic_class
        self.lane = lane
        self.is_heard = False  # something came on it: the peer has taken the connection
        self.socket: LedSocket | None = None  # made on first use
        self.outstanding: dict[int, Pending] = {}
        self.ping_id = 0  # 0: none is under way
        self.ping_at = 0.0
        self.asked: list[int] = []
        self.sealing = LaneSealing()
        self.lock = threading.Lock()  # of the question
        self.reading = threading.Lock()  # held from receiving to delivering: replies stay in order

    @property
    def load(self) -> int:
        """Bytes of what is outstanding, requests and replies, as far as they are known."""
        return sum([pending.load for pending in list(self.outstanding.values())])

    def take(self, request_id: int) -> Pending | None:
        """Ends what is outstanding under this id; None where another thread has done so."""
        if self.sealing.waiting:
            self.sealing.waiting.pop(request_id, None)
        return self.outstanding.pop(request_id, None)

    def awaits_others(self, pending: Pending) -> bool:
        """Whether other requests than this one are outstanding."""
        return len(self.outstanding) > (pending.request_id in self.outstanding)

    def raise_batch(self, loader: int, batch: int) -> bool:
        """Notes that what is outstanding of a batch is waited for. Returns whether that is news for any of it."""
        ahead = [
            pending
            for pending in list(self.outstanding.values())
            if pending.batch == batch and pending.loader == loader and urgency.need_of(pending.priority)
        ]
        for pending in ahead:
            pending.priority = urgency.raised(pending.priority)
        return bool(ahead)

    def carries_rows(self) -> bool:
        """Whether anything but structure is outstanding."""
        return any(not is_structure(pending.kind) for pending in list(self.outstanding.values()))

    def silent(self, since: float) -> list[int]:
        """Requests of which nothing was heard since then."""
        return [pending.request_id for pending in list(self.outstanding.values()) if pending.last_sign < since]


class Link:
    """One peer: its endpoint, the connections to it, and when it was last heard of."""

    def __init__(self, peer: int, endpoint: str, name: bytes, num_lanes: int = 1) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.last_heard = 0.0  # never
        self.returned_at = 0.0  # when it was heard of again after a silence: what was asked before may be lost
        self.last_said = -math.inf  # never: a new one is told at once that this end lives
        self.end = ""  # why nothing will come of it any more
        self.told_share = 0  # bytes per second that it was told to send at; 0: at any rate
        self.waiting_since = 0.0  # when requests began to be outstanding
        self.control = Connection(CONTROL)
        self.lanes = [Connection(BULK, lane) for lane in range(num_lanes)]
        self.aside = Connection(BULK, num_lanes)  # for short replies, while rows are on their way on every lane
        self.changes = Connection(BULK, num_lanes + 1)  # for pushes and steps
        self.bulk = [*self.lanes, self.aside, self.changes]
        self.connections = [self.control, *self.bulk]
        self._name = name

    def connection_for(self, kind: int, reply_bytes: int = 0) -> Connection:
        """Chooses the connection for a request: by default the least loaded lane. Structure avoids lanes that carry
        rows, short replies avoid lanes that carry many, and requests that change rows avoid all lanes.

        `reply_bytes`: how long the reply will be, 0 where that is not known.

        Lanes are opened one after the other: the next one once the peer has answered on the last. A server gives a new
        connection to that of its threads which has the fewest, and knows by then how many each has.
        """
        lanes = self.lanes
        if traffic_class(kind) is CONTROL:
            return self.control
        if is_change(kind):
            return self.changes
        if not is_spread(kind):
            return lanes[0]
        num_open = 1
        while num_open < len(lanes) and lanes[num_open - 1].is_heard:
            num_open += 1
        lane = lanes[0] if num_open == 1 else min(lanes[:num_open], key=lambda lane: lane.load)
        if is_structure(kind):
            return self.aside if lane.carries_rows() else lane
        return self.aside if 0 < reply_bytes <= _SHORT_REPLY and lane.load > _LONG_WAIT else lane

    def open(
        self, connection: Connection, context: zmq.Context, keys: Keys | None, wake_up: WakeUp, epoll: select.epoll
    ) -> LedSocket:
        """Makes the socket of a connection, on first use. Each lane has an I/O thread of the context for itself."""
        socket = make_socket(context, zmq.DEALER)
        socket.affinity = 1 << connection.lane % len(self.lanes)
        name = self._name + struct.pack("<iB", self.peer, CLASSES.index(connection.traffic_class))
        assert len(name) == CLIENT_NAME_BYTES
        endpoint, sealing = self.endpoint, connection.sealing
        if sealing.agreement is not None:  # without a name: the server knows it by what is sealed
            protect_bulk_client(socket, sealing.agreement.session, sealing.agreement.token)
            endpoint, keys = bulk_place(endpoint, sealing.port), None
        else:
            socket.routing_id = name + bytes([connection.lane] if connection.lane else [])
        try:
            connect(socket, endpoint, keys)
        except (zmq.ZMQError, ValueError):
            socket.close()
            raise
        awaited = None if connection.traffic_class == CONTROL else connection.outstanding  # pings are not among those
        led = connection.socket = LedSocket(socket, wake_up, epoll, sealing.channel, awaited)
        return led

    def return_at(self, now: float) -> None:
        """Something came after a long silence: the peer has returned.

        The first sign of a peer is no return: what was asked until then waited for the connection.
        """
        if self.last_heard:
            self.returned_at = now

    def is_sending(self) -> bool:
        """Whether it has been asked for what may be large, and has not sent all of it."""
        return any(is_spread(each.kind) for lane in self.bulk for each in list(lane.outstanding.values()))

    def is_awaited(self) -> bool:
        """Whether something is outstanding."""
        for connection in self.connections:  # noqa: SIM110 - a generator takes longer than the loop
            if connection.outstanding:
                return True
        return False

    def num_outstanding(self) -> int:
        return sum(len(connection.outstanding) for connection in self.connections)

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
        port = pending.connection.sealing.port
        if port and not any(connection.is_heard for connection in self.bulk):
            busy += f"; nothing came from its port {port}, where rows are sealed: open it, or say encrypt='curve'"
        heard = f"last heard of {time.monotonic() - self.last_heard:.1f} s ago" if self.last_heard else "never heard of"
        return (
            f"rank {rank} waited {pending.timeout:.1f} s for machine {self.peer} at {self.endpoint} to answer "
            f"{kind_name(pending.kind)} (request {pending.request_id}, sent {1 + pending.resent} times); "
            f"it was {heard}{busy}. If it lives and is slow, raise timeout; otherwise look at its log"
        )


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
