"""Loops over batches, and what requests say when they begin and end in other orders than they are nested."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import ExitStack

import pytest

from gnnsys.comm import BatchLoop, RequestContext, current_context, use_context

NUM_EPOCHS = 1200  # more than the interpreter has frames


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_an_epoch_that_begins_before_the_last_one_is_left_keeps_no_earlier_one(in_context: bool, inside: bool) -> None:
    around = BatchLoop()
    if inside:
        around.use(RequestContext(batch=3, loader=2))
    before = current_context()
    loops: weakref.WeakSet[BatchLoop] = weakref.WeakSet()
    most = 0
    epoch: BatchLoop | None = None
    for number in range(NUM_EPOCHS):
        with ExitStack() as said:
            if in_context:
                said.enter_context(use_context(RequestContext(priority=number)))
            last, epoch = epoch, BatchLoop()  # `epoch = iter(loader)`: the last one is left when this one has begun
            loops.add(epoch)
            if last is not None:
                last.leave()
            del last
            epoch.use(RequestContext(batch=number, loader=1))
        most = max(most, len(loops))
    assert epoch is not None
    epoch.leave()
    assert current_context() == before
    around.leave()
    assert current_context() == RequestContext()
    gc.collect()
    assert most <= 4


@pytest.mark.parametrize("case", range(20))
def test_loops_that_begin_and_end_in_any_order_give_the_thread_to_the_last_one_that_is_left(case: int) -> None:
    """The oracle: a list of the loops that are not over, where each began in the one that then was at its batch."""
    draw = random.Random(case)
    living: list[tuple[BatchLoop, RequestContext]] = []
    for number in range(200):
        if not living or draw.random() < 0.5:
            living.append((BatchLoop(), RequestContext(batch=number)))
            living[-1][0].use(living[-1][1])
        else:
            living.pop(draw.randrange(len(living)))[0].leave()
        assert current_context() == (living[-1][1] if living else RequestContext())
    while living:
        living.pop(0)[0].leave()
    assert current_context() == RequestContext()
