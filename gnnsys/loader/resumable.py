"""What a loader remembers of its consumer, and how it goes on from there: on as many ranks as before, or on others.

State is what the consumer has seen, never what was loaded ahead: so a run that resumes repeats an unbroken one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gnnsys.loader.adaptive_shuffle import AdaptiveShuffle
from gnnsys.loader.identity import NAME as MADE_OF
from gnnsys.loader.identity import Identity
from gnnsys.loader.planned_execution import PlannedExecution
from gnnsys.loader.schedule import Schedule, Ticket, shuffled
from gnnsys.sampling import Sampler, SubgraphSampler
from gnnsys.seeds import Leftover, Ranks

_log = logging.getLogger(__name__)


def warn_of_no_batch(epoch: int, rank: int) -> None:
    """Says, on rank 0, why a loop over a resumed loader has no batch: its state is of the end of an epoch.

    The epoch is not skipped: what a script does at its end (a scheduler's step, validation) would be lost.
    """
    if rank == 0:
        _log.warning(
            "resumed after the last batch of epoch %d, counted from 0: the loop over the loader now has no batch, and "
            "the code after it runs as in the unbroken run. That code must not need what only a batch sets (loss)",
            epoch,
        )


class Resumable:
    """The state of a `Loader`, which has the rest: `close` ends what runs by what was known before."""

    def __init__(
        self, schedule: Schedule, ranks: Ranks, identity: Identity, sampler: Sampler | SubgraphSampler | None
    ) -> None:
        self._schedule, self._ranks, self._identity = schedule, ranks, identity
        self._shuffling = AdaptiveShuffle(schedule, ranks)
        self._sampler = sampler  # whose state is part of the loader's
        self._execution: PlannedExecution | None = None
        self._position = 0  # of the next batch, counted across epochs
        self._ending: int | None = None  # the epoch whose batches are all given, until its iterator has said so
        self._is_resuming = False
        self._iteration = 0

    def close(self) -> None:
        raise NotImplementedError

    @property
    def _at(self) -> Ticket:
        """How far the consumer is: behind an epoch's last batch still in that epoch, until its end was seen."""
        if self._ending is None:
            return self._schedule.ticket(self._position)
        return Ticket(self._ending, self._position - self._schedule.first(self._ending))

    def state_dict(self) -> dict[str, Any]:
        """What the consumer has seen; loaded into a loader made alike, the next batch is the one after."""
        at, leftover = self._at, self._schedule.leftover
        left = leftover.state() if leftover is not None and leftover.epoch == at.epoch else None
        state = {**at._asdict(), **self._ranks.state(), **self._schedule.state(), "leftover": left}
        learned = {} if self._sampler is None else self._sampler.state_dict()
        state |= {MADE_OF: self._identity.state(), **({"sampler": learned} if learned else {})}
        state |= self._shuffling.state()
        return state if self._execution is None else {**state, "execution": self._execution.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next `iter` go on where `state` was taken: with the rest of that epoch, none behind its last batch.

        The caller's code at the end of that epoch, which the state knows nothing of, is then run once more or at last.
        ValueError, before anything is changed, for the state of a loader with other inputs, another graph or options.
        """
        self._ranks.check_own(state)
        for name, ours in self._schedule.state().items():
            if state.get(name) != ours:
                raise ValueError(f"this state is of a loader with {name}={state.get(name)}, here it is {ours}")
        self._identity.check(state)
        ticket, leftover = Ticket(int(state["epoch"]), int(state["batch"])), self._ranks.leftover_of(state)
        execution, planned = self._execution, None
        if execution is not None and "execution" in state:
            planned = execution.read_state(state["execution"])
        seen = self._shuffling.read([state])
        self._load_sampler([state], ticket)
        if self._shuffling.go_on_with(seen):
            self.close()
        if execution is not None and planned is not None:
            execution.load_state(planned)
        self._go_to(ticket, leftover)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Makes the next `iter` go on where all ranks were, however many; `states` are theirs, in the order of ranks.

        As many ranks as now: each share is gone on with. Another number: what none of them has consumed of the epoch is
        dealt to the ranks there are now, in shares that differ by at most one and as many batches on each; the epochs
        behind it are ordinary. Every rank calls it with the same states. `batch_size` and `drop_last` may be others.
        """
        own = self._ranks.own_state(states)
        seen = self._shuffling.read(states)
        if own is not None:
            return self.load_state_dict(own)
        ours = {name: getattr(self._schedule, name) for name in ("shuffle", "seed")}
        epoch = int(states[0]["epoch"])
        leftover = self._ranks.deal(states, ours, is_shuffled=seen.shuffles(epoch))
        for state in states:
            self._identity.check_sampling(state)
        ticket = Ticket(epoch, 0 if leftover is None else leftover.first)
        self._load_sampler(states, ticket)
        if self._shuffling.go_on_with(seen):
            self.close()
        self._go_to(ticket, leftover)

    def _load_sampler(self, states: Sequence[Mapping[str, Any]], ticket: Ticket) -> None:
        """What samplers of all ranks had learned, one or several, before the batch of `ticket`."""
        if self._sampler is not None:
            learned = [state.get("sampler", {}) for state in states]
            if any(learned) or self._sampler.state_dict():
                self.close()  # stages that run now draw by what was known before
            self._sampler.load_state_dicts(learned)
            self._sampler.consumed((ticket.epoch, ticket.batch - 1))

    def _go_to(self, ticket: Ticket, leftover: Leftover | None) -> None:
        if leftover is not None or self._schedule.leftover is not None:
            self.close()  # stages that run now know the inputs of before
            self._schedule.leftover = leftover
            self._take_over(leftover)
            if self._execution is not None:
                self._execution.take_over(leftover)
        self._position, end = self._schedule.position(ticket), self._schedule.first(ticket.epoch + 1)
        self._ending = ticket.epoch if ticket.batch > 0 and self._position == end else None
        self._is_resuming = True
        self._iteration += 1

    def _take_over(self, leftover: Leftover | None) -> None:
        inputs, recipe, schedule = self._ranks.inputs, self._ranks.recipe, self._schedule
        if recipe is None and (leftover is None or not leftover.num_inputs):
            return
        assert inputs is not None and recipe is not None

        def order(origin: int) -> torch.Tensor | None:
            assert leftover is not None
            size, is_shuffled = len(leftover.origins[origin]), schedule.shuffles(leftover.epoch)
            return shuffled(size, schedule.seed, leftover.epoch) if is_shuffled else None

        inputs.take_over(leftover, recipe, order)
