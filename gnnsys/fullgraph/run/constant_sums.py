"""Sums over in-neighbours of rows that never change: made once, bin by bin, and read in every pass after that."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gnnsys.fullgraph.plan.bins import Bin


class ConstantSums:
    """Of `num_nodes` nodes, in one tensor, so that passes with other bins read the same ones."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._rows: Tensor | None = None
        self._made: set[tuple[int, int]] = set()  # by the bins of one pass
        self._num_made = 0

    def begin(self) -> ConstantSums:
        """A pass begins. What an earlier one has made in part is forgotten: its bins may have been other ones."""
        if self._num_made < self._num_nodes:
            self._made, self._num_made = set(), 0
        return self

    def get(self, here: Bin) -> Tensor | None:
        """Those of a bin, if they were made; by bins of any size, where all were."""
        if self._rows is None or (self._num_made < self._num_nodes and (here.first, here.end) not in self._made):
            return None
        return self._rows.data[here.nodes]  # others of them may be written meanwhile: autograd shall not count that

    def room(self, here: Bin, make: Callable[[int], Tensor]) -> Tensor:
        """Where a bin's are to be written; `make` gives rows, which hold anything yet."""
        if self._rows is None:
            self._rows = make(self._num_nodes)
        return self._rows[here.nodes]

    def made(self, here: Bin) -> None:
        """A bin's have been written."""
        if (here.first, here.end) not in self._made:
            self._made.add((here.first, here.end))
            self._num_made += len(here)

    def put(self, here: Bin, sums: Tensor) -> Tensor:
        """Keeps a bin's, and returns them as they are kept: those of all nodes are not copied."""
        if len(here) == self._num_nodes:
            self._rows = sums
        else:
            self.room(here, lambda num: sums.new_empty(num, sums.shape[1])).copy_(sums)
        self.made(here)
        kept = self.get(here)
        assert kept is not None
        return kept
