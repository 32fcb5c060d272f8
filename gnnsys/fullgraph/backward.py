"""The way back: bins in reverse, gradients of the halo to their owners, parameters' gradients summed over the ranks.

Bins that others wait for run first, then the latest layer's. Nothing depends on that order: a step whose bins add to
the same rows runs them in the reverse order of their places, whatever arrives first; what bins say of parameters is
added in the bins' order, and what peers say of rows in the peers'. So sums are the same on every run. A layer's
parameters are summed over the ranks as soon as its bins are done here, the last layer first on every rank. Where bins
move, the next one is brought while one computes; gradients come back, and are added, in the order in which bins ran.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.fullgraph.bins import Bin, Chunk
from gnnsys.fullgraph.exchange import Exchange
from gnnsys.fullgraph.linear import LinearStage
from gnnsys.fullgraph.moves import Load
from gnnsys.fullgraph.reduce import ParameterGrads, unhooked
from gnnsys.fullgraph.state import Kept, Pass, needed_before

_MAX_FREE = 64  # bins of a step that may run in any order: what they say of parameters is kept apart


class Backward:
    """Takes the gradient of a pass's result; `run` gives that of the input and those of the parameters."""

    def __init__(self, state: Pass, exchange: Exchange) -> None:
        self._state, self._exchange = state, exchange
        self._steps, self._schedule = state.ground.steps, state.ground.schedule
        self._first = needed_before(state.needs, len(self._steps))  # the steps before it have nothing to learn
        self._grads: list[Tensor | None] = [None] * (len(self._steps) + 1)  # of each step's input
        self._sums: list[Tensor | None] = [None] * (len(self._steps) + 1)  # of a step in halves: of its nodes' sums
        self._marked: dict[tuple[int, int], Tensor] = {}  # (step that was marked, step that joins): its gradient
        self._of_parameters = ParameterGrads(state.parameters, exchange.peers)
        self._unreduced = len(self._steps) - 1
        self._missing = [[0] * len(step.bins) for step in self._steps]
        self._chunks_left: dict[tuple[int, int], int] = {}  # (step, chunk): bins that will add to its gradient
        self._left = [len(step.bins) if s >= self._first else 0 for s, step in enumerate(self._steps)]
        self._waiting = list(self._left)  # bins that have not begun
        self._ready: list[tuple[int, int, int]] = []  # (not awaited by others, -step, -bin), the least first
        self._next: tuple[int, int] | None = None  # what is being brought
        self._of_norms: dict[int, Tensor] = {}  # by step: the whole gradient of a normalisation's rows

    def run(self, grad: Tensor) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Gradients of the input's core rows (None where nobody asked), and by id those of parameters, of all ranks."""
        peers, state = self._exchange.peers, self._state
        state.begin_back()
        sent_before = sum(peers.bytes_sent)
        self._grads[-1] = grad.contiguous()
        num_arrivals = self._await()
        self._reduce_done()
        with state.moving():
            self._run_bins(num_arrivals)
        x_grad = self._take_grad(0, 0, self._exchange.plan.num_core, 0) if state.needs[0] else None
        began = time.perf_counter()
        found = self._of_parameters.wait()
        state.times.waited(began)
        self._exchange.flush()
        state.times.num_bytes += sum(peers.bytes_sent) - sent_before
        return x_grad, found

    def _run_bins(self, num_arrivals: int) -> None:
        mover = self._state.mover
        while sum(self._left) or num_arrivals:
            is_flying = mover is not None and mover.num_flying > 0
            can_run = bool(self._ready) or self._next is not None
            token = self._exchange.arrival(wait=not (can_run or is_flying)) if num_arrivals else None
            if token is not None:
                num_arrivals -= 1
                s, number = self._exchange.take_grad(token)
                self._release(s - 1, self._opened(s, number))
            elif can_run:
                self._do(*self._bring())
            else:
                assert mover is not None
                mover.finish()

    # -- when ----------------------------------------------------------------------------------------------------------

    def _await(self) -> int:
        """Notes what bins wait for, and asks for what peers will say of their rows: so many messages."""
        num_arrivals = 0
        for s in range(len(self._steps) - 1, -1, -1):
            step = self._steps[s]
            for _, chunks in step.needs:
                for chunk in chunks:
                    self._chunks_left[s, chunk] = self._chunks_left.get((s, chunk), 0) + 1
            if s > self._first:
                for b in range(len(step.bins)):
                    for number in self._opens(s, b):
                        self._missing[s - 1][number] += 1
            if self._returns_grads(s):
                for number in self._exchange.expect_grads(s):
                    num_arrivals += 1
                    for at in self._opened(s, number):
                        self._missing[s - 1][at] += 1
        for s in range(self._first, len(self._steps)):
            for b in range(len(self._steps[s].bins)):
                self._enter(s, b)
        return num_arrivals

    def _is_free(self, s: int) -> bool:
        """Whether a step's bins write rows of their own alone, so that any order gives the same.

        Not where bins move: on the device there is room for one sum of what they say of parameters.
        """
        step = self._steps[s]
        return (
            self._state.mover is None
            and (step.view is not None or step.stage.conv is None)
            and len(step.bins) <= _MAX_FREE
        )

    def _enter(self, s: int, b: int) -> None:
        """A bin may run, if nothing is missing and it is its turn."""
        if self._missing[s][b] or not (self._is_free(s) or b == self._waiting[s] - 1):
            return
        is_awaited = self._returns_grads(s) and len(self._steps[s].needs[b][1]) > 0
        heapq.heappush(self._ready, (0 if is_awaited else 1, -s, -b))

    def _opens(self, s: int, b: int) -> Sequence[int]:
        """The bins of the step before that wait for this one."""
        return self._steps[s].needs[b][0] if self._passes_on(s) else range(len(self._steps[s - 1].bins))

    def _opened(self, s: int, number: int) -> Sequence[int]:
        """The bins of the step before that wait for what peers say of bin `number` of it."""
        if s == 0:
            return ()
        return [number] if self._passes_on(s) else range(len(self._steps[s - 1].bins))

    def _passes_on(self, s: int) -> bool:
        """Whether bins of the step before wait for their own rows' gradients alone; those of a normalisation do not."""
        return self._schedule.inter_layer and self._steps[s - 1].stage.norm is None

    def _returns_grads(self, s: int) -> bool:
        """Whether gradients of a step's halo go back to their owners."""
        return s >= self._first and self._state.needs[s] and self._steps[s].has_halo

    def _release(self, s: int, bins: Sequence[int]) -> None:
        for b in bins:
            self._missing[s][b] -= 1
            self._enter(s, b)

    # -- what ----------------------------------------------------------------------------------------------------------

    def _bring(self) -> tuple[int, int]:
        """The bin that is due, whose inputs and gradient are on their way."""
        due, self._next = self._next, None
        if due is None:
            _, s, b = heapq.heappop(self._ready)
            due = (-s, -b)
            if self._state.mover is not None:
                self._state.load(*due, self._grad_of(*due))
        return due

    def _grad_of(self, s: int, b: int) -> Tensor:
        """The gradient of what a bin made, which is complete."""
        here = self._steps[s].bins[b]
        if self._steps[s].stage.norm is None:
            return self._take_grad(s + 1, here.first, here.end, b)
        if s not in self._of_norms:
            self._begin_norm(s)
        return self._of_norms[s][here.first : here.end]

    def _begin_norm(self, s: int) -> None:
        """Sums of a normalisation's gradients, which are all there, before any of its bins runs."""
        if self._state.mover is not None:  # a rank without nodes may be here while a later step's parameters are due
            self._state.mover.finish()
        bins, rows = self._steps[s].bins, self._state.core(s)
        if len(bins) == 1:
            whole = self._take_grad(s + 1, bins[0].first, bins[0].end, 0)
        else:
            whole = torch.empty_like(rows)
            for b, here in enumerate(bins):
                whole[here.first : here.end] = self._take_grad(s + 1, here.first, here.end, b)
        self._of_norms[s] = whole
        trained = self._state.parameters[s]
        found = self._state.norms[s].begin_back(rows, whole, self._steps[s].bounds, trained)
        self._of_parameters.add(s, found)

    def _do(self, s: int, b: int) -> None:
        state, mover = self._state, self._state.mover
        self._make_room(s)
        began = time.perf_counter()
        self._compute(s, b)
        state.times.computed(began, True, s, b)
        self._waiting[s] -= 1
        if b > 0 and not self._is_free(s):
            self._enter(s, b - 1)
        if mover is None:
            self._done(s, b)
        else:
            mover.finish(keep=1)
            self._next = self._bring() if self._ready else None

    def _done(self, s: int, b: int) -> None:
        """What a bin says of its inputs is added where that is kept."""
        self._left[s] -= 1
        if self._left[s] == 0:
            self._of_norms.pop(s, None)
        if s > self._first:
            self._release(s - 1, self._opens(s, b))
        if self._returns_grads(s):
            self._send(s, b)
        self._reduce_done()

    def _make_room(self, s: int) -> None:
        """For the gradients of a step's input, unless its one bin's will be all of them."""
        state, step = self._state, self._steps[s]
        if step.stage.norm is not None and s not in self._of_norms:
            self._begin_norm(s)
        is_one = len(step.bins) == 1 and state.mover is None
        if state.needs[s] and step.view is None and self._grads[s] is None and not is_one:
            self._grads[s] = torch.zeros_like(state.rows[s])
        if step.view is not None and state.needs[s] and self._sums[s] is None and not is_one:
            assert isinstance(step.stage, LinearStage)
            self._sums[s] = torch.empty_like(state.rows[s][: self._exchange.plan.num_core])
            self._grads[s] = (
                torch.zeros_like(state.rows[s][: self._exchange.plan.num_core]) if step.stage.takes_own else None
            )
        for name in step.stage.joins:
            mark = state.marks[name]
            if state.needs[mark] and (mark, s) not in self._marked:
                self._marked[mark, s] = torch.zeros_like(state.rows[mark][: self._exchange.plan.num_core])

    def _compute(self, s: int, b: int) -> None:
        state, step = self._state, self._steps[s]
        here = step.bins[b]
        if step.stage.norm is not None:
            self._compute_norm(s, b)
            return
        grad = None if state.mover is not None else self._grad_of(s, b)
        kept, brought = state.take_kept(s, b)
        grad = brought if grad is None else grad
        assert grad is not None
        found = self._grads_of(s, b, kept, grad)
        if state.mover is None:
            self._add(s, here, found)
            return
        loads, held, scale = kept.loads, (kept.inputs, kept.own, kept.joined), kept.dst_scale
        del kept, grad, brought
        if step.passes is not None and found[0] is not None:
            step.passes.push(state.mover, (s, b), found[0], scale, lambda src, grad: self._add_grad(s, src, grad))
            found[0] = None
        self._return(s, b, found, loads, held)

    def _compute_norm(self, s: int, b: int) -> None:
        """A bin of a normalisation."""
        state = self._state
        grad = self._grad_of(s, b).to(state.ground.device) if state.mover is None else None
        (*brought, x), loads = state.taken(s, b)
        into = state.norms[s].backward(x, brought[0] if grad is None else grad) if state.needs[s] else None
        if state.mover is None:
            self._add(s, self._steps[s].bins[b], [into, None])
        else:
            self._return(s, b, [into, None], loads)

    def _return(self, s: int, b: int, found: Sequence[Tensor | None], loads: Sequence[Load], *held: Any) -> None:
        """What a bin says of its inputs, to where rows live."""
        assert self._state.mover is not None
        is_there, here = [each is not None for each in found], self._steps[s].bins[b]

        def arrived(came: Sequence[Tensor]) -> None:
            left = iter(came)
            self._add(s, here, [next(left) if there else None for there in is_there])
            self._done(s, b)

        self._state.mover.send_back([each for each in found if each is not None], arrived, loads, *held)

    def _grads_of(self, s: int, b: int, kept: Kept, grad: Tensor) -> list[Tensor | None]:
        """Of a bin's inputs (or sums), its nodes' own rows and marks; those of parameters are noted."""
        leaves = [t for t in (kept.inputs, kept.own, *kept.joined) if t is not None and t.requires_grad]
        sources = [*leaves, *self._state.parameters[s]]
        grads: Sequence[Tensor | None] = [None] * len(sources)
        if kept.out.requires_grad:
            grad = grad.to(kept.out.device, kept.out.dtype)
            with unhooked(self._state.parameters[s]):
                grads = torch.autograd.grad(kept.out, sources, grad, allow_unused=True)
        by_leaf = {id(leaf): found for leaf, found in zip(leaves, grads[: len(leaves)], strict=True)}
        if self._is_free(s):
            self._of_parameters.put(s, b, grads[len(leaves) :])
        else:
            self._of_parameters.add(s, grads[len(leaves) :])
        return [by_leaf.get(id(leaf)) for leaf in (kept.inputs, kept.own, *kept.joined)]

    def _add(self, s: int, here: Bin, found: Sequence[Tensor | None]) -> None:
        """What a bin says of its inputs (or sums), of its nodes' own rows where they are given apart, and of marks."""
        step, (of_inputs, of_own, *of_joined) = self._steps[s], found
        if step.view is not None:
            self._put_sums(s, here, of_inputs, of_own)
        elif step.passes is not None:
            self._add_grad(s, slice(here.first, here.end), of_own)
        elif here.csc is not None:
            self._add_grad(s, slice(None) if here.src is None else here.src, of_inputs)
        else:
            self._add_grad(s, slice(here.first, here.end), of_inputs)
        for name, grad in zip(step.stage.joins, of_joined, strict=True):
            self._add_marked(self._state.marks[name], s, slice(here.first, here.end), grad)

    def _put_sums(self, s: int, here: Bin, of_sums: Tensor | None, of_own: Tensor | None) -> None:
        """The gradient of a bin's sums, for who pulls it, and of its nodes' own rows, which go no other way."""
        if of_sums is None:
            return
        into = self._sums[s]
        if into is None:
            self._sums[s] = of_sums.contiguous()
        else:
            into[here.first : here.end] = of_sums
        if of_own is not None and into is None:
            self._grads[s] = of_own
        elif of_own is not None:
            self._grads[s][here.first : here.end] = of_own  # type: ignore[index]

    def _add_grad(self, s: int, where: Tensor | slice, grad: Tensor | None) -> None:
        """Adds the gradient of a bin's inputs to that of all rows; the rows of one bin are different ones."""
        if grad is None:
            return
        rows, into = self._state.rows[s], self._grads[s]
        grad = grad.to(rows.device)
        if into is None:
            self._grads[s] = grad  # of the one bin that has all rows
        elif isinstance(where, slice):
            into[where] += grad
        else:
            into.index_add_(0, where, grad)

    def _add_marked(self, mark: int, s: int, where: slice, grad: Tensor | None) -> None:
        """Several steps may look back to one mark, in any order: each has a sum of its own."""
        if grad is not None:
            into = self._marked[mark, s]
            into[where] += grad.to(into.device)

    def _take_grad(self, s: int, first: int, end: int, number: int) -> Tensor:
        """The gradient of rows first to end of step s's input: from its own bins, from joins, then from the peers."""
        found, sums = self._grads[s], self._sums[s]
        if sums is not None:
            view = self._steps[s].view
            assert view is not None
            own = None if found is None else found[first:end]  # of these rows, which nobody asks for again
            if own is not None and (not own.is_contiguous() or _share_memory(own, sums)):
                own = own.clone(memory_format=torch.contiguous_format)  # autograd gives one gradient to both, or a view
            grad, is_own = view.pull(sums, first, end, own), True
        else:
            grad = torch.zeros_like(self._state.rows[s][first:end]) if found is None else found[first:end]
            is_own = found is None
        for key in sorted(self._marked):
            if key[0] == s:
                grad, is_own = grad + self._marked[key][first:end], True
        if self._exchange.has_grads(s, number):
            grad = grad if is_own else grad.clone()
            self._exchange.add_grads(s, number, grad)
        return grad

    # -- what travels --------------------------------------------------------------------------------------------------

    def _send(self, s: int, b: int) -> None:
        """Sends the gradients of chunks that no other bin will add to, or all when the layer is done."""
        done = []
        for chunk in self._steps[s].needs[b][1]:
            self._chunks_left[s, chunk] -= 1
            if self._chunks_left[s, chunk] == 0:
                done.append(chunk)
        if not self._schedule.intra_layer:
            done = list(range(len(self._steps[s].chunks))) if self._left[s] == 0 else []
        for chunk in done:
            self._exchange.send_grad(s, chunk, self._halo_grad(s, self._steps[s].chunks[chunk]))
        if self._left[s] == 0 and not (self._schedule.intra_layer or self._schedule.inter_layer):
            self._exchange.flush()

    def _halo_grad(self, s: int, chunk: Chunk) -> Tensor:
        """The gradient of rows that came from elsewhere, complete for this rank."""
        num_core, grad, sums = self._exchange.plan.num_core, self._grads[s], self._sums[s]
        first, end = num_core + chunk.first, num_core + chunk.end
        if sums is not None:
            view = self._steps[s].view
            assert view is not None
            return view.pull(sums, first, end)
        return torch.zeros_like(self._state.rows[s][first:end]) if grad is None else grad[first:end]

    def _reduce_done(self) -> None:
        """Begins the sum over ranks of the gradients of layers that are done here."""
        while self._unreduced >= self._first and self._left[self._unreduced] == 0:
            self._of_parameters.begin(self._unreduced)
            self._state.times.reduced(self._unreduced)
            self._unreduced -= 1


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
