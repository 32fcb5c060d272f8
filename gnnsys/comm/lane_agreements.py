"""How a client comes to agree with its peers on what seals each lane, and to agree again where a peer has forgotten.

The question goes over the control connection. What is asked of the peer meanwhile waits for the answer. It is asked
again where nothing comes on a lane, as the peer may have begun another life. What was outstanding then is sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import zmq
from torch import Tensor

from gnnsys.comm import wire
from gnnsys.comm.arrays import ReceivedFrame
from gnnsys.comm.errors import WireError
from gnnsys.comm.keys import Keys
from gnnsys.comm.kinds import CONTROL, Kind
from gnnsys.comm.peer_link import Connection, Link
from gnnsys.comm.pending import Pending
from gnnsys.comm.sealing_threads import SealingThreads
from gnnsys.comm.sockets import port_of
from gnnsys.comm.wire import Limits

_log = logging.getLogger(__name__)


class LaneOwner(Protocol):
    """Whose lanes they are: the client."""

    def send_order(
        self, link: Link, connection: Connection, kind: int, request_id: int, arrays: Sequence[Tensor] = (),
        options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Sends a message that nobody waits for; a no-op where that cannot be."""
        ...

    def make_socket(self, link: Link, connection: Connection) -> Any: ...

    def send_again(self, link: Link, connection: Connection, pending: Pending, now: float) -> None: ...

    def note(self, event: str) -> None: ...


class LaneAgreements:
    """All agreements of a client. `lock` is held by whoever makes a socket; `ask_every` is in seconds."""

    def __init__(
        self, owner: LaneOwner, keys: Keys | None, limits: Limits, ids: Iterator[int],
        lock: AbstractContextManager[Any], ask_every: float,
    ) -> None:  # fmt: skip
        self._owner, self._keys, self._limits, self._ids, self._lock = owner, keys, limits, ids, lock
        self._ask_every = ask_every
        self._threads = SealingThreads()

    def wants(self, connection: Connection) -> bool:
        """Whether what this connection carries is to be sealed, and it is not agreed yet how."""
        seals = self._keys is not None and self._keys.seals and connection.traffic_class != CONTROL
        return seals and not connection.sealing.is_settled

    def wait(self, connection: Connection, request_id: int) -> int:
        """Has a request (0: none) wait until it is agreed. The id of the question to ask, 0 where it is under way."""
        sealing = connection.sealing
        if request_id:
            sealing.waiting[request_id] = None
        if sealing.ask_id:
            return 0
        sealing.ask_id = next(self._ids)
        return sealing.ask_id

    def is_asking(self, link: Link) -> bool:
        """Whether a question about a lane is under way: nobody waits for its answer."""
        return self._keys is not None and any([lane.sealing.ask_id for lane in link.bulk])

    def ask(self, link: Link, connection: Connection, ask_id: int = 0) -> None:
        """Asks how to seal a lane, or whether the peer still knows what was agreed."""
        sealing = connection.sealing
        sealing.ask_id, sealing.asked_at = ask_id or next(self._ids), time.monotonic()
        question = sealing.question(connection.lane, port_of(link.endpoint))
        self._owner.send_order(link, link.control, Kind.SEAL, sealing.ask_id, options=question)

    def check(self, link: Link, connection: Connection, is_silent: bool, now: float) -> None:
        """Asks again where nothing comes on a lane, or the question was lost."""
        sealing = connection.sealing
        is_quiet = is_silent or link.silent_for(now) >= self._ask_every or not sealing.is_settled
        if not (is_quiet and connection.outstanding and now - sealing.asked_at >= self._ask_every):
            return
        if self.wants(connection) or sealing.agreement is not None:
            self.ask(link, connection)

    def lose(self, link: Link, connection: Connection) -> None:
        """The connection was cut off: its token admits it no more. Another agreement is made, at once if need be."""
        connection.sealing.forget(connection.outstanding)
        if connection.outstanding and self.wants(connection):
            self.ask(link, connection)

    def take(self, link: Link, header: wire.Header, frames: Sequence[ReceivedFrame], now: float) -> None:
        """The peer's answer: how to seal, that it knows what was agreed, or (an error) that it seals nothing."""
        connection = next((lane for lane in link.bulk if lane.sealing.ask_id == header.request_id), None)
        if connection is None or self._keys is None:
            return  # asked again meanwhile
        sealing = connection.sealing
        with self._lock:  # nobody makes the socket meanwhile
            sealing.ask_id = 0
            try:
                if header.status != wire.OK:
                    is_new = sealing.do_without()
                else:
                    answer = wire.read_message(header, frames, self._limits).options
                    is_new = sealing.take(answer, self._keys, self._threads)
                if is_new:
                    self._begin(link, connection, now)
            except WireError as error:
                self._owner.note(f"malformed: {error.reason}")
            except (zmq.ZMQError, ValueError) as error:
                self._owner.note("not sealed")
                _log.warning("no sealed connection to machine %d: %s", link.peer, error)

    def _begin(self, link: Link, connection: Connection, now: float) -> None:
        """Makes the socket of a lane, or another in its place, and sends what waited for it or was lost with the last.

        It is lost where the peer has begun another life, or has forgotten what was agreed.
        """
        old, connection.socket = connection.socket, None
        if old is not None:
            old.is_cut = True
            connection.sealing.waiting |= dict.fromkeys(connection.outstanding)
        self._owner.make_socket(link, connection)
        waiting, connection.sealing.waiting = connection.sealing.waiting, {}
        for request_id in waiting:
            if (pending := connection.outstanding.get(request_id)) is not None:
                self._owner.send_again(link, connection, pending, now)
                pending.resent -= old is None

    def close(self) -> None:
        self._threads.close()
