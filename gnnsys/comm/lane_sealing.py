"""A client's side of a sealed lane: what was agreed with the peer, and what waits until it is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gnnsys.comm.keys import Keys
from gnnsys.comm.sealing import Agreement, SealedChannel, best_cipher
from gnnsys.comm.sealing_threads import SealingThreads


class LaneSealing:
    """How the messages of one connection are sealed. As it is made, they are not."""

    def __init__(self) -> None:
        self.agreement: Agreement | None = None
        self.port = 0  # of the peer, for what is sealed
        self.is_settled = False  # agreed on, or the peer does not seal
        self.ask_id = 0  # of the question that is under way; 0: none
        self.asked_at = -math.inf
        self.waiting: dict[int, None] = {}  # requests that are sent once it is settled, in order
        self.channel: SealedChannel | None = None

    def question(self, lane: int, port: int) -> dict[str, Any]:
        session = "" if self.agreement is None else self.agreement.session.hex()
        return {"lane": lane, "port": port, "session": session, "cipher": best_cipher()}

    def take(self, answer: dict[str, Any], keys: Keys, threads: SealingThreads) -> bool:
        """Takes the peer's answer; whether it is another agreement than before. ValueError where it is none."""
        if self.agreement is not None and answer.get("session") == self.agreement.session.hex():
            return False
        port = answer.get("port")
        if not isinstance(port, int) or not 0 < port < 65536:
            return self.do_without()  # it has no such port: it listens at no TCP address
        agreement = Agreement.from_json(answer)
        self.channel = SealedChannel(keys, agreement, is_server=False, threads=threads)
        self.agreement, self.port, self.is_settled = agreement, port, True
        return True

    def do_without(self) -> bool:
        """The peer seals nothing: the connection is protected as the control connection is. Whether that is new."""
        is_new = not self.is_settled or self.agreement is not None
        self.agreement, self.channel, self.port, self.is_settled = None, None, 0, True
        return is_new

    def forget(self, outstanding: Iterable[int]) -> None:
        """The connection was cut: its next message begins with another agreement, and what was lost comes with it."""
        if self.agreement is not None:
            self.agreement, self.channel, self.is_settled = None, None, False
            self.ask_id = 0  # an answer to what was asked before is about what is gone
            self.waiting |= dict.fromkeys(outstanding)
