"""PyG-style loaders among ranks whose number changes: what is left of an epoch that torch's sampler put in order.

The order of an old rank's share follows from the state that torch's generator had when the epoch began, which is in
that rank's state; so every rank can find out what the others had left, as our own loaders do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from gnnsys.loader import Schedule, Ticket
from gnnsys.pyg.sampler import draw_seed
from gnnsys.seeds import Leftover

if TYPE_CHECKING:
    from gnnsys.pyg.threaded_loader import ThreadedLoader


def deal_states(loader: ThreadedLoader, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state that this rank goes on with, of ranks with these states: their number was another.

    Draws that are a rank's own business (the seed of an epoch, later orders) go on from those of one of the old ranks.
    """
    leftover = loader.ranks.deal(states, loader.order_options())
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
    """Finds the inputs that `state` leaves to this rank; None where its epoch is an ordinary one."""
    leftover, ranks = loader.ranks.leftover_of(state), loader.ranks
    if ranks.inputs is None or ranks.recipe is None:
        return leftover
    ranks.inputs.take_over(leftover, ranks.recipe, _orders(loader, state, leftover))
    return leftover


def left_batches(loader: ThreadedLoader, leftover: Leftover, start: int) -> Iterator[list[int]]:
    """The batches of a leftover from number `start` on: inputs are numbered behind those of the loader."""
    largest = max(leftover.largest, len(loader.dataset))  # type: ignore[arg-type]
    schedule = Schedule(len(loader.dataset), loader.batch_size or 1, False, loader.drop_last, 0, largest)  # type: ignore[arg-type]
    schedule.leftover = leftover
    end = schedule.first(leftover.epoch + 1) - schedule.first(leftover.epoch)
    for batch in range(start, end):
        yield schedule.inputs(Ticket(leftover.epoch, batch)).tolist()


def first_seed(loader: ThreadedLoader, state: Mapping[str, Any]) -> int:
    """The seed that the old rank 0 drew for this epoch: all ranks that share its leftover go on with it."""
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
            draw_seed(loader.generator)  # as an epoch does first
            sampler = RandomSampler(range(len(leftover.origins[origin])), generator=loader.generator)
            return torch.tensor(list(sampler), dtype=torch.int64, device="cpu")

    return order


class _At:
    """torch's generator, or the loader's, in a state that it had; then put back."""

    def __init__(self, loader: ThreadedLoader, state: Tensor) -> None:
        self._random = loader.generator if loader.generator is not None else torch.default_generator
        self._state = state

    def __enter__(self) -> None:
        self._before = self._random.get_state()
        self._random.set_state(self._state)

    def __exit__(self, *exception: object) -> None:
        self._random.set_state(self._before)
