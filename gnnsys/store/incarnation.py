"""Which life of a machine's shard this is. One that was started again has the graph's files and none of the tables made
at run time: whoever asks it for those must hear that they are gone, and not that they never were, or get new ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gnnsys.comm import ShardLost


@dataclass
class Life:
    """`number` 0 is the first. A rank that is silent for `lost_after` seconds counts as dead.

    `silent_for(rank, incarnation)`: seconds since a rank was heard of; None where nobody knows.
    """

    machine: int = 0
    number: int = 0
    lost_after: float = 30.0
    silent_for: Callable[[int, int], float] | None = None
    born: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.born

    def gone(self) -> ShardLost:
        """What is said of a table, or a stream of pushes, that an earlier life may have had."""
        return forgotten(self.machine, self.age)


def forgotten(machine: int, age: float) -> ShardLost:
    """The same words for all who see it. `age`: seconds since the shard was started again."""
    return ShardLost(
        f"machine {machine}'s shard was restarted, and the tables that were made at run time are gone with its memory: "
        "start again from the last checkpoint",
        machine=machine,
        silent_for=age,
    )
