"""One pass over the graph: forward bin by bin, and back in reverse, rows and gradients travelling meanwhile.

Forward, a bin runs when its inputs are there; its result does not depend on when. Backward, the bins of a layer run in
the reverse order of their places, whatever arrives first, and what comes from peers is added in their order: sums are
the same on every run. Bins of different layers interleave in both.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm.peers import Peers
from gnnsys.fullgraph.bins import Bin
from gnnsys.fullgraph.halo import HaloPlan
from gnnsys.fullgraph.layers import Rows
from gnnsys.fullgraph.norm import NormPass
from gnnsys.fullgraph.steps import Schedule, Step
from gnnsys.ops import gather_rows

_MAX_BINS = 1 << 20
_BACK = 1 << 9  # tags: stages of the way back follow those of the way there


@dataclass
class Times:
    """Seconds of one pass by what they were spent on, and payload bytes sent."""

    compute: float = 0.0
    wait: float = 0.0
    send: float = 0.0
    num_bytes: int = 0


@dataclass(eq=False)
class Ground:
    """What all passes of a model share."""

    plan: HaloPlan
    peers: Peers
    schedule: Schedule
    steps: list[Step]
    ids: Tensor  # original ids by place
    wire_dtype: torch.dtype | None
    recompute: bool


@dataclass(eq=False)
class Kept:
    """A bin's inputs and results, still joined by autograd."""

    inputs: Tensor
    joined: list[Tensor]
    out: Tensor


