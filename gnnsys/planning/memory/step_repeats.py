"""When a trace has seen enough: the last steps did the same to memory, and left nothing behind.

The first step makes gradients and the optimizer's state. Others make something once (averaged weights), for a while (a
bank of outputs that fills up) or now and then (an evaluation every few steps). What happens first in a later step than
those traced is not seen, and an estimate says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gnnsys.planning.memory.ledger import StorageRecord

FEWEST_STEPS, MOST_STEPS_TRACED = 6, 20
_ALIKE = 3  # steps at the end

Changes = Sequence[tuple[StorageRecord, int]]


def repeats(changes: Changes, bounds: Sequence[int], same_sizes: bool) -> bool:
    """Whether the last steps allocated and freed the same blocks, in order, and freed all that they allocated.

    Step n has the changes from `bounds[n]` to `bounds[n + 1]`. Without `same_sizes` (sampled batches differ in size),
    only the operators are compared.
    """
    if len(bounds) <= _ALIKE:
        return False
    steps = [_step(changes[low:high], same_sizes) for low, high in pairwise(bounds[-_ALIKE - 1 :])]
    return all(step == steps[0] for step in steps) and sum(sign * size for _, sign, size in steps[0]) == 0


def step_growth(changes: Changes, bounds: Sequence[int]) -> int:
    """Bytes by which memory grew in a step, over the last few of them; none in a trace of fewer."""
    if len(bounds) <= _ALIKE:
        return 0
    return max(0, sum(change for _, change in changes[bounds[-_ALIKE - 1] : bounds[-1]]) // _ALIKE)


def _step(changes: Changes, same_sizes: bool) -> list[tuple[str, int, int]]:
    return [
        (record.op, 1 if change > 0 else -1, abs(change) if same_sizes else 1)
        for record, change in changes
        if not record.on_host
    ]
