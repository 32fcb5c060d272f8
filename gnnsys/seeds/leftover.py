"""What is left of an epoch when the number of ranks changes, and how it is dealt out again: arithmetic on intervals.

The shares that an epoch began with are its *origins*; each was put in order once. Ranks take from the front, so what is
left is, however often the ranks have changed since, a list of segments of those orders: a state names intervals, never
seeds, and its size does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class Segment(NamedTuple):
    """From the begin-th to before the end-th seed of origin `origin`, in that origin's order."""

    origin: int
    begin: int
    end: int


@runtime_checkable
class ShareRecipe(Protocol):
    """How a share was made (`gnnsys.split`): enough to know the shares of other ranks. Seeds are numbered."""

    digest: str  # of what was split; the same on every rank

    @property
    def rank(self) -> int: ...
    @property
    def machine_of_rank(self) -> Sequence[int]: ...
    @property
    def shares(self) -> Sequence[range]:
        """Which numbers each rank has."""

    def owners(self, numbers: range) -> Sequence[tuple[int, range]]:
        """These numbers in order, by the machine that owns them; empty where that is nobody's."""

    def chosen(self) -> Any:
        """`ids(first, end)`: the ids of numbers first to end, a tensor or a range that is not written out."""


@dataclass(frozen=True)
class Leftover:
    """One rank's share of what was left of epoch `epoch` after `first` batches; `largest` is the largest such share."""

    epoch: int
    first: int
    largest: int
    origins: tuple[range, ...]  # the numbers of their seeds
    segments: tuple[Segment, ...]  # in the order in which they are consumed

    @property
    def num_inputs(self) -> int:
        return _size(self.segments)

    def state(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "largest": self.largest,
            "origins": [[numbers.start, numbers.stop] for numbers in self.origins],
            "segments": [list(segment) for segment in self.segments],
        }

    @classmethod
    def from_state(cls, epoch: int, state: Mapping[str, Any]) -> Leftover:
        """What `state` described; ValueError where it describes nothing that could have been left."""
        try:
            origins = tuple(range(int(first), int(end)) for first, end in state["origins"])
            segments = tuple(Segment(*map(int, segment)) for segment in state["segments"])
            out = cls(epoch, int(state["first"]), int(state["largest"]), origins, segments)
            fit = all(0 <= at < len(origins) and 0 <= i <= j <= len(origins[at]) for at, i, j in segments)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the state of a loader: what is left of its epoch is {state!r}") from error
        if not fit or out.first < 0 or out.num_inputs > out.largest:
            raise ValueError(f"not the state of a loader: what is left of its epoch is {state!r}")
        return out


# -- batches of equal number -------------------------------------------------------------------------------------------


def num_batches(largest: int, batch_size: int, drop_last: bool) -> int:
    """Of every share, where none is larger than `largest`."""
    return largest // batch_size if drop_last else -(-largest // batch_size)


def even_range(batch: int, num_inputs: int, num_batches: int, batch_size: int) -> tuple[int, int]:
    """Where a batch begins and ends among a share's inputs: sizes differ by at most one."""
    used = min(num_inputs, num_batches * batch_size)
    return batch * used // num_batches, (batch + 1) * used // num_batches


# -- dealing -----------------------------------------------------------------------------------------------------------


