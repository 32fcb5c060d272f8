"""A server's side of sealed connections: what it agreed on with each client, and who may connect to its bulk port.

Libzmq's CURVE is per connection, so sealed messages have a port of their own. Who connects there shows the token of its
session (PLAIN), once: it only turns strangers away before they can send. What counts is whether a message opens. A
reply goes where the last message of its session came from, so nobody takes a client's place by its name.
"""

from __future__ import annotations

import hmac
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import zmq

from gnnsys.comm.arrays import Buffer, ReceivedFrame
from gnnsys.comm.client_quotas import CLIENT_NAME_BYTES
from gnnsys.comm.errors import WireError
from gnnsys.comm.keys import Keys
from gnnsys.comm.sealing import AES, CHACHA, LIFE_BYTES, Agreement, SealedChannel, best_cipher, read_prefix
from gnnsys.comm.sealing_threads import SealingThreads

MAX_SESSIONS = 4096  # the one that was used longest ago is forgotten; its client agrees on another
_SEALED = 2  # in a connection's name, where others have their traffic class


class SealedSession:
    """One connection of a client. `route` is libzmq's name for it; None before its first message."""

    __slots__ = ("channel", "is_admitted", "name", "route", "token")

    def __init__(self, keys: Keys, agreement: Agreement, threads: SealingThreads) -> None:
        self.name = agreement.name
        self.token = agreement.token
        self.channel = SealedChannel(keys, agreement, is_server=True, threads=threads)
        self.route: bytes | None = None
        self.is_admitted = False

    def seal(self, frames: Sequence[Buffer]) -> SealedMessage:
        return SealedMessage(self, self.channel.seal(frames))


class SealedMessage(NamedTuple):
    """A message as it travels, and whose it is."""

    session: SealedSession
    frames: list[Buffer]


class SealedSessions:
    """All of them, by session and by connection. Changed by the server's reading thread alone."""

    def __init__(self, keys: Keys, max_sessions: int = MAX_SESSIONS) -> None:
        self._keys, self._max_sessions = keys, max_sessions
        self.threads = SealingThreads()
        self._life = os.urandom(LIFE_BYTES)
        self._by_session: OrderedDict[bytes, SealedSession] = OrderedDict()
        self._by_name: dict[bytes, SealedSession] = {}

    def __len__(self) -> int:
        return len(self._by_session)

    def of(self, name: bytes) -> SealedSession | None:
        """The session of a connection, where that is sealed. From any thread."""
        return self._by_name.get(name)

    def agree(self, identity: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
        """What a client is told that asks for a lane: that its session is known, or a new one in its place."""
        lane = options.get("lane")
        if len(identity) != CLIENT_NAME_BYTES or type(lane) is not int or not 0 <= lane < 256:
            raise WireError("options", "no lane of a client that could be sealed")
        if identity in self._by_name:
            raise WireError("kind", "a sealed connection cannot ask for another: that is for control")
        name = identity[:-1] + bytes([_SEALED] + ([lane] if lane else []))
        known = self._by_name.get(name)
        if known is not None and known.channel.session.hex() == options.get("session"):
            return {"session": options["session"]}
        if known is not None:
            del self._by_session[known.channel.session]
        cipher = AES if best_cipher() == AES == options.get("cipher") else CHACHA
        agreement = Agreement.make(self._life, name, cipher)
        session = SealedSession(self._keys, agreement, self.threads)
        self._by_name[name] = self._by_session[agreement.session] = session
        if len(self._by_session) > self._max_sessions:
            _, oldest = self._by_session.popitem(last=False)
            del self._by_name[oldest.name]
        return agreement.to_json()

    def admits(self, user: bytes, password: bytes) -> bool:
        """Whether this is a session's name and token, as a client shows them when it connects: for the first time.

        The token can be read on the wire, so it is of no use afterwards. A client that was cut off agrees on another.
        """
        try:
            session = self._by_session.get(bytes.fromhex(user.decode()))
        except ValueError:
            return False
        if session is None or session.is_admitted or not hmac.compare_digest(password, session.token.hex().encode()):
            return False
        session.is_admitted = True
        return True

    def open(self, route: bytes, frames: Sequence[zmq.Frame]) -> tuple[bytes, list[ReceivedFrame]]:
        """The connection that a message came on, and the message; WireError where it is not one of its session's."""
        number, _, _ = read_prefix(frames)
        session = self._by_session.get(number)
        if session is None:
            raise WireError("seal", "a message of no session of this server")
        opened = session.channel.open(frames)
        session.route = route
        self._by_session.move_to_end(number)
        return session.name, opened
