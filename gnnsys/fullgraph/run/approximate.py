"""Approximate training passes: fewer rows of the halo (BNS-GCN), or those of the pass before (PipeGCN).

A policy gives a training pass an exchange of its own, and that is all it changes: which rows stand in the halo, and
which gradients come back of them. Evaluation, `model.eval()` or under `torch.no_grad()`, is exact with every policy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnnsys.comm import Peers
from gnnsys.fullgraph.plan.bins import Bin, Chunk
from gnnsys.fullgraph.run.halo_exchange import NUM_TAGS, Exchange
from gnnsys.fullgraph.run.pass_state import Pass, PassPlan
from gnnsys.ops import dropout_rows, stream_key

if TYPE_CHECKING:
    from gnnsys.fullgraph.parallel import HybridParallel

_BOUNDARY = 0x626E73  # keeps these draws apart from those of dropout under the same key
_GRACE = 10.0  # seconds that a model which is let go waits for what is under way


class Policy(Protocol):
    """What `HybridParallel` takes as `approximate`."""

    def begin(self, model: HybridParallel) -> Callable[[Pass], Exchange]:
        """What makes the exchange of each training pass; every rank calls it, once per model."""
        ...


# -- boundary sampling -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundarySampling:
    """A fraction of the halo, drawn anew for every training pass (BNS-GCN: Wan et al., MLSys 2022, 3.2).

    Each node of a rank's halo is in a pass with probability `rate`, for all of its layers. Its rows count 1 / rate
    times, so that sums over neighbours are right in the mean; the other nodes of the halo count as rows of zeros, and
    neither their rows nor gradients travel. Degrees stay those of the whole graph. A layer's result is thereby unbiased
    where it is linear in the rows of neighbours (SAGE, GCN, GIN); attention sees rows of zeros among its neighbours.

    Who is drawn depends on (seed, step, receiving rank, original id) alone and is computed at both ends: no ids travel.
    Features that stay on every rank are drawn in the same way as they are read. With `rate` 1 passes are the exact
    ones; with 0 every rank trains on its own nodes and the edges between them.

    >>> model = HybridParallel(layers, graph, approximate=BoundarySampling(0.1))
    """

    rate: float

    def __post_init__(self) -> None:
        if not (self.rate == 0 or 2**-32 <= self.rate <= 1):
            raise ValueError(f"rate must be in [0, 1], the part of the halo that a pass sees, got {self.rate}")

    def draw(self, ids: Tensor, seed: int, step: int, rank: int) -> Tensor:
        """Which nodes, by original id, are in the halo of `rank` in the training pass that is the model's `step`."""
        return self._draw(ids, stream_key(seed, step), rank)

    def begin(self, model: HybridParallel) -> Callable[[Pass], Exchange]:
        if self.rate == 1:
            return Exchange
        plan = model.plan
        ids = model.share.original_ids[plan.order]
        sent = [ids[places] for places in plan.send_places]
        halo = torch.cat(model._peers.swap(sent, plan.rows_from()))  # by owner and place, as the halo's rows are

        def exchange(state: Pass) -> Exchange:
            here = self._draw(halo, state.key, plan.rank)
            there = [self._draw(each, state.key, rank) for rank, each in enumerate(sent)]
            return _SampledExchange(state, 1 / self.rate if self.rate else 0.0, here, there)

        return exchange

    def _draw(self, ids: Tensor, key: int, rank: int) -> Tensor:
        if self.rate == 0:
            return torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        ones = torch.ones(ids.numel(), 1, device=ids.device)
        return dropout_rows(ones, ids, 1 - self.rate, stream_key(key, _BOUNDARY, rank))[:, 0] != 0


