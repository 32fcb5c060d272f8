"""What travels in a pass: rows of a layer to those who need them, gradients of what came back to the owners.

Rows arrive in the halo itself; gradients of rows that went to several ranks wait until their bin is due, and are added
in the order of the ranks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Peers
from gnnsys.fullgraph.plan.step_plan import MAX_BINS
from gnnsys.fullgraph.run.pass_state import Pass
from gnnsys.ops import gather_rows

_BACK = 1 << 8  # tags: layers of the way back follow those of the way there
NUM_TAGS = 2 * _BACK * MAX_BINS


class Exchange:
    """The exact exchange of one pass: all rows, of this pass.

    `peers` and `first_tag` are for an exchange whose messages must not meet those of others.
    """

    def __init__(self, state: Pass, peers: Peers | None = None, first_tag: int = 0) -> None:
        self.state, self.plan, self.peers = state, state.ground.plan, peers or state.ground.peers
        self._first_tag = first_tag
        self._grads: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}  # (step, bin before it): by peer

    def begin(self) -> None:
        """The pass begins: there is room for its rows."""

    def expect_rows(self, s: int) -> list[int]:
        """Asks for the halo of step s's input: the chunks that will come."""
        step, rows, num_core = self.state.ground.steps[s], self.state.rows[s], self.plan.num_core
        dtype = self._travels_as(rows)
        for number, chunk in enumerate(step.chunks):
            place = rows[num_core + chunk.first : num_core + chunk.end]
            is_direct = rows.device.type == "cpu" and dtype == rows.dtype
            buffer = place if is_direct else torch.empty(place.shape, dtype=dtype, device="cpu")
            token = (s, number, None if is_direct else buffer)
            self.peers.expect(chunk.peer, self._tag(s, chunk.number), buffer, token)
        return list(range(len(step.chunks)))

    def take_rows(self, token: Any) -> tuple[int, int]:
        """What a message of rows was: a step and a chunk of its input, now in its place."""
        s, number, buffer = token
        if buffer is not None:
            chunk, num_core = self.state.ground.steps[s].chunks[number], self.plan.num_core
            self.state.rows[s][num_core + chunk.first : num_core + chunk.end] = buffer.to(self.state.rows[s].device)
        return s, number

    def send_rows(self, s: int, number: int) -> None:
        """Sends what others need of a bin; its rows are among the input of step s."""
        began = time.perf_counter()
        source, first, num_bytes = self.state.rows[s], self._first_of(s, number), 0
        for peer, rows in self._sent(s, number):
            out = gather_rows(source[first:], rows).to("cpu", self._travels_as(source))
            self.peers.send(peer, self._tag(s, number), out)
            num_bytes += out.nbytes
        if num_bytes:
            self.state.times.sent(began, s, number, num_bytes)

    def expect_grads(self, s: int) -> list[int]:
        """Asks for the gradients of what was sent as step s's input: per message, the bin that it is for."""
        step, source, numbers = self.state.ground.steps[s], self.state.rows[s], []
        for number in range(len(step.sends)):
            self._grads[s, number] = {}
            for peer, rows in self._sent(s, number):
                shape = (rows.numel(), source.shape[1])
                buffer = torch.empty(shape, dtype=self._travels_as(source), device="cpu")
                self.peers.expect(peer, self._tag(s, number, back=True), buffer, (s, number, peer, rows, buffer))
                numbers.append(number)
        return numbers

    def take_grad(self, token: Any) -> tuple[int, int]:
        """What a message of gradients was: a step, and the bin of the step before."""
        s, number, peer, rows, buffer = token
        self._grads[s, number][peer] = (rows, buffer)
        return s, number

    def add_grads(self, s: int, number: int, into: Tensor) -> None:
        """Adds what peers said of a bin's rows, which all has come."""
        for _, (rows, buffer) in sorted(self._grads.pop((s, number), {}).items()):
            into.index_add_(0, rows, buffer.to(device=into.device, dtype=into.dtype))

    def has_grads(self, s: int, number: int) -> bool:
        return bool(self._grads.get((s, number)))

    def send_grad(self, s: int, number: int, grad: Tensor) -> None:
        """Sends the gradient of a chunk of step s's input."""
        began = time.perf_counter()
        chunk, rows = self.state.ground.steps[s].chunks[number], self._returned(s, number, grad)
        if len(rows):
            rows = rows.to("cpu", self._travels_as(grad)).contiguous()
            self.peers.send(chunk.peer, self._tag(s, chunk.number, back=True), rows)
            self.state.times.sent(began, s, number, rows.nbytes)

    def arrival(self, wait: bool) -> Any:
        """The token of a message that has come, None where none has."""
        began = time.perf_counter()
        token = self.peers.next_arrival(wait)
        if wait:
            self.state.times.waited(began)
        return token

    def flush(self) -> None:
        """Returns when all that was sent has left."""
        began = time.perf_counter()
        self.peers.flush()
        self.state.times.waited(began)

    def _travels_as(self, rows: Tensor) -> torch.dtype:
        return rows.dtype if self.state.ground.wire_dtype is None else self.state.ground.wire_dtype

    def _sent(self, s: int, number: int) -> list[tuple[int, Tensor]]:
        """What goes to whom of a bin whose rows are among the input of step s, counted from the bin's first."""
        return self.state.ground.steps[s].sends[number]

    def _first_of(self, s: int, number: int) -> int:
        """The place where that bin begins."""
        return self.state.ground.steps[s - 1].bounds[number] if s else 0

    def _returned(self, s: int, number: int, grad: Tensor) -> Tensor:
        """What goes back of a chunk's gradient, [rows of the chunk, width]."""
        return grad

    def _tag(self, s: int, number: int, back: bool = False) -> int:
        return self._first_tag + (s + _BACK * back) * MAX_BINS + number
