"""What is asked of every machine that serves a store's parts: to make, load, save or drop a table."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gnnsys.comm import Kind, RemoteValueError, ShardLost
from gnnsys.store.incarnation import forgotten
from gnnsys.store.peers import Answer, Peers

ORDER_SECONDS = 600.0  # to make, write or read a whole table
_MAKING_SECONDS, _LOOK_SECONDS = 3.0, 0.1  # between the first and the last machine that a rank makes a table on


class Machines:
    """The machines of `machine_of_part`, in order."""

    def __init__(self, peers: Peers, machine_of_part: Sequence[int]) -> None:
        self._peers, self._machine_of_part = peers, machine_of_part
        self.numbers = sorted(set(machine_of_part))

    def ask(
        self, kind: Kind, arrays: Sequence[Tensor], options: dict[str, Any], *, machines: Sequence[int] | None = None
    ) -> list[Any]:
        """Asks all of them at once, or some, and waits for what each says."""
        answers = []
        for machine in self.numbers if machines is None else machines:
            parts = [part for part, owner in enumerate(self._machine_of_part) if owner == machine]
            extra = {"parts": parts} if kind == Kind.CREATE else {}
            answers.append(self._peers.ask(machine, kind, arrays, options | extra, timeout=ORDER_SECONDS))
        return [answer_of(answer) for answer in answers]

    def make(self, name: str, arrays: Sequence[Tensor], options: dict[str, Any]) -> list[Any]:
        """Has every machine make a table. The first one says which generation it is of, for all ranks that ask."""
        first, *others = self.numbers
        options = {**options, "generation": secrets.randbits(62)}
        received = self.ask(Kind.CREATE, arrays, options, machines=[first])
        options |= {"generation": received[0].options["generation"], "existed": received[0].options.get("existed")}
        received += self._make_on_others(arrays, options, others)
        if any(r.options["generation"] != options["generation"] for r in received):
            if received[0].options["life"]:  # the others have had it since before this one's life
                raise forgotten(first, received[0].options["life_age"])
            raise ValueError(f"table {name!r} is being dropped or made by another rank at this time: let one do it")
        return received

    def _make_on_others(self, arrays: Sequence[Tensor], options: dict[str, Any], machines: Sequence[int]) -> list[Any]:
        """A shard that was started again refuses a table that it should have: unless who makes it is about to."""
        until = time.monotonic() + _MAKING_SECONDS
        while True:
            try:
                return self.ask(Kind.CREATE, arrays, options, machines=machines)
            except ShardLost:
                if not options["existed"] or time.monotonic() > until:
                    raise
                time.sleep(_LOOK_SECONDS)


def answer_of(answer: Answer) -> Any:
    """What a machine says; its ValueError as one of ours."""
    try:
        return answer.result()
    except RemoteValueError as error:
        raise ValueError(str(error)) from error