@dataclass(eq=False)
class Run:
    """One pass. `rows[s]` is what step s reads (core, then halo where it has neighbours), `rows[-1]` the result."""

    ground: Ground
    key: int
    wants_grad: bool
    rows: list[Tensor] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    x_grad: bool = False

    def forward(self, x: Tensor, halo_is_here: bool) -> Tensor:
        """`x` has rows for core and halo; those of the halo are filled from the owners unless they are here already."""
        ground, steps = self.ground, self.ground.steps
        sent_before = sum(ground.peers.bytes_sent)
        self.x_grad = self.wants_grad and x.requires_grad
        self.rows = [x.detach()]
        self._kept: dict[tuple[int, int], Kept] = {}
        self._random: dict[tuple[int, int], Any] = {}
        self._norms: dict[int, NormPass] = {}
        self._autocast = _autocast_state(x.device.type)
        self._marks = {name: index for index, step in enumerate(steps) for name in step.stage.keep_as}
        self._needs = _needs_grad(steps, self.x_grad) if self.wants_grad else [False] * (len(steps) + 1)
        for index, step in enumerate(steps):
            is_read = index + 1 < len(steps) and steps[index + 1].has_halo
            num_rows = ground.plan.num_local if is_read else ground.plan.num_core
            whole = len(step.bins) == 1 and len(step.bins[0]) == num_rows  # the bin's result will be all of it
            self.rows.append(x.new_empty((0 if whole else num_rows, step.width), dtype=step.dtype))
        self._forward(halo_is_here)
        self.times.num_bytes += sum(ground.peers.bytes_sent) - sent_before
        return self.rows[-1]

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, halo_is_here: bool) -> None:
        ground, steps = self.ground, self.ground.steps
        peers, schedule = ground.peers, ground.schedule
        missing: list[list[int]] = []
        by_bin: list[dict[int, list[int]]] = []  # of a step: bins that wait for a bin of the step before
        by_chunk: list[dict[int, list[int]]] = []
        for index, step in enumerate(steps):
            arrives = step.chunks and not (index == 0 and halo_is_here)
            local_of, chunks_of = _who_waits(step, schedule.inter_layer)
            missing.append([
                (0 if index == 0 else len(local)) + (len(chunks) if arrives else 0)
                for local, chunks in _openings(step, schedule.inter_layer)
            ])  # fmt: skip
            by_bin.append(local_of)
            by_chunk.append(chunks_of if arrives else {})
            if arrives:
                self._expect_rows(index)
        if not halo_is_here and steps[0].has_halo:
            for number in range(len(steps[0].sends)):
                self._send_rows(0, number)
        ready = [(s, b) for s, counts in enumerate(missing) for b, count in enumerate(counts) if count == 0]
        heapq.heapify(ready)
        left = [len(step.bins) for step in steps]
        num_left = sum(left)
        while num_left:
            token = self._arrival(wait=not ready)
            if token is not None:
                step_index, chunk, buffer = token
                self._take_rows(step_index, chunk, buffer)
                for b in by_chunk[step_index].get(chunk, ()):
                    missing[step_index][b] -= 1
                    if missing[step_index][b] == 0:
                        heapq.heappush(ready, (step_index, b))
                continue
            s, b = heapq.heappop(ready)
            began = time.perf_counter()
            self._compute(s, b)
            self.times.compute += time.perf_counter() - began
            num_left -= 1
            left[s] -= 1
            if s + 1 == len(steps):
                continue
            if schedule.intra_layer:
                self._send_rows(s + 1, b)
            elif left[s] == 0:
                for number in range(len(steps[s].bins)):
                    self._send_rows(s + 1, number)
                if not schedule.inter_layer:
                    self._flush()
            for b_next in by_bin[s + 1].get(b, ()):
                missing[s + 1][b_next] -= 1
                if missing[s + 1][b_next] == 0:
                    heapq.heappush(ready, (s + 1, b_next))
        # An empty rank has nothing to compute, and its halo is empty: nothing is outstanding.

    def _compute(self, s: int, b: int) -> None:
        step, rows = self.ground.steps[s], self.rows
        stage, here = step.stage, step.bins[b]
        if stage.norm is not None:
            norm = self._norms[s] = NormPass(stage.norm, self.ground.peers)
            out = norm.forward(rows[s][: self.ground.plan.num_core])
            self._put(s + 1, here, out)
            return
        if self._needs[s + 1] and not self.ground.recompute:
            kept = self._kept[s, b] = self._evaluate(s, b)
            out = kept.out.detach()
        else:
            if self._needs[s + 1]:
                self._random[s, b] = _random_state(rows[s].device)
            with torch.no_grad():
                out = self._evaluate(s, b).out
        self._put(s + 1, here, out)

    def _put(self, s: int, here: Bin, out: Tensor) -> None:
        """The rows of a bin among the inputs of step s, which they may be all of."""
        if len(self.rows[s]):
            self.rows[s][here.first : here.end] = out
        else:
            self.rows[s] = out

    def _evaluate(self, s: int, b: int) -> Kept:
        """A bin through its stage, under autograd where that is on."""
        ground = self.ground
        step = ground.steps[s]
        here = step.bins[b]
        inputs = here.inputs(self.rows[s]).detach().requires_grad_(torch.is_grad_enabled() and self._needs[s])
        joined = []
        for name in step.stage.joins:
            mark = self._marks[name]
            row = self.rows[mark][here.first : here.end].detach()
            joined.append(row.requires_grad_(torch.is_grad_enabled() and self._needs[mark]))
        now = Rows(ground.ids[here.first : here.end], self.key)
        with self._autocast():
            return Kept(inputs, joined, step.stage.run(inputs, here.csc, joined, now))

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, grad: Tensor) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Gradients of the input's core rows (None where nobody asked) and, by id, of the parameters, over all ranks."""
        ground, steps = self.ground, self.ground.steps
        sent_before = sum(ground.peers.bytes_sent)
        self._first = self._needs.index(True, 1) - 1 if True in self._needs[1:] else len(steps)
        self._grads: list[Tensor | None] = [None] * len(steps) + [grad.contiguous()]
        self._marked: dict[int, list[Tensor]] = {}  # gradients through joins, by the step whose input was marked
        self._of_parameters = [[torch.zeros_like(p) for p in step.stage.parameters()] for step in steps]
        self._reducing: list[tuple[int, Tensor, Any]] = []
        self._from_peers: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}  # (step, bin before it): by peer
        self._backward()
        x_grad = None
        if self.x_grad:
            x_grad = self._whole_grad(0, 0, ground.plan.num_core, 0)
        found: dict[int, Tensor] = {}
        for index, flat, work in self._reducing:
            began = time.perf_counter()
            work.wait()
            self.times.wait += time.perf_counter() - began
            at = 0
            for p in steps[index].stage.parameters():
                part = flat[at : at + p.numel()].view_as(p).to(p.device, p.dtype)
                found[id(p)] = found[id(p)] + part if id(p) in found else part
                at += p.numel()
        self._flush()
        self.times.num_bytes += sum(ground.peers.bytes_sent) - sent_before
        self._kept.clear()
        return x_grad, found

    def _backward(self) -> None:
        ground, steps, schedule = self.ground, self.ground.steps, self.ground.schedule
        last = len(steps) - 1
        missing = [[0] * len(step.bins) for step in steps]
        openings: list[dict[int, list[int]]] = []  # of step s: bins of the step before that wait for a bin of it
        chunk_left: list[list[int]] = []
        num_arrivals = 0
        for s, step in enumerate(steps):
            opens: dict[int, list[int]] = {}
            uses = [0] * len(step.chunks)
            for b, (_, chunks) in enumerate(step.needs):
                for chunk in chunks:
                    uses[chunk] += 1
            chunk_left.append(uses)
            openings.append(opens)
            if s == 0 or s <= self._first:
                continue
            for b, (local, _) in enumerate(step.needs):
                before = local if schedule.inter_layer else range(len(steps[s - 1].bins))
                for number in before:
                    opens.setdefault(b, []).append(number)
                    missing[s - 1][number] += 1
        for s in range(last, -1, -1):
            if self._returns_grads(s):
                num_arrivals += self._expect_grads(s, missing, schedule.inter_layer)
        waiting = [list(reversed(range(len(step.bins)))) if s >= self._first else [] for s, step in enumerate(steps)]
        left = [len(each) for each in waiting]
        self._unreduced = last
        self._reduce_done(left)
        while sum(left) or num_arrivals:
            task = next(
                ((s, each[0]) for s, each in reversed(list(enumerate(waiting))) if each and missing[s][each[0]] == 0),
                None,
            )
            token = self._arrival(wait=task is None) if num_arrivals else None
            if token is not None:
                num_arrivals -= 1
                s, number, peer, buffer = token
                self._from_peers[s, number][peer] = buffer
                if s > 0:
                    for at in [number] if schedule.inter_layer else range(len(steps[s - 1].bins)):
                        missing[s - 1][at] -= 1
                continue
            assert task is not None, "the schedule waits for itself"
            s, b = task
            waiting[s].pop(0)
            began = time.perf_counter()
            self._compute_back(s, b)
            self.times.compute += time.perf_counter() - began
            left[s] -= 1
            for number in openings[s].get(b, ()):
                missing[s - 1][number] -= 1
            if self._returns_grads(s):
                for chunk in steps[s].needs[b][1]:
                    chunk_left[s][chunk] -= 1
                    if schedule.intra_layer and chunk_left[s][chunk] == 0:
                        self._send_grad(s, chunk)
                if not schedule.intra_layer and left[s] == 0:
                    for chunk in range(len(steps[s].chunks)):
                        self._send_grad(s, chunk)
                    if not schedule.inter_layer:
                        self._flush()
            self._reduce_done(left)

    def _returns_grads(self, s: int) -> bool:
        """Whether gradients of a step's halo go back to their owners."""
        return s >= self._first and self._needs[s] and self.ground.steps[s].has_halo

    def _compute_back(self, s: int, b: int) -> None:
        step = self.ground.steps[s]
        here, parameters = step.bins[b], step.stage.parameters()
        grad = self._whole_grad(s + 1, here.first, here.end, b)
        if step.stage.norm is not None:
            core = self.rows[s][: self.ground.plan.num_core]
            grad_in, of_parameters = self._norms.pop(s).backward(core, grad)
            if self._needs[s]:
                self._grads[s] = grad_in
            for into, each in zip(self._of_parameters[s], of_parameters):
                into += each
            return
        if self.ground.recompute:
            with torch.enable_grad(), _replayed(self._random.pop((s, b))):
                kept = self._evaluate(s, b)
        else:
            kept = self._kept.pop((s, b))
        leaves = [t for t in (kept.inputs, *kept.joined) if t.requires_grad]
        found = torch.autograd.grad(kept.out, [*leaves, *parameters], grad.to(kept.out.dtype), allow_unused=True)
        by_leaf = {id(leaf): g for leaf, g in zip(leaves, found)}
        for into, each in zip(self._of_parameters[s], found[len(leaves) :]):
            if each is not None:
                into += each
        if id(kept.inputs) in by_leaf:
            self._add_grad(
                s, here.src if here.csc is not None else slice(here.first, here.end), by_leaf[id(kept.inputs)]
            )
        for name, leaf in zip(step.stage.joins, kept.joined):
            if by_leaf.get(id(leaf)) is not None:
                self._add_marked(s, name, here.first, here.end, by_leaf[id(leaf)])

    def _add_grad(self, s: int, where: Tensor | slice | None, grad: Tensor | None) -> None:
        """Adds the gradient of a bin's inputs to that of all rows; rows of one bin are different ones."""
        if grad is None:
            return
        if self._grads[s] is None:
            if where is None:
                self._grads[s] = grad
                return
            self._grads[s] = torch.zeros_like(self.rows[s])
        into = self._grads[s]
        assert into is not None
        if where is None:
            into += grad
        elif isinstance(where, slice):
            into[where] += grad
        else:
            into.index_add_(0, where, grad)

    def _add_marked(self, s: int, name: str, first: int, end: int, grad: Tensor) -> None:
        mark = self._marks[name]
        key = (mark << 16) + s  # several steps may look back to one mark: each has its own sum
        if key not in self._marked:
            self._marked[key] = [torch.zeros_like(self.rows[mark][: self.ground.plan.num_core])]
        self._marked[key][0][first:end] += grad

    def _whole_grad(self, s: int, first: int, end: int, number: int) -> Tensor:
        """The gradient of rows first to end of step s's input: from its own bins, from joins, then from the peers."""
        found = self._grads[s]
        grad = torch.zeros_like(self.rows[s][first:end]) if found is None else found[first:end]
        is_own = False
        for key in sorted(self._marked, reverse=True):
            if key >> 16 == s:
                grad, is_own = grad + self._marked[key][0][first:end], True
        for _, (rows, buffer) in sorted(self._from_peers.pop((s, number), {}).items()):
            grad, is_own = (grad if is_own or found is None else grad.clone()), True
            grad.index_add_(0, rows, buffer.to(device=grad.device, dtype=grad.dtype))
        return grad

    def _reduce_done(self, left: list[int]) -> None:
        """Begins the sum over ranks of the gradients of layers that are done here, last to first on every rank."""
        while self._unreduced >= self._first and left[self._unreduced] == 0:
            grads = self._of_parameters[self._unreduced]
            if grads:
                dtype = max((g.dtype for g in grads), key=lambda t: t.itemsize)
                flat = torch.cat([g.reshape(-1).to("cpu", dtype) for g in grads])
                self._reducing.append((self._unreduced, flat, self.ground.peers.all_reduce(flat)))
            self._unreduced -= 1

    # -- what travels --------------------------------------------------------------------------------------------------

    def _travels_as(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.ground.wire_dtype is None else self.ground.wire_dtype

    def _expect_rows(self, s: int) -> None:
        step, rows, num_core = self.ground.steps[s], self.rows[s], self.ground.plan.num_core
        dtype = self._travels_as(rows.dtype)
        for number, chunk in enumerate(step.chunks):
            place = rows[num_core + chunk.first : num_core + chunk.end]
            is_direct = rows.device.type == "cpu" and dtype == rows.dtype
            buffer = place if is_direct else torch.empty(place.shape, dtype=dtype)
            token = (s, number, None if is_direct else buffer)
            self.ground.peers.expect(chunk.peer, s * _MAX_BINS + chunk.number, buffer, token)

    def _take_rows(self, s: int, number: int, buffer: Tensor | None) -> None:
        if buffer is not None:
            chunk, num_core = self.ground.steps[s].chunks[number], self.ground.plan.num_core
            self.rows[s][num_core + chunk.first : num_core + chunk.end] = buffer.to(self.rows[s].device)

    def _send_rows(self, s: int, number: int) -> None:
        """Sends what others need of a bin, from the input of step s."""
        began = time.perf_counter()
        step = self.ground.steps[s]
        first = self.ground.steps[s - 1].bounds[number] if s else 0
        for peer, rows in step.sends[number]:
            out = gather_rows(self.rows[s][first:], rows).to("cpu", self._travels_as(self.rows[s].dtype))
            self.ground.peers.send(peer, s * _MAX_BINS + number, out.contiguous())
        self.times.send += time.perf_counter() - began

    def _expect_grads(self, s: int, missing: list[list[int]], inter_layer: bool) -> int:
        """Asks for the gradients of what was sent as step s's input; the number of messages to come."""
        step, num_messages = self.ground.steps[s], 0
        for number, sent in enumerate(step.sends):
            self._from_peers[s, number] = {}
            for peer, rows in sent:
                buffer = torch.empty((rows.numel(), self.rows[s].shape[1]), dtype=self._travels_as(self.rows[s].dtype))
                tag = (_BACK + s) * _MAX_BINS + number
                self.ground.peers.expect(peer, tag, buffer, (s, number, peer, (rows, buffer)))
                num_messages += 1
                if s > 0:
                    for at in [number] if inter_layer else range(len(self.ground.steps[s - 1].bins)):
                        missing[s - 1][at] += 1
        return num_messages

    def _send_grad(self, s: int, number: int) -> None:
        began = time.perf_counter()
        chunk, num_core = self.ground.steps[s].chunks[number], self.ground.plan.num_core
        grad = self._grads[s]
        if grad is None:
            grad = self._grads[s] = torch.zeros_like(self.rows[s])
        rows = grad[num_core + chunk.first : num_core + chunk.end].to("cpu", self._travels_as(grad.dtype))
        self.ground.peers.send(chunk.peer, (_BACK + s) * _MAX_BINS + chunk.number, rows.contiguous())
        self.times.send += time.perf_counter() - began

    def _arrival(self, wait: bool) -> Any:
        began = time.perf_counter()
        token = self.ground.peers.next_arrival(wait)
        self.times.wait += time.perf_counter() - began
        return token

    def _flush(self) -> None:
        began = time.perf_counter()
        self.ground.peers.flush()
        self.times.wait += time.perf_counter() - began


def _openings(step: Step, inter_layer: bool) -> list[tuple[Sequence[int], Sequence[int]]]:
    """What each bin waits for before it may begin: its own inputs, or all of the layer's."""
    if inter_layer:
        return list(step.needs)
    return [(range(len(step.sends)), range(len(step.chunks)))] * len(step.bins)


def _who_waits(step: Step, inter_layer: bool) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    by_bin: dict[int, list[int]] = {}
    by_chunk: dict[int, list[int]] = {}
    for b, (local, chunks) in enumerate(_openings(step, inter_layer)):
        for number in local:
            by_bin.setdefault(number, []).append(b)
        for chunk in chunks:
            by_chunk.setdefault(chunk, []).append(b)
    return by_bin, by_chunk


def _needs_grad(steps: Sequence[Step], x_grad: bool) -> list[bool]:
    """Whether the input of each step, and the result, depend on something that trains."""
    needs = [x_grad]
    for step in steps:
        needs.append(needs[-1] or bool(step.stage.parameters()))
    return needs


def _autocast_state(device_type: str) -> Any:
    """Makes a context in which autocast is as it is now."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


def _random_state(device: torch.device) -> Any:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _replayed(state: Any) -> Any:
    """Random numbers as they were when a bin ran first."""
    cpu, cuda = state
    with torch.random.fork_rng([torch.cuda.current_device()] if cuda is not None else []):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        yield
