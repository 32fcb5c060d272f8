"""The schedule: which seeds make up batch b of epoch e, a pure function of (seed, e, b).

Positions run on across epochs (epoch * batches per epoch + batch), so one endless stream feeds a pipeline that never
stops between epochs, and a position is all the state there is. One epoch may be another's remainder (`leftover`): its
batches go on counting where the old ranks stopped, and the epochs behind it are ordinary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.loader.options import check_count, check_seed
from gnnsys.ops import stream_key
from gnnsys.seeds import Leftover, even_range, num_batches

ADAPTIVE = "adaptive"
_SHUFFLE = 0x5348  # domain of the shuffle's stream: apart from sampling and negatives under the same seed


class Ticket(NamedTuple):
    """One batch to be: what enters the pipeline."""

    epoch: int
    batch: int


class ShuffleStart:
    """The first epoch that is shuffled, None where there is none yet. Schedules of the same batches share it."""

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch


def generator(*key: int) -> torch.Generator:
    """A CPU generator whose stream is a function of `key` alone."""
    return torch.Generator().manual_seed(stream_key(*key) & 0xFFFFFFFF)


@dataclass
class Schedule:
    """Cuts `num_inputs` inputs into batches, in another order every epoch if `shuffle`; if that is "adaptive", in their
    own order in epochs before `shuffle_start`, which somebody else sets.

    With `largest` the inputs are one of several shares, none of them larger: every share is cut into as many batches
    as the largest needs, ceil(largest / batch_size), of sizes that differ by at most one. Nothing is dropped or
    repeated; a share that is smaller than the number of batches has empty ones. With `drop_last` there are
    largest // batch_size batches in every share, and what does not fit into them is left out.
    """

    num_inputs: int
    batch_size: int
    shuffle: bool | str
    drop_last: bool
    seed: int
    largest: int | None = None

    def __post_init__(self) -> None:
        self.batch_size = check_count("batch_size", self.batch_size, 1)
        self.seed = check_seed(self.seed)
        if self.largest is not None and self.largest < self.num_inputs:
            raise ValueError(f"the largest share has {self.largest} seeds, but this one {self.num_inputs}")
        if self.shuffle not in (True, False, ADAPTIVE):
            raise ValueError(f'shuffle must be True, False or "{ADAPTIVE}", got {self.shuffle!r}')
        self.shuffle_start = ShuffleStart(0 if self.shuffle and self.shuffle != ADAPTIVE else None)
        self.leftover: Leftover | None = None
        self._orders: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Batches per epoch."""
        return num_batches(self.num_inputs if self.largest is None else self.largest, self.batch_size, self.drop_last)

    # -- positions -----------------------------------------------------------------------------------------------------

    def first(self, epoch: int) -> int:
        """The position of an epoch's first batch, which is the one behind the last of the epoch before."""
        left = self.leftover
        longer = 0 if left is None or epoch <= left.epoch else left.first + self._num_left(left) - len(self)
        return epoch * len(self) + longer

    def ticket(self, position: int) -> Ticket:
        """The batch at a position."""
        left = self.leftover
        if left is not None and position >= self.first(left.epoch):
            if position < self.first(left.epoch + 1):
                return Ticket(left.epoch, position - self.first(left.epoch))
            epochs, batch = divmod(position - self.first(left.epoch + 1), max(1, len(self)))
            return Ticket(left.epoch + 1 + epochs, batch)
        return Ticket(*divmod(position, max(1, len(self))))

    def position(self, ticket: Ticket) -> int:
        return self.first(ticket.epoch) + ticket.batch

    def number(self, at: tuple[int, int]) -> int:
        """The position of (epoch, batch), counted across epochs."""
        return self.position(Ticket(*at))

    def tickets(self, position: int, end: int | None = None) -> Iterator[Ticket]:
        """From `position` on, without end unless one is given."""
        while len(self) and (end is None or position < end):
            yield self.ticket(position)
            position += 1

    # -- inputs --------------------------------------------------------------------------------------------------------

    def inputs(self, ticket: Ticket) -> Tensor:
        """Which of the inputs make up this batch, int64; those of a leftover are numbered from `num_inputs` on."""
        left = self.leftover
        if left is not None and ticket.epoch == left.epoch:
            steps = self._num_left(left)
            begin, end = even_range(ticket.batch - left.first, left.num_inputs, steps, self.batch_size)
            return torch.arange(self.num_inputs + begin, self.num_inputs + end, device="cpu")
        begin, end = self._range(ticket.batch)
        is_shuffled = self.shuffles(ticket.epoch)
        return self._order(ticket.epoch)[begin:end] if is_shuffled else torch.arange(begin, end, device="cpu")

    def shuffles(self, epoch: int) -> bool:
        """Whether the inputs of this epoch are shuffled."""
        return self.shuffle_start.epoch is not None and epoch >= self.shuffle_start.epoch

    def _num_left(self, left: Leftover) -> int:
        return num_batches(left.largest, self.batch_size, self.drop_last)

    def _range(self, batch: int) -> tuple[int, int]:
        if self.largest is None:
            begin = batch * self.batch_size
            return begin, min(begin + self.batch_size, self.num_inputs)
        return even_range(batch, self.num_inputs, len(self), self.batch_size)

    def state(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same batch."""
        names = ("num_inputs", "batch_size", "shuffle", "drop_last", "seed", "largest")
        return {name: getattr(self, name) for name in names}

    def _order(self, epoch: int) -> Tensor:
        with self._lock:
            if epoch not in self._orders:
                for old in [e for e in self._orders if e < epoch - 1 or e > epoch + 1]:
                    del self._orders[old]  # two epochs are in flight at most
                self._orders[epoch] = shuffled(self.num_inputs, self.seed, epoch)
            return self._orders[epoch]


def shuffled(num_inputs: int, seed: int, epoch: int) -> Tensor:
    """The order of a share's inputs in an epoch, int64."""
    return torch.randperm(num_inputs, generator=generator(seed, _SHUFFLE, epoch), device="cpu")