class _SampledExchange(Exchange):
    """Rows and gradients of drawn nodes alone: `here` are those of this rank's halo, `there[r]` of what r needs of it.

    Features that need no gradient come whole, once, and are left as they are: bins scale what they read of them.
    """

    def __init__(self, state: Pass, scale: float, here: Tensor, there: list[Tensor]) -> None:
        super().__init__(state)
        self._scale, self._here, self._there = scale, here, there

    def begin(self) -> None:
        rows = self.state.rows[0]
        if self._comes_whole(0) and self._steps[0].has_halo:
            core = torch.ones(self.plan.num_core, dtype=torch.float64, device="cpu")
            scales = torch.cat([core, self._here.double() * self._scale])
            self.state.scales[0] = scales[:, None].to(rows)

    def expect_rows(self, s: int) -> list[Chunk]:
        if self._comes_whole(s):
            return super().expect_rows(s)
        rows, coming = self.state.rows[s], []
        rows[self.plan.num_core :] = 0
        for chunk in self._steps[s].chunks:
            places = self._drawn(chunk)
            if places.numel():
                shape = (places.numel(), rows.shape[1])
                buffer = torch.empty(shape, dtype=self._travels_as(rows), device=self._travels_from(rows))
                self.peers.expect(chunk.peer, self._tag(s, chunk.peer_bin), buffer, (chunk, places, buffer))
                coming.append(chunk)
        return coming

    def take_rows(self, token: Any) -> Chunk:
        chunk: Chunk = token[0]
        if self._comes_whole(chunk.step):
            return super().take_rows(token)
        _, places, buffer = token
        rows = self.state.rows[chunk.step]
        rows[places.to(rows.device)] = self._scaled(chunk.step, buffer)
        return chunk

    def take_grad(self, token: Any) -> Bin:
        here, peer, rows, buffer = token
        return super().take_grad((here, peer, rows, self._scaled(here.step + 1, buffer)))

    def _sent(self, here: Bin) -> list[tuple[int, Tensor]]:
        whole, sent = super()._sent(here), []
        if self._comes_whole(here.step + 1):
            return whole
        for peer, rows in whole:
            first = int(torch.searchsorted(self.plan.send_places[peer], here.first))
            drawn = self._there[peer][first : first + rows.numel()]
            if drawn.any():
                sent.append((peer, rows[drawn.to(rows.device)]))
        return sent

    def _returned(self, chunk: Chunk, grad: Tensor) -> Tensor:
        return grad[self._here[chunk.first : chunk.end].to(grad.device)]

    def _comes_whole(self, s: int) -> bool:
        return s == 0 and not self.state.needs[0]

    def _drawn(self, chunk: Chunk) -> Tensor:
        """Rows of [core, halo] that a chunk brings."""
        return self._here[chunk.first : chunk.end].nonzero()[:, 0] + (self.plan.num_core + chunk.first)

    def _scaled(self, s: int, buffer: Tensor) -> Tensor:
        rows = self.state.rows[s]
        return buffer.to(rows.device, rows.dtype) * self._scale


# -- staleness ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staleness:
    """The halo of the pass before (PipeGCN: Wan et al., ICLR 2022, 3.2), so that nobody waits for what was just sent.

    A training pass reads the halo rows, and adds the gradients of its own rows, that peers sent in the training pass
    before; what they send in this one is received for the next. The first training pass is exact, and what it received
    is used once more in the second. Rows are late as they travel: those that a layer makes narrower before it sums them
    up (GCN, SAGE) were made so with the weights of the pass before. Features that travel as they are given are never
    late, nor are their gradients where they train.

    `gamma` in [0, 1) smooths what comes late, rows and gradients (PipeGCN-GF, 3.4): used is the mean that begins with
    what the first pass received, and is then gamma times what it was plus 1 - gamma times what came.

    What is under way is no part of the model's state: after `load_state_dict`, as in a resumed job, and when x changes
    its width or dtype, the next training pass is an exact first one again. Evaluation in between changes nothing. Two
    passes' worth of halo rows and gradients are held at most, and one more of means where `gamma` is not 0. A model
    that is let go waits up to ten seconds for what is under way.

    >>> model = HybridParallel(layers, graph, approximate=Staleness())
    """

    gamma: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < 1:
            raise ValueError(f"gamma must be in [0, 1), the part that a mean keeps of itself, got {self.gamma}")

    def begin(self, model: HybridParallel) -> Callable[[Pass], Exchange]:
        late = _LateMessages(model._peers.another(), self.gamma)
        model.register_load_state_dict_post_hook(lambda *_: late.restart())
        return late.exchange


class _MessageKey(NamedTuple):
    """A message that comes in every pass: rows of a chunk, or on the way back gradients of a bin's rows from a peer."""

    is_back: bool
    step: int  # whose input the rows are
    of: Chunk | Bin
    peer: int


class _Note(NamedTuple):
    """A message of which pass over its step, and where it is received."""

    key: _MessageKey
    turn: int
    buffer: Tensor


