"""A loader among ranks whose number may change: what its state says of them, and what the states of all of them mean.

Both faces use it, ours and PyG's. Where nothing of an epoch has been consumed, or all of it, every loader can go on; in
mid-epoch only those whose inputs are a share of `gnnsys.split`, which know what the others have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from gnnsys.seeds.leftover import InputIds, Leftover, ShareRecipe, deal, num_batches
from gnnsys.seeds.shares import Share


class Ranks:
    """Which rank of how many a loader is, and its share among theirs.

    `given` is what the user gave as inputs, `inputs` the ids it stands for. `own_values` names what was given for this
    rank's seeds one by one (labels, times): of other ranks' seeds it is not known, so they cannot be taken over.
    """

    def __init__(self, graph: Any, given: Any, inputs: InputIds | None, own_values: Sequence[str] = ()) -> None:
        recipe: Any = getattr(given, "recipe", None) if isinstance(given, Share) else None
        self.recipe: ShareRecipe | None = recipe if isinstance(recipe, ShareRecipe) else None
        self.inputs = inputs
        self._refusal = None
        if not isinstance(given, Share):
            self._refusal = "its inputs are not a share: give it what gnnsys.split returns"
        elif self.recipe is None or inputs is None:
            self._refusal = "its share does not know those of the other ranks: give it what gnnsys.split returns"
        elif own_values:
            self._refusal = f"{' and '.join(own_values)} was given for this rank's seeds alone: keep it with the graph"
        standing = _standing(graph) if self.recipe is None else (self.recipe.rank, len(self.recipe.machine_of_rank))
        self.rank, self.world_size = standing

    @property
    def told_inputs(self) -> list[InputIds]:
        """The inputs, unless the share they are says itself which they are."""
        return [] if self.recipe is not None or self.inputs is None else [self.inputs]

    def state(self) -> dict[str, Any]:
        """Who this is and whose seeds these are."""
        recipe = self.recipe
        share = None if recipe is None else recipe.shares[recipe.rank]
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "share": None if share is None else [share.start, share.stop],
            "seeds": None if recipe is None else recipe.digest,
        }

    def check_own(self, state: Mapping[str, Any]) -> None:
        """ValueError for a state of another share than this one's."""
        ours = self.state()
        if self.recipe is None or state.get("share") is None:
            return
        if state["share"] != ours["share"]:
            raise ValueError(
                f"this state is of rank {state['rank']} of {state['world_size']} with share={state['share']}, here it "
                f"is {ours['share']}, rank {self.rank} of {self.world_size}: give load_state_dicts those of all ranks"
            )
        if state["seeds"] != ours["seeds"]:
            raise ValueError("this state is of a loader with other seeds, or with seeds in other parts")

    def leftover_of(self, state: Mapping[str, Any]) -> Leftover | None:
        """What this rank was going through when `state`, its own, was taken; None for an ordinary epoch."""
        if state.get("leftover") is None:
            return None
        leftover = Leftover.from_state(int(state["epoch"]), state["leftover"])
        if self._refusal is not None and leftover.num_inputs:
            raise ValueError(f"this state is in the middle of what other ranks had left, but {self._refusal}")
        return leftover

    def own_state(self, states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Of as many ranks with the same shares, the state of the one that had this share: it is gone on with as it is.

        Shares follow machines, and a restart may number these anew: the rank that has a share now need not be the one
        that had it. None where the shares are others.
        """
        check_states(states)
        if len(states) != self.world_size:
            return None
        if self.recipe is None or any(state.get("share") is None for state in states):
            return states[self.rank]
        ours = [[share.start, share.stop] for share in self.recipe.shares]
        theirs = [list(state["share"]) for state in states]
        if sorted(ours) != sorted(theirs) or any(state["seeds"] != self.recipe.digest for state in states):
            return None
        alike = [rank for rank, share in enumerate(theirs) if share == ours[self.rank]]  # several, where they are empty
        return states[alike[ours[: self.rank].count(ours[self.rank])]]

    def deal(
        self, states: Sequence[Mapping[str, Any]], ours: Mapping[str, Any], *, is_shuffled: bool
    ) -> Leftover | None:
        """This rank's share of what ranks with these states have left; None at the beginning of an epoch.

        `ours` is what must have been the same there for the order of their seeds to be known here; `is_shuffled`:
        whether the epoch that they are in is.
        """
        if all(int(state["batch"]) == 0 and state.get("leftover") is None for state in states):
            return None
        if all(map(is_over, states)):
            return Leftover(int(states[0]["epoch"]), max(int(state["batch"]) for state in states), 0, (), ())
        problem = self._refusal
        for rank, state in enumerate(states):
            if problem is None and (state.get("share") is None or state["seeds"] != self.state()["seeds"]):
                problem = f"the state of rank {rank} is of other seeds, or of seeds in other parts"
            for name, value in ours.items():
                if problem is None and state.get(name) != value:
                    problem = (
                        f"the state of rank {rank} is of a loader with {name}={state.get(name)}, here it is {value}"
                    )
        if problem is not None:
            raise ValueError(
                f"{len(states)} ranks were in the middle of an epoch, and what they have left cannot be dealt to the "
                f"{self.world_size} ranks of this loader: {problem}. Go back to a state from between two epochs, or to "
                f"{len(states)} ranks"
            )
        assert self.recipe is not None
        return deal(states, self.recipe, is_shuffled)


def is_over(state: Mapping[str, Any]) -> bool:
    """Whether nothing is left of the epoch that a state was taken in, though its end was not seen."""
    batch, size, left = int(state["batch"]), state.get("largest"), None
    if state.get("leftover") is not None:
        left = Leftover.from_state(int(state["epoch"]), state["leftover"])
        size = left.largest
    size = state.get("num_inputs") if size is None else size
    if size is None or state.get("batch_size") is None:  # the state does not say how long the epoch was
        return False
    steps = num_batches(int(size), int(state["batch_size"]), bool(state["drop_last"]))
    return batch > 0 and batch == steps + (0 if left is None else left.first)


def check_states(states: Sequence[Mapping[str, Any]]) -> None:
    """ValueError unless these are the states of all ranks of one moment, in the order of the ranks."""
    if not states:
        raise ValueError("states must be those of all ranks in their order, got none")
    for rank, state in enumerate(states):
        said = state.get("rank", rank), state.get("world_size", len(states))
        if said == (0, 1) and len(states) > 1 and state.get("share") is None:
            raise ValueError(
                f"these are states of {len(states)} loaders that did not know of each other: make the process group "
                "before the loader (gnnsys.init does), or give each its own by load_state_dict"
            )
        if said != (rank, len(states)):
            raise ValueError(
                f"states must be those of all ranks in their order: of {len(states)}, number {rank} is that of rank "
                f"{said[0]} of {said[1]}"
            )
        if state["epoch"] != states[0]["epoch"]:
            raise ValueError(
                f"these states are not of one moment: rank 0 was in epoch {states[0]['epoch']}, rank {rank} in "
                f"{state['epoch']}"
            )


def _standing(graph: Any) -> tuple[int, int]:
    """Rank and number of ranks: as the graph was opened, else as torch.distributed says, else alone."""
    placement = getattr(graph, "placement", None)
    if placement is not None:
        return placement.rank, placement.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
