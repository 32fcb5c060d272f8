"""The way back: bins in reverse, gradients of the halo to their owners, parameters' gradients summed over the ranks.

Bins that others wait for run first, then the latest layer's. Nothing depends on that order: a step whose bins add to
the same rows runs them in the reverse order of their places, whatever arrives first; what bins say of parameters is
added in the bins' order, and what peers say of rows in the peers'. So sums are the same on every run. A layer's
parameters are summed over the ranks as soon as its bins are done here, the last layer first on every rank. Where bins
move, gradients come back, and are added, in the order in which bins ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnsys.fullgraph.offload.mover import BroughtInputs
from gnnsys.fullgraph.plan.bins import Bin, Chunk
from gnnsys.fullgraph.plan.stage_halves import SumStage
from gnnsys.fullgraph.run.bin_scheduler import BinScheduler
from gnnsys.fullgraph.run.halo_exchange import Exchange
from gnnsys.fullgraph.run.parameter_grads import ParameterGrads, unhooked
from gnnsys.fullgraph.run.pass_state import KeptBin, Pass, needed_before

_MAX_FREE = 64  # bins of a step that may run in any order: what they say of parameters is kept apart


class Backward:
    """Takes the gradient of a pass's result; `run` gives that of the input and those of the parameters."""

    is_back = True

    def __init__(self, state: Pass, exchange: Exchange) -> None:
        self._state, self._exchange = state, exchange
        self._steps, self._schedule = state.plan.steps, state.plan.schedule
        self._first = needed_before(state.needs, len(self._steps))  # the steps before it have nothing to learn
        self._bins = BinScheduler(state, exchange, self._first)
        self._grads: list[Tensor | None] = [None] * (len(self._steps) + 1)  # of each step's input
        self._sums: list[Tensor | None] = [None] * (len(self._steps) + 1)  # of a step in halves: of its nodes' sums
        self._marked: dict[tuple[int, int], Tensor] = {}  # (step that was marked, step that joins): its gradient
        self._of_parameters = ParameterGrads(state.parameters, exchange.peers)
        self._unreduced = len(self._steps) - 1
        self._bins_left: dict[Chunk, int] = {}  # how many bins will add to a chunk's gradient
        self._num_parts: dict[Bin, int] = {}  # in which the gradient of a bin's rows was brought
        self._of_norms: dict[int, Tensor] = {}  # by step: the whole gradient of a normalisation's rows

    def run(self, grad: Tensor) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Gradients of the input's core rows (None where nobody asked), and by id those of parameters, of all ranks."""
        peers, state = self._exchange.peers, self._state
        state.begin_back()
        sent_before = sum(peers.bytes_sent)
        self._grads[-1] = grad.contiguous()
        self._await()
        self._reduce_done()
        with state.moving():
            self._bins.run(self)
        x_grad = self._take_grad(self._steps[0].before[0]) if state.needs[0] else None
        began = time.perf_counter()
        found = self._of_parameters.wait()
        state.times.waited(began)
        self._exchange.flush()
        state.times.num_bytes += sum(peers.bytes_sent) - sent_before
        return x_grad, found

    # -- when ----------------------------------------------------------------------------------------------------------

    def order(self, here: Bin) -> tuple[int, ...]:
        """Bins that others wait for first, then those of the latest step."""
        is_awaited = self._returns_grads(here.step) and len(self._steps[here.step].needs[here.number][1]) > 0
        return 0 if is_awaited else 1, -here.step, -here.number

    def receive(self, token: Any) -> Iterable[Bin]:
        return self._waiting_for(self._exchange.take_grad(token))

    def _await(self) -> None:
        """Notes what bins wait for, and asks for what peers will say of their rows."""
        for s in range(len(self._steps) - 1, -1, -1):
            step = self._steps[s]
            for _, chunks in step.needs:
                for chunk in chunks:
                    self._bins_left[chunk] = self._bins_left.get(chunk, 0) + 1
            if s > self._first:
                for here in step.bins:
                    self._bins.wait(self._opens(here))
            if self._returns_grads(s):
                asked = self._exchange.expect_grads(s)
                self._bins.expect(len(asked))
                for before in asked:
                    self._bins.wait(self._waiting_for(before))
            if s >= self._first and not self._is_free(s):
                self._bins.in_turn(step.bins[::-1])

    def _is_free(self, s: int) -> bool:
        """Whether a step's bins write rows of their own alone, so that any order gives the same.

        Not where bins move: on the device there is room for one sum of what they say of parameters.
        """
        step = self._steps[s]
        return (
            self._state.mover is None
            and (step.neighbor_sums is not None or step.stage.conv is None)
            and len(step.bins) <= _MAX_FREE
        )

    def _opens(self, here: Bin) -> Sequence[Bin]:
        """The bins of the step before that wait for this one."""
        step = self._steps[here.step]
        return step.needs[here.number][0] if self._passes_on(here.step) else step.before

    def _waiting_for(self, before: Bin) -> Sequence[Bin]:
        """The bins that wait for what peers say of this one's rows."""
        if before.step < 0:
            return ()
        return [before] if self._passes_on(before.step + 1) else self._steps[before.step].bins

    def _passes_on(self, s: int) -> bool:
        """Whether bins of the step before wait for their own rows' gradients alone; those of a normalisation do not.

        Nor do those of a step in sweeps, whose sums take what bins of others would, or those behind whose bins
        gradients of sums stay until all have pulled from them.
        """
        before = self._steps[s - 1]
        is_beside_sums = before.source_sweeps is not None or self._stays(s + 1)
        return self._schedule.inter_layer and before.stage.norm is None and not is_beside_sums

    def _stays(self, s: int) -> bool:
        """Whether gradients of a step's sums stay on the device, for bins of the step before to pull from.

        Not where the first step will need room for sums of features, which count differently in every pass.
        """
        sweeps = self._steps[s].source_sweeps if s < len(self._steps) else None
        return sweeps is not None and sweeps.stays and self._state.needs[s] and not (s == 1 and 0 in self._state.scales)

    def _returns_grads(self, s: int) -> bool:
        """Whether gradients of a step's halo go back to their owners."""
        return s >= self._first and self._state.needs[s] and self._steps[s].has_halo

    # -- what ----------------------------------------------------------------------------------------------------------

    def bring(self, here: Bin) -> None:
        if self._state.mover is not None:
            is_norm = self._steps[here.step].stage.norm is not None
            parts = [self._grad_of(here)] if is_norm else self._grad_parts(here)
            self._num_parts[here] = len(parts)
            self._state.load(here, parts)

    def compute(self, here: Bin, done: Callable[[], None]) -> None:
        self._make_room(here.step)
        self._compute(here, done)

    def done(self, here: Bin) -> Iterable[Bin]:
        """What a bin says of its inputs is added where that is kept."""
        s = here.step
        if self._bins.num_left[s] == 0:
            self._of_norms.pop(s, None)
            self._state.device_sums.pop(s + 1, None)
        if self._returns_grads(s):
            self._send(here)
        self._reduce_done()
        return self._opens(here) if s > self._first else ()

    def _grad_of(self, here: Bin) -> Tensor:
        """The gradient of what a bin made, which is complete."""
        s = here.step
        if self._steps[s].stage.norm is None:
            return self._take_grad(here)
        if s not in self._of_norms:
            self._begin_norm(s)
        return self._of_norms[s][here.nodes]

    def _begin_norm(self, s: int) -> None:
        """Sums of a normalisation's gradients, which are all there, before any of its bins runs."""
        if self._state.mover is not None:  # a rank without nodes may be here while a later step's parameters are due
            self._state.mover.finish()
        bins, rows = self._steps[s].bins, self._state.core(s)
        if len(bins) == 1:
            whole = self._take_grad(bins[0])
        else:
            whole = torch.empty_like(rows)
            for here in bins:
                whole[here.nodes] = self._take_grad(here)
        self._of_norms[s] = whole
        trained = self._state.parameters[s]
        found = self._state.norms[s].begin_back(rows, whole, self._steps[s].bounds, trained)
        self._of_parameters.add(s, found)

    def _make_room(self, s: int) -> None:
        """For the gradients of a step's input, unless its one bin's will be all of them."""
        state, step = self._state, self._steps[s]
        if step.stage.norm is not None and s not in self._of_norms:
            self._begin_norm(s)
        if state.mover is not None:
            self._make_host_room(s)
            return
        is_one = len(step.bins) == 1
        if state.needs[s] and step.neighbor_sums is None and self._grads[s] is None and not is_one:
            self._grads[s] = torch.zeros_like(state.rows[s])
        if step.neighbor_sums is not None and state.needs[s] and self._sums[s] is None and not is_one:
            assert isinstance(step.stage, SumStage)
            self._sums[s] = torch.empty_like(state.core(s))
            self._grads[s] = torch.zeros_like(state.core(s)) if step.stage.takes_own else None
        for name in step.stage.joins:
            mark = state.marks[name]
            if state.needs[mark] and (mark, s) not in self._marked:
                self._marked[mark, s] = torch.zeros_like(state.core(mark))

    def _make_host_room(self, s: int) -> None:
        """The same where bins move. What is written once, and not added to, holds anything before."""
        state, step = self._state, self._steps[s]
        rows, sweeps = state.rows[s], step.source_sweeps
        is_asked = (
            sweeps is None or self._takes_own(s) or not self._stays(s) or len(rows) > self._exchange.plan.num_core
        )
        if state.needs[s] and self._grads[s] is None and is_asked:
            self._grads[s] = state.host_rows(tuple(rows.shape), rows.dtype, rows.device)
            if step.stage.conv is not None and (sweeps is None or len(sweeps.groups) > 1):
                self._grads[s].zero_()  # type: ignore[union-attr]
        for name in step.stage.joins:
            mark = state.marks[name]
            if state.needs[mark] and (mark, s) not in self._marked:
                core = state.core(mark)
                self._marked[mark, s] = state.host_rows(tuple(core.shape), core.dtype, core.device)

    def _takes_own(self, s: int) -> bool:
        """Whether bins of a step in halves say something of their nodes' own rows."""
        stage = self._steps[s].stage
        return isinstance(stage, SumStage) and stage.takes_own

    def _compute(self, here: Bin, done: Callable[[], None]) -> None:
        state, step = self._state, self._steps[here.step]
        if step.stage.norm is not None:
            self._compute_norm(here, done)
            return
        if state.mover is None:
            grad = self._grad_of(here)
            kept, _ = state.take_kept(here)
            self._add(here, self._grads_of(here, kept, grad))
            return
        kept, parts = state.take_kept(here, self._num_parts.pop(here))
        found = self._grads_of(here, kept, self._whole_grad(here, parts))
        loads, held, scale = kept.loads, (kept.inputs, kept.own, kept.joined), kept.dst_scale
        del kept, parts
        if step.source_sweeps is not None:
            self._return_swept(here, found, done, loads, held)
            return
        if step.piecewise_sums is not None and found[0] is not None:
            step.piecewise_sums.push(
                state.mover, here, found[0], scale, lambda src, grad: self._add_grad(here.step, src, grad)
            )
            found[0] = None
        self._return(here, found, done, loads, held)

    def _whole_grad(self, here: Bin, parts: Sequence[Tensor]) -> Tensor:
        """The gradient of a bin's rows on the device, of parts that were brought and of sums that stayed there."""
        s, state = here.step + 1, self._state
        assert state.mover is not None
        if parts:
            grad = parts[0]
        else:
            shape = (len(here), state.rows[s].shape[1])
            grad = torch.zeros(shape, dtype=state.rows[s].dtype, device=state.plan.device)
        for part in parts[1:]:
            grad.add_(part)
        if self._stays(s):
            sweeps = self._steps[s].source_sweeps
            assert sweeps is not None
            sweeps.pull(state.mover, state.device_sums[s], here.first, here.end, grad)
        return grad

    def _return_swept(
        self, here: Bin, found: list[Tensor | None], done: Callable[[], None], loads: Sequence[BroughtInputs], held: Any
    ) -> None:
        """The gradient of a bin's sums takes their place; that of rows follows when the group's are all there."""
        state, s = self._state, here.step
        assert state.mover is not None
        if state.needs[s]:
            sums = state.sums_of(here).of(here.first, here.end)
            if found[0] is None:
                sums.zero_()
            else:
                sums.copy_(found[0])
        found[0] = None
        if not state.leave_sums(here):
            self._return(here, found, done, loads, held)
            return
        self._return(here, found, lambda: None, loads, held)
        if state.needs[s]:
            self._settle(s)
        if not self._stays(s):
            state.device_sums.pop(s)
        state.mover.send_back([], lambda _: done(), [])

    def _settle(self, s: int) -> None:
        """Brings gradients of a step's input down, from those of a group's sums; where they stay, of the halo alone."""
        state, sweeps, num_core = self._state, self._steps[s].source_sweeps, self._exchange.plan.num_core
        assert sweeps is not None and state.mover is not None
        grads, first = self._grads[s], num_core if self._stays(s) else 0
        if grads is not None and len(grads) > first:
            state.mover.finish()  # what bins said of their own rows is there
            sweeps.settle(state.mover, state.device_sums[s], grads, first, self._takes_own(s))

    def _compute_norm(self, here: Bin, done: Callable[[], None]) -> None:
        """A bin of a normalisation."""
        state, s = self._state, here.step
        grad = self._grad_of(here).to(state.plan.device) if state.mover is None else None
        (*brought, x), loads = state.taken(here)
        into = state.norms[s].backward(x, brought[0] if grad is None else grad) if state.needs[s] else None
        if state.mover is None:
            self._add(here, [into, None])
        else:
            self._return(here, [into, None], done, loads)

    def _return(
        self,
        here: Bin,
        found: Sequence[Tensor | None],
        done: Callable[[], None],
        loads: Sequence[BroughtInputs],
        *held: Any,
    ) -> None:
        """What a bin says of its inputs, to where rows live: what it alone says is written, the rest is added."""
        assert self._state.mover is not None
        places = self._places(here)
        for each, place in zip(found, places, strict=True):
            if each is None and place is not None:
                place.zero_()
        is_there = [each is not None for each in found]

        def arrived(came: Sequence[Tensor]) -> None:
            left = iter(came)
            got = [next(left) if there else None for there in is_there]
            self._add(here, [each if place is None else None for each, place in zip(got, places, strict=True)])
            done()

        into = [place for place, there in zip(places, is_there, strict=True) if there]
        self._state.mover.send_back([each for each in found if each is not None], arrived, loads, *held, into=into)

    def _places(self, here: Bin) -> list[Tensor | None]:
        """Where what a bin says of its inputs, own rows and marks belongs, None where it is added to others'."""
        s, step, grads = here.step, self._steps[here.step], self._grads[here.step]
        own = None if grads is None else grads[here.nodes]
        marked = [self._marked.get((self._state.marks[name], s)) for name in step.stage.joins]
        is_alone, sweeps = step.stage.conv is None, step.source_sweeps
        return [
            own if is_alone else None,
            own if self._takes_own(s) and sweeps is not None and len(sweeps.groups) == 1 else None,
            *(None if each is None else each[here.nodes] for each in marked),
        ]

    def _grads_of(self, here: Bin, kept: KeptBin, grad: Tensor) -> list[Tensor | None]:
        """Of a bin's inputs (or sums), its nodes' own rows and marks; those of parameters are noted."""
        s = here.step
        leaves = [t for t in (kept.inputs, kept.own, *kept.joined) if t is not None and t.requires_grad]
        sources = [*leaves, *self._state.parameters[s]]
        grads: Sequence[Tensor | None] = [None] * len(sources)
        if kept.out.requires_grad:
            grad = grad.to(kept.out.device, kept.out.dtype)
            with unhooked(self._state.parameters[s]):
                grads = torch.autograd.grad(kept.out, sources, grad, allow_unused=True)
        by_leaf = {id(leaf): found for leaf, found in zip(leaves, grads[: len(leaves)], strict=True)}
        if self._is_free(s):
            self._of_parameters.put(here, grads[len(leaves) :])
        else:
            self._of_parameters.add(s, grads[len(leaves) :])
        return [by_leaf.get(id(leaf)) for leaf in (kept.inputs, kept.own, *kept.joined)]

    def _add(self, here: Bin, found: Sequence[Tensor | None]) -> None:
        """What a bin says of its inputs (or sums), of its nodes' own rows where they are given apart, and of marks."""
        s, step, (of_inputs, of_own, *of_joined) = here.step, self._steps[here.step], found
        if step.neighbor_sums is not None:
            self._put_sums(here, of_inputs, of_own)
        elif step.piecewise_sums is not None or step.source_sweeps is not None:
            self._add_grad(s, here.nodes, of_own)
        elif here.csc is not None:
            self._add_grad(s, slice(None) if here.src is None else here.src, of_inputs)
        else:
            self._add_grad(s, here.nodes, of_inputs)
        for name, grad in zip(step.stage.joins, of_joined, strict=True):
            self._add_marked(self._state.marks[name], here, grad)

    def _put_sums(self, here: Bin, of_sums: Tensor | None, of_own: Tensor | None) -> None:
        """The gradient of a bin's sums, for who pulls it, and of its nodes' own rows, which go no other way."""
        if of_sums is None:
            return
        s = here.step
        into = self._sums[s]
        if into is None:
            self._sums[s] = of_sums.contiguous()
        else:
            into[here.nodes] = of_sums
        if of_own is not None and into is None:
            self._grads[s] = of_own
        elif of_own is not None:
            self._grads[s][here.nodes] = of_own  # type: ignore[index]

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

    def _add_marked(self, mark: int, here: Bin, grad: Tensor | None) -> None:
        """Several steps may look back to one mark, in any order: each has a sum of its own."""
        if grad is not None:
            into = self._marked[mark, here.step]
            into[here.nodes] += grad.to(into.device)

    def _take_grad(self, here: Bin) -> Tensor:
        """The gradient of a bin's rows: from the next step's bins, from joins, then from the peers."""
        s, first, end = here.step + 1, here.first, here.end
        found, sums = self._grads[s], self._sums[s]
        if sums is not None:
            view = self._steps[s].neighbor_sums
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
        if self._exchange.has_grads(here):
            grad = grad if is_own else grad.clone()
            self._exchange.add_grads(here, grad)
        return grad

    def _grad_parts(self, here: Bin) -> list[Tensor]:
        """The same where bins move, in parts that are added on the device in this order; where gradients of the next
        step's sums stay there, what those say comes last, and there may be no part."""
        s, nodes, found = here.step + 1, here.nodes, self._grads[here.step + 1]
        parts = [] if found is None or (self._stays(s) and not self._takes_own(s)) else [found[nodes]]
        parts += [self._marked[key][nodes] for key in sorted(self._marked) if key[0] == s]
        if self._exchange.has_grads(here):
            grad = parts[0].clone() if parts else torch.zeros_like(self._state.rows[s][nodes])
            for part in parts[1:]:
                grad += part
            self._exchange.add_grads(here, grad)
            return [grad]
        return parts if parts or self._stays(s) else [torch.zeros_like(self._state.rows[s][nodes])]

    # -- what travels --------------------------------------------------------------------------------------------------

    def _send(self, here: Bin) -> None:
        """Sends the gradients of chunks that no other bin will add to, or all when the layer is done."""
        step, is_last, due = self._steps[here.step], self._bins.num_left[here.step] == 0, []
        for chunk in step.needs[here.number][1]:
            self._bins_left[chunk] -= 1
            if self._bins_left[chunk] == 0:
                due.append(chunk)
        if not self._schedule.intra_layer:
            due = step.chunks if is_last else []
        for chunk in due:
            self._exchange.send_grad(chunk, self._halo_grad(chunk))
        if is_last and not (self._schedule.intra_layer or self._schedule.inter_layer):
            self._exchange.flush()

    def _halo_grad(self, chunk: Chunk) -> Tensor:
        """The gradient of rows that came from elsewhere, complete for this rank."""
        s, num_core = chunk.step, self._exchange.plan.num_core
        grad, sums = self._grads[s], self._sums[s]
        first, end = num_core + chunk.first, num_core + chunk.end
        if sums is not None:
            view = self._steps[s].neighbor_sums
            assert view is not None
            return view.pull(sums, first, end)
        return torch.zeros_like(self._state.rows[s][first:end]) if grad is None else grad[first:end]

    def _reduce_done(self) -> None:
        """Begins the sum over ranks of the gradients of layers that are done here."""
        while self._unreduced >= self._first and self._bins.num_left[self._unreduced] == 0:
            self._of_parameters.begin(self._unreduced)
            self._state.times.reduced(self._unreduced)
            self._unreduced -= 1


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