def deal(states: Sequence[Mapping[str, Any]], recipe: ShareRecipe, shuffle: bool) -> Leftover:
    """This rank's share of all that the ranks with these states have not consumed of their epoch.

    Shares are equal to one. The ranks of a machine fill theirs with what that machine owns, in order; what is then left
    goes to those who have room. Of an origin that was shuffled all is taken to be where most of it is.
    """
    epoch = int(states[0]["epoch"])
    left, origins = _left(states, epoch)
    total, world_size = _size(left), len(recipe.machine_of_rank)
    sizes = [total * (rank + 1) // world_size - total * rank // world_size for rank in range(world_size)]
    owned: dict[int, list[Segment]] = {}
    for machine, segment in _by_owner(left, origins, recipe, shuffle):
        owned.setdefault(machine, []).append(segment)
    given: list[list[Segment]] = [[] for _ in sizes]
    at = dict.fromkeys(owned, 0)  # how much of a machine's own is given away
    for rank, machine in enumerate(recipe.machine_of_rank):
        if machine in owned:
            given[rank] = cut(owned[machine], at[machine], at[machine] + sizes[rank])
            at[machine] += _size(given[rank])
    rest = [s for machine, own in owned.items() for s in cut(own, at[machine], _size(own))]
    begin = 0
    for rank, size in enumerate(sizes):
        room = size - _size(given[rank])
        given[rank] += cut(rest, begin, begin + room)
        begin += room
    first = max(int(state["batch"]) for state in states)
    return Leftover(epoch, first, max(sizes), origins, tuple(_merge(given[recipe.rank], origins)))


def cut(segments: Iterable[Segment], first: int, end: int) -> list[Segment]:
    """The first-th to before the end-th of all that `segments` have, one after the other."""
    out, at = [], 0
    for origin, i, j in segments:
        low, high = max(first - at, 0) + i, min(end - at, j - i) + i
        if low < high:
            out.append(Segment(origin, low, high))
        at += j - i
    return out


def _left(states: Sequence[Mapping[str, Any]], epoch: int) -> tuple[list[Segment], tuple[range, ...]]:
    """What no rank has consumed, ascending by the origins' numbers, and the origins."""
    olds = [
        None if state.get("leftover") is None else Leftover.from_state(epoch, state["leftover"]) for state in states
    ]
    origins = tuple(range(*map(int, state["share"])) for state in states)
    if olds[0] is not None:
        origins = olds[0].origins
    if any((old is None) != (olds[0] is None) or (old and old.origins != origins) for old in olds):
        raise ValueError("these states are not of one moment: the epochs they are in began with different shares")
    left: list[Segment] = []
    for rank, (state, old) in enumerate(zip(states, olds, strict=True)):
        had = [Segment(rank, 0, len(origins[rank]))] if old is None else list(old.segments)
        num_inputs = _size(had)
        largest, batch = (
            (state["largest"], state["batch"]) if old is None else (old.largest, state["batch"] - old.first)
        )
        steps = num_batches(int(largest), int(state["batch_size"]), bool(state["drop_last"]))
        if not 0 <= batch <= steps:
            raise ValueError(f"the state of rank {rank} is at batch {batch} of {steps}: not the state of a loader")
        consumed = num_inputs  # behind the last batch nothing is left: the rest is dropped
        if batch < steps:
            consumed = even_range(batch, num_inputs, steps, int(state["batch_size"]))[0]
        left += cut(had, consumed, num_inputs)
    return _merge(left, origins), origins


def _merge(segments: Iterable[Segment], origins: Sequence[range]) -> list[Segment]:
    """The same, ascending by the origins' numbers, neighbours joined."""
    merged: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (origins[s.origin].start, s)):
        if merged and merged[-1].origin == segment.origin and merged[-1].end == segment.begin:
            merged[-1] = merged[-1]._replace(end=segment.end)
        else:
            merged.append(segment)
    return merged


def _by_owner(
    segments: Iterable[Segment], origins: Sequence[range], recipe: ShareRecipe, shuffle: bool
) -> Iterator[tuple[int, Segment]]:
    """Segments by the machine that owns their seeds; -1 where nobody does."""
    for segment in segments:
        numbers = origins[segment.origin]
        owners = recipe.owners(numbers if shuffle else numbers[segment.begin : segment.end])
        if not owners:
            yield -1, segment
        elif shuffle:
            sizes: dict[int, int] = {}
            for machine, owned in owners:
                sizes[machine] = sizes.get(machine, 0) + len(owned)
            yield max(sizes, key=lambda machine: (sizes[machine], -machine)), segment
        else:
            for machine, owned in owners:
                yield machine, Segment(segment.origin, owned.start - numbers.start, owned.stop - numbers.start)


def _size(segments: Iterable[Segment]) -> int:
    return sum(end - begin for _, begin, end in segments)


# -- ids ---------------------------------------------------------------------------------------------------------------


class Joined:
    """Ids in several pieces, each a tensor or a range that is not written out; indexed by a tensor."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = pieces
        self._ends = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64, device="cpu").cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._pieces) else 0

    def __getitem__(self, index: Tensor) -> Tensor:
        out = torch.empty(index.numel(), dtype=torch.int64, device="cpu")
        of = torch.searchsorted(self._ends, index, right=True)
        for number in of.unique().tolist():
            here = of == number
            out[here] = self._pieces[number][index[here] - (self._ends[number] - len(self._pieces[number]))]
        return out


class InputIds:
    """A rank's ids, and behind them those of the leftover that it has taken over, if any.

    Input i is the i-th id of the share; in an epoch that is made of a leftover inputs are numbered from there on.
    """

    def __init__(self, own: Any) -> None:
        self.own = own
        self._taken: Any = None

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """Of one batch: all of them own, or all of them taken over."""
        if self._taken is None or chosen.numel() == 0 or int(chosen[0]) < len(self.own):
            own = self.own
            return own.index_select(0, chosen) if isinstance(own, Tensor) else own[chosen]
        return self._taken[chosen - len(self.own)]

    def take_over(self, leftover: Leftover | None, recipe: ShareRecipe, order: Callable[[int], Tensor | None]) -> None:
        """`order(origin)` is the order of an origin's seeds, None for ascending.

        Without an order nothing is read but this rank's own segments, and ranges stay ranges. With one, the ids and the
        order of one origin at a time are in memory, and of each what this rank has is kept.
        """
        self._taken = None
        if leftover is None:
            return
        chosen, pieces = recipe.chosen(), []
        origin, orders, ids = -1, None, None
        for segment in leftover.segments:
            numbers = leftover.origins[segment.origin]
            if segment.origin != origin:
                origin, ids = segment.origin, None
                orders = order(origin)
            if orders is None:
                pieces.append(chosen.ids(numbers.start + segment.begin, numbers.start + segment.end))
                continue
            ids = chosen.ids(numbers.start, numbers.stop) if ids is None else ids
            pieces.append(ids[orders[segment.begin : segment.end]])
        self._taken = Joined(pieces)
