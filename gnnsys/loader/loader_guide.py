"""What a guide is to a loader: it makes the loader's sampler, and is told what the loader counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from gnnsys.loader.batch_memory import NumNeighbors
from gnnsys.sampling import NeighborSampler


class BatchNumbers(Protocol):
    """Numbers of batches, counted across epochs, and their (epoch, batch)."""

    def number(self, at: tuple[int, int]) -> int: ...

    def ticket(self, position: int) -> tuple[int, int]: ...

    def state(self) -> dict[str, Any]:
        """What must be the same for a number to mean the same batch."""


class LoaderGuide(Protocol):
    """What steers a loader's draws and columns while it runs: `gnnsys.explain.Guide`."""

    def make_sampler(self, graph: Any, num_neighbors: Any, seeds: Tensor, batches: BatchNumbers) -> NeighborSampler:
        """The sampler of a loader of these seeds (global ids)."""

    def watch(self, counts: Callable[[], Mapping[str, int]], made_of: Callable[[], Mapping[str, Any]]) -> None:
        """Is told what the loader's fetch stage counts, and what the loader is made of (`Identity.state`)."""


def check_guide(guide: LoaderGuide, sampler: object, num_neighbors: NumNeighbors | None, *, is_plain: bool) -> None:
    """ValueError for what a guide does not go with. `is_plain`: draws are as a loader has them by default."""
    if not hasattr(guide, "make_sampler"):
        raise ValueError(f"guide must be a gnnsys.explain.Guide, got {type(guide).__name__}")
    if sampler is not None or num_neighbors is None or not is_plain:
        raise ValueError(
            "a guide decides how neighbours are drawn: give num_neighbors, and leave sampler, times, weights, replace, "
            "disjoint, subgraph_type and expand away"
        )
