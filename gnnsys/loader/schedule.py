"""The schedule: which seeds make up batch b of epoch e, a pure function of (seed, e, b).

Positions run on across epochs (epoch * batches per epoch + batch), so one endless stream feeds a pipeline that never
stops between epochs, and a position is all the state there is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import stream_key

_SHUFFLE = 0x5348  # domain of the shuffle's stream: apart from sampling and negatives under the same seed


class Ticket(NamedTuple):
    """One batch to be: what enters the pipeline."""

    epoch: int
    batch: int


def generator(*key: int) -> torch.Generator:
    """A CPU generator whose stream is a function of `key` alone."""
    return torch.Generator().manual_seed(stream_key(*key) & 0xFFFFFFFF)


@dataclass
class Schedule:
    """Cuts `num_inputs` inputs into batches, in another order every epoch if `shuffle`."""

    num_inputs: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")
        self._orders: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Batches per epoch."""
        return self.num_inputs // self.batch_size if self.drop_last else -(-self.num_inputs // self.batch_size)

    def tickets(self, position: int, end: int | None = None) -> Iterator[Ticket]:
        """From `position` on, without end unless one is given."""
        while len(self) and (end is None or position < end):
            yield Ticket(*divmod(position, len(self)))
            position += 1

    def inputs(self, ticket: Ticket) -> Tensor:
        """Which of the inputs make up this batch, int64."""
        begin = ticket.batch * self.batch_size
        end = min(begin + self.batch_size, self.num_inputs)
        return self._order(ticket.epoch)[begin:end] if self.shuffle else torch.arange(begin, end)

    def state(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same batch."""
        names = ("num_inputs", "batch_size", "shuffle", "drop_last", "seed")
        return {name: getattr(self, name) for name in names}

    def _order(self, epoch: int) -> Tensor:
        with self._lock:
            if epoch not in self._orders:
                for old in [e for e in self._orders if e < epoch - 1 or e > epoch + 1]:
                    del self._orders[old]  # two epochs are in flight at most
                stream = generator(self.seed, _SHUFFLE, epoch)
                self._orders[epoch] = torch.randperm(self.num_inputs, generator=stream)
            return self._orders[epoch]