class _LateMessages:
    """What came of the last pass and is not used yet, and what is under way; with connections of its own."""

    def __init__(self, peers: Peers, gamma: float) -> None:
        self.peers, self.gamma = peers, gamma
        self.came: dict[tuple[_MessageKey, int], Tensor] = {}
        self._plan: PassPlan | None = None
        self._turns: dict[tuple[bool, int], int] = {}  # how often a step's rows, or gradients, were asked for
        self._means: dict[_MessageKey, Tensor] = {}
        self._num_under_way = 0
        self._sent_before = 0  # messages, when the last pass began
        weakref.finalize(self, Peers.close, peers, _GRACE)

    def exchange(self, state: Pass) -> Exchange:
        """That of the next training pass."""
        if self._plan is not state.plan:
            while self._num_under_way:
                self.arrived(self.peers.next_arrival())
            self.came, self._turns, self._means = {}, {}, {}
            self._plan = state.plan
        sent = sum(self.peers.messages_sent)
        self.peers.flush(keep=sent - self._sent_before)
        self._sent_before = sent
        return _StaleExchange(state, self)

    def restart(self) -> None:
        """Makes the next pass a first one."""
        self._plan = None

    def next_turn(self, back: bool, s: int) -> int:
        turn = self._turns.get((back, s), 0)
        self._turns[back, s] = turn + 1
        return turn

    def ask(self, tag: int, note: _Note) -> None:
        self._num_under_way += 1
        self.peers.expect(note.key.peer, tag, note.buffer, note)

    def arrived(self, note: _Note) -> None:
        self._num_under_way -= 1
        self.came[note.key, note.turn] = note.buffer

    def take(self, key: _MessageKey, dtype: torch.dtype) -> Tensor:
        """What came in the last pass, or the mean of all that came; of the first pass it stays, for the second."""
        turn = self._turns[key.is_back, key.step] - 1
        buffer = self.came.pop((key, turn - 1)) if turn else self.came[key, 0]
        if self.gamma == 0:
            return buffer
        if key in self._means:
            self._means[key].lerp_(buffer.to(dtype), 1 - self.gamma)
        else:
            self._means[key] = buffer.to(dtype, copy=True)
        return self._means[key]


class _StaleExchange(Exchange):
    """Asks for what peers send in this pass, and waits for what they sent in the last, of all steps but the first."""

    def __init__(self, state: Pass, late: _LateMessages) -> None:
        super().__init__(state, late.peers, NUM_TAGS)
        self._late = late
        self._wanted: set[tuple[_MessageKey, int]] = set()

    def expect_rows(self, s: int) -> list[Chunk]:
        if s == 0:
            return super().expect_rows(s)
        width, turn, coming = self.state.rows[s].shape[1], self._late.next_turn(False, s), []
        for chunk in self._steps[s].chunks:
            key = _MessageKey(False, s, chunk, chunk.peer)
            self._ask(key, turn, self._tag(s, chunk.peer_bin), (chunk.end - chunk.first, width))
            if self._is_here(key, turn):
                self._put_rows(key, chunk)
            else:
                coming.append(chunk)
        return coming

    def take_rows(self, token: Any) -> Chunk:
        if not isinstance(token, _Note):
            return super().take_rows(token)
        chunk = token.key.of
        assert isinstance(chunk, Chunk)
        self._put_rows(token.key, chunk)
        return chunk

    def expect_grads(self, s: int) -> list[Bin]:
        if s == 0:
            return super().expect_grads(s)
        width, turn, asked = self.state.rows[s].shape[1], self._late.next_turn(True, s), []
        for here in self._steps[s].before:
            self._grads[here] = {}
            for peer, rows in self._sent(here):
                key = _MessageKey(True, s, here, peer)
                self._ask(key, turn, self._tag(s, here.number, back=True), (rows.numel(), width))
                if self._is_here(key, turn):
                    self._put_grad(key, here)
                else:
                    asked.append(here)
        return asked

    def take_grad(self, token: Any) -> Bin:
        if not isinstance(token, _Note):
            return super().take_grad(token)
        here = token.key.of
        assert isinstance(here, Bin)
        self._put_grad(token.key, here)
        return here

    def arrival(self, wait: bool) -> Any:
        while isinstance(token := super().arrival(wait), _Note):
            self._late.arrived(token)
            if (token.key, token.turn) in self._wanted:
                break  # and otherwise it is for the next pass
        return token

    def flush(self) -> None:
        """Nothing of this pass is waited for."""

    def _returned(self, chunk: Chunk, grad: Tensor) -> Tensor:
        return grad.clone() if grad._is_view() else grad  # so that a message under way keeps no more than itself

    def _ask(self, key: _MessageKey, turn: int, tag: int, shape: tuple[int, int]) -> None:
        rows = self.state.rows[key.step]
        buffer = torch.empty(shape, dtype=self._travels_as(rows), device=self._travels_from(rows))
        self._late.ask(tag, _Note(key, turn, buffer))

    def _is_here(self, key: _MessageKey, turn: int) -> bool:
        """Whether what a pass uses of a message has come; it will be waited for if not."""
        use = (key, max(0, turn - 1))
        if use not in self._late.came:
            self._wanted.add(use)
        return use not in self._wanted

    def _put_rows(self, key: _MessageKey, chunk: Chunk) -> None:
        rows, num_core = self.state.rows[chunk.step], self.plan.num_core
        rows[num_core + chunk.first : num_core + chunk.end] = self._late.take(key, rows.dtype).to(rows.device)

    def _put_grad(self, key: _MessageKey, here: Bin) -> None:
        found = self._late.take(key, self.state.rows[key.step].dtype)
        self._grads[here][key.peer] = (dict(self._sent(here))[key.peer], found)
