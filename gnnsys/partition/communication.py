"""The communication objective (G3 §4.3): fewer rows between parts, then no part with more than its share of them.

A node v of part p is sent to part q != p when a node of q has an in-edge from v. A part's load is the larger of the
rows it sends and the rows it receives (its halo); the volume is the sum of either over all parts (Eq. 4.3). Repeated
edges and loops change neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnsys.ops import CSC, VolumeSearch, even_out_volume, refine_volume, stream_key, traffic_matrix

TOLERANCE = 0.005  # the paper's: loads are even when (largest - smallest) / largest is no more
_REFINE, _EVEN_OUT = range(2)  # what a random stream is for


class CommunicationVolume(NamedTuple):
    """Rows that travel for one layer: `sent`, `received` int64 [num_parts]; `matrix[p, q]`, rows of p that q needs."""

    sent: Tensor
    received: Tensor
    matrix: Tensor

    @property
    def total(self) -> int:
        return int(self.matrix.sum())

    @property
    def load(self) -> Tensor:
        """int64 [num_parts]: the larger of sent and received."""
        return torch.maximum(self.sent, self.received)

    @property
    def imbalance(self) -> float:
        """The largest load over the mean load; 1 where nothing travels."""
        load = self.load.double()
        return float(load.max() / load.mean()) if self.total else 1.0


@dataclass(frozen=True)
class CommunicationResult:
    """What `refine_communication` made of an assignment.

    `refined` is the volume between the two stages. `stopped` says why the last stage ended. Of the second stage:
    "balanced", "no improvement" (a search hotter than the one before found nothing better: the paper's cycle), "out of
    work" (a large graph; another run from `part` may find more). Without it, of the first: "converged", "out of work".
    """

    part: Tensor  # int32 [num_nodes]
    before: CommunicationVolume
    refined: CommunicationVolume
    after: CommunicationVolume
    num_moves: int
    num_swaps: int
    stopped: str


def communication_volume(csc: CSC, part: Tensor, num_parts: int) -> CommunicationVolume:
    """Counts the rows that travel under an assignment, `part` int32 [num_nodes] with values in [0, num_parts).

    >>> ring = CSC.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    >>> communication_volume(ring, torch.tensor([0, 0, 1, 1], dtype=torch.int32), 2).matrix
    tensor([[0, 1],
            [1, 0]])
    """
    _check_square(csc)
    matrix = traffic_matrix(csc, part.contiguous(), num_parts)
    return CommunicationVolume(matrix.sum(1), matrix.sum(0), matrix)


def refine_communication(
    csc: CSC,
    part: Tensor,
    num_parts: int,
    weights: Tensor,
    limits: Tensor,
    *,
    even_out: bool = True,
    tolerance: float = TOLERANCE,
    slack: float = 0.3,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> CommunicationResult:
    """From any assignment to one that sends fewer rows, then to one whose largest load is smaller.

    `weights` int64 [C, num_nodes] is what a node weighs in each constraint, `limits` int64 [C] or [C, num_parts] what a
    part may weigh. An assignment within all limits never leaves one. One above some of them is first brought below, at
    any price in rows, as far as moving single nodes can do that; the caller checks what is left. From then on the
    volume never grows in the first stage, and the largest load never grows in the second, which adds at most `slack` to
    the volume for it. `progress` is told the name of each stage as it starts. The result depends on the arguments
    alone, not on the number of threads.
    """
    _check_square(csc)
    part = part.contiguous()
    before = communication_volume(csc, part, num_parts)  # also checks csc and part
    weights, limits = _constraints(weights, limits, csc.num_dst, num_parts)
    report = progress if progress is not None else lambda _: None

    report("volume")
    runs: list[VolumeSearch] = [refine_volume(csc, part, num_parts, weights, limits, stream_key(seed, _REFINE))]
    refined = communication_volume(csc, runs[-1].part, num_parts)
    if even_out:
        report("even out")
        key = stream_key(seed, _EVEN_OUT)
        runs.append(
            even_out_volume(csc, runs[-1].part, num_parts, weights, limits, tolerance=tolerance, slack=slack, key=key)
        )
    return CommunicationResult(
        part=runs[-1].part,
        before=before,
        refined=refined,
        after=communication_volume(csc, runs[-1].part, num_parts),
        num_moves=sum(run.num_moves for run in runs),
        num_swaps=sum(run.num_swaps for run in runs),
        stopped=runs[-1].stopped,
    )


def _check_square(csc: CSC) -> None:
    if csc.num_src != csc.num_dst:
        raise ValueError(f"csc must lead from a set of nodes to itself, got {csc.num_src} x {csc.num_dst}")


def _constraints(weights: Tensor, limits: Tensor, num_nodes: int, num_parts: int) -> tuple[Tensor, Tensor]:
    if weights.dtype != torch.int64 or weights.dim() != 2 or weights.shape[1] != num_nodes:
        raise ValueError(
            f"weights must be int64 [num_constraints, {num_nodes}], got {weights.dtype} {list(weights.shape)}"
        )
    shapes = [[weights.shape[0]], [weights.shape[0], num_parts]]
    if limits.dtype != torch.int64 or list(limits.shape) not in shapes:
        raise ValueError(f"limits must be int64 {shapes[0]} or {shapes[1]}, got {limits.dtype} {list(limits.shape)}")
    if limits.dim() == 1:
        limits = limits.unsqueeze(1).expand(-1, num_parts)
    return weights.contiguous(), limits.contiguous()
