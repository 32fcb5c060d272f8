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
from gnnsys.fullgraph.plan.bins import Bin, Chunk
from gnnsys.fullgraph.plan.step_plan import MAX_BINS
from gnnsys.fullgraph.run.pass_state import Pass
from gnnsys.ops import gather_rows

_BACK = 1 << 8  # tags: layers of the way back follow those of the way there
_HOST = torch.device("cpu")
NUM_TAGS = 2 * _BACK * MAX_BINS


class Exchange:
    """The exact exchange of one pass: all rows, of this pass.

    `peers` and `first_tag` are for an exchange whose messages must not meet those of others.
    """

    def __init__(self, state: Pass, peers: Peers | None = None, first_tag: int = 0) -> None:
        self.state, self.plan, self.peers = state, state.plan.halo, peers or state.plan.peers
        self._steps = state.plan.steps
        self._first_tag = first_tag
        self._grads: dict[Bin, dict[int, tuple[Tensor, Tensor]]] = {}  # of rows that a bin sent: by peer

    def begin(self) -> None:
        """The pass begins: there is room for its rows."""

    def expect_rows(self, s: int) -> list[Chunk]:
        """Asks for the halo of step s's input: the chunks that will come."""
        rows, num_core = self.state.rows[s], self.plan.num_core
        dtype, device = self._travels_as(rows), self._travels_from(rows)
        for chunk in self._steps[s].chunks:
            place = rows[num_core + chunk.first : num_core + chunk.end]
            is_direct = rows.device == device and dtype == rows.dtype
            buffer = place if is_direct else torch.empty(place.shape, dtype=dtype, device=device)
            self.peers.expect(chunk.peer, self._tag(s, chunk.peer_bin), buffer, (chunk, None if is_direct else buffer))
        return self._steps[s].chunks

    def take_rows(self, token: Any) -> Chunk:
        """Which rows a message brought, which are now in their place."""
        chunk, buffer = token
        if buffer is not None:
            rows, num_core = self.state.rows[chunk.step], self.plan.num_core
            rows[num_core + chunk.first : num_core + chunk.end] = buffer.to(rows.device)
        return chunk

    def send_rows(self, here: Bin) -> None:
        """Sends what others need of a bin's rows, which are among the input of the next step."""
        began = time.perf_counter()
        s, num_bytes = here.step + 1, 0
        source = self.state.rows[s]
        for peer, rows in self._sent(here):
            out = gather_rows(source[here.first :], rows).to(self._travels_from(source), self._travels_as(source))
            self.peers.send(peer, self._tag(s, here.number), out)
            num_bytes += out.nbytes
        if num_bytes:
            self.state.times.sent(began, s, here.number, num_bytes)

    def expect_grads(self, s: int) -> list[Bin]:
        """Asks for the gradients of what was sent as step s's input: per message, the bin that it is for."""
        source, asked = self.state.rows[s], []
        for here in self._steps[s].before:
            self._grads[here] = {}
            for peer, rows in self._sent(here):
                shape = (rows.numel(), source.shape[1])
                buffer = torch.empty(shape, dtype=self._travels_as(source), device=self._travels_from(source))
                self.peers.expect(peer, self._tag(s, here.number, back=True), buffer, (here, peer, rows, buffer))
                asked.append(here)
        return asked

    def take_grad(self, token: Any) -> Bin:
        """The bin whose rows a message of gradients is about."""
        here, peer, rows, buffer = token
        self._grads[here][peer] = (rows, buffer)
        return here

    def add_grads(self, here: Bin, into: Tensor) -> None:
        """Adds what peers said of a bin's rows, which all has come."""
        for _, (rows, buffer) in sorted(self._grads.pop(here, {}).items()):
            into.index_add_(0, rows, buffer.to(device=into.device, dtype=into.dtype))

    def has_grads(self, here: Bin) -> bool:
        return bool(self._grads.get(here))

    def send_grad(self, chunk: Chunk, grad: Tensor) -> None:
        """Sends the gradient of a chunk to its owner."""
        began = time.perf_counter()
        rows = self._returned(chunk, grad)
        if len(rows):
            rows = rows.to(self._travels_from(grad), self._travels_as(grad)).contiguous()
            self.peers.send(chunk.peer, self._tag(chunk.step, chunk.peer_bin, back=True), rows)
            self.state.times.sent(began, chunk.step, chunk.number, rows.nbytes)

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
        return rows.dtype if self.state.plan.wire_dtype is None else self.state.plan.wire_dtype

    def _travels_from(self, rows: Tensor) -> torch.device:
        """Where rows are sent from and received: from GPU to GPU where all ranks can, else through the host."""
        return _HOST if self.peers.route.link_of(rows.device) is None else rows.device

    def _sent(self, here: Bin) -> list[tuple[int, Tensor]]:
        """What goes to whom of a bin's rows, counted from its first."""
        return self._steps[here.step + 1].sends[here.number]

    def _returned(self, chunk: Chunk, grad: Tensor) -> Tensor:
        """What goes back of a chunk's gradient, [rows of the chunk, width]."""
        return grad

    def _tag(self, s: int, number: int, back: bool = False) -> int:
        return self._first_tag + (s + _BACK * back) * MAX_BINS + number
