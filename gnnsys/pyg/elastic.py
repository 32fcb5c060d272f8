"""PyG-style loaders whose number of ranks changes in mid-epoch: deals the inputs that are left to the new ranks.

The order of an old rank's share follows from the state of torch's generator at the start of the epoch, which is in that
rank's saved state. So every new rank can compute what all old ranks had left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from gnnsys.loader import Schedule, Ticket
from gnnsys.pyg.sampler import draw_seed
from gnnsys.seeds import Leftover, num_batches

if TYPE_CHECKING:
    from gnnsys.pyg.threaded_loader import ThreadedLoader


def deal_states(loader: ThreadedLoader, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state with which this rank continues, from the states of another number of ranks.

    What each rank draws for itself (the seed of an epoch, the order of later ones) continues from one of the old ranks.
    """
    leftover = loader.ranks.deal(states, loader.order_options(), is_shuffled=loader.shuffles)
    mine = states[loader.ranks.rank % len(states)]
    state = {"epoch": mine["epoch"], "batch": 0, "generator": mine["generator"], "leftover": None}
    if leftover is None:
        return state
    old = states[0]["leftover"]
    generators = [s["generator"] for s in states] if old is None else old["generators"]
    if not loader.shuffles:
        generators = generators[:1]
    return {**state, "batch": leftover.first, "leftover": {**leftover.state(), "generators": generators}}


def take_over(loader: ThreadedLoader, state: Mapping[str, Any]) -> Leftover | None:
    """Resolves the inputs that `state` leaves to this rank; None if its epoch is an ordinary one."""
    leftover, ranks = loader.ranks.leftover_of(state), loader.ranks
    if ranks.inputs is None or ranks.recipe is None:
        return leftover
    ranks.inputs.take_over(leftover, ranks.recipe, _orders(loader, state, leftover))
    return leftover


def left_batches(loader: ThreadedLoader, leftover: Leftover, start: int) -> Iterator[list[int]]:
    """The batches of a leftover from number `start` on. Its inputs are numbered after the loader's own."""
    largest = max(leftover.largest, len(loader.dataset))  # type: ignore[arg-type]
    schedule = Schedule(len(loader.dataset), loader.batch_size or 1, False, loader.drop_last, 0, largest)  # type: ignore[arg-type]
    schedule.leftover = leftover
    end = schedule.first(leftover.epoch + 1) - schedule.first(leftover.epoch)
    for batch in range(start, end):
        yield schedule.inputs(Ticket(leftover.epoch, batch)).tolist()


def first_number(loader: ThreadedLoader, epoch: int, per_epoch: int) -> int:
    """The batch number of an epoch's first batch. An epoch that was dealt anew may have more or fewer batches than
    others: those behind it begin where it ends."""
    left, longer = loader.leftover, 0
    if left is not None and epoch > left.epoch:
        longer = left.first + num_batches(left.largest, loader.batch_size or 1, loader.drop_last) - per_epoch
    return epoch * per_epoch + longer


def first_seed(loader: ThreadedLoader, state: Mapping[str, Any]) -> int:
    """The seed that the old rank 0 drew for this epoch. All ranks that share its leftover use it."""
    with _At(loader, state["leftover"]["generators"][0]):
        return draw_seed(loader.generator)


def _orders(
    loader: ThreadedLoader, state: Mapping[str, Any], leftover: Leftover | None
) -> Callable[[int], Tensor | None]:
    def order(origin: int) -> Tensor | None:
        if not loader.shuffles:
            return None
        assert leftover is not None
        with _At(loader, state["leftover"]["generators"][origin]):
            draw_seed(loader.generator)  # an epoch draws its seed first
            sampler = RandomSampler(range(len(leftover.origins[origin])), generator=loader.generator)
            return torch.tensor(list(sampler), dtype=torch.int64, device="cpu")

    return order


class _At:
    """Sets torch's generator, or the loader's, to an earlier state inside the `with` block, then restores it."""

    def __init__(self, loader: ThreadedLoader, state: Tensor) -> None:
        self._random = loader.generator if loader.generator is not None else torch.default_generator
        self._state = state

    def __enter__(self) -> None:
        self._before = self._random.get_state()
        self._random.set_state(self._state)

    def __exit__(self, *exception: object) -> None:
        self._random.set_state(self._before)
