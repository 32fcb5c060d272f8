"""One run of every partitioner on one graph, each in a process of its own, from which several rows are made.

A partitioner may take a minute, so sides take turns and each turn yields all its figures at once; the row that asks
first makes them run. Memory is the peak of the process above where it stood with the input in memory: nothing that
another side left behind can serve as room. A partitioner of others that crashes or runs out of memory has no figures
in any row, and the reason instead.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Refused, Side, Versus, value
from gnnsys.bench.partition.inputs import flat_edges, write_inputs
from gnnsys.graph import Graph

RECURSIVE, KWAY, VOLUME = "pymetis recursive", "pymetis k-way", "pymetis volume"
METIS = (RECURSIVE, KWAY)
DGL = "dgl"
COMMUNICATION = "gnnsys communication"
DEADLINE = 900  # seconds for one run of one side


@dataclass(frozen=True)
class PartitionerFigures:
    """One partitioner's figures: medians of its turns; the partition is that of the last."""

    side: str
    seconds: float
    peak_bytes: float
    part: Tensor


def is_ours(side: str) -> bool:
    return side.startswith(OURS)


class Contest:
    """Runs `sides` on the graph in turns, when a figure is first asked for.

    `balance` names what ours has to even out; METIS gets one weight per node, 1 + in-degree unless only nodes are
    balanced, and DGL its own option for edges.
    """

    def __init__(
        self,
        graph: Callable[[], Graph],
        sides: Sequence[str],
        num_parts: int,
        balance: Sequence[str],
        *,
        turns: int = 1,
    ) -> None:
        self.missing = missing(sides)
        self._graph, self._num_parts, self._balance, self._turns = graph, num_parts, tuple(balance), turns
        self._sides = [side for side in sides if side not in self.missing]
        self._figures: dict[str, PartitionerFigures] | None = None
        self._refused: dict[str, str] = {}

    def figures(self, side: str) -> PartitionerFigures:
        if self._figures is None:
            self._figures = self._run()
        if side in self._refused:
            raise Refused(self._refused[side])
        return self._figures[side]

    def case(
        self,
        name: str,
        unit: str,
        read: Callable[[PartitionerFigures], float],
        versus: tuple[Versus, ...],
        ours: str = OURS,
    ) -> Case:
        """The row of one figure; `read` may raise to say that a partition does not count."""

        def sides() -> dict[str, Side]:
            names = [ours, *(p for v in versus for p in v.peers if p not in self.missing)]
            return {n: Side(lambda n=n: read(self.figures(n)), foreign=not is_ours(n)) for n in names}  # type: ignore[misc]

        return Case(name, value(unit), sides, versus, ours=ours, repeats=1, missing=self.missing)

    def _run(self) -> dict[str, PartitionerFigures]:
        found: dict[str, list[dict[str, float]]] = {side: [] for side in self._sides}
        parts: dict[str, Tensor] = {}
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(
                Path(folder),
                self._graph(),
                self._num_parts,
                self._balance,
                with_metis=bool({*self._sides} & {*METIS, VOLUME}),
            )
            for _ in range(self._turns):
                for side in list(found):
                    try:
                        found[side].append(_run_one(Path(folder), side))
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        if is_ours(side):
                            raise
                        self._refused[side] = str(error)
                        del found[side]
                    else:
                        parts[side] = torch.from_numpy(np.load(Path(folder) / "part.npy"))
        return {
            side: PartitionerFigures(
                side,
                statistics.median(turn["seconds"] for turn in turns),
                statistics.median(turn["peak_bytes"] for turn in turns),
                parts[side],
            )
            for side, turns in found.items()
        }


def _run_one(folder: Path, side: str) -> dict[str, float]:
    command = [sys.executable, "-m", "gnnsys.bench.partition.run_one", str(folder), side]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{side} ended with {done.returncode}: {last}")
    return json.loads((folder / "figures.json").read_text())


def missing(sides: Sequence[str]) -> dict[str, str]:
    """Sides whose package is not here, with the reason."""
    reasons = peers.missing("pymetis", "dgl")
    package = {RECURSIVE: "pymetis", KWAY: "pymetis", VOLUME: "pymetis", DGL: "dgl"}
    return {side: reasons[package[side]] for side in sides if package.get(side) in reasons}


def cut_share(graph: Graph, part: Tensor) -> float:
    """Percent of all edges whose ends are in different parts."""
    src, dst = flat_edges(graph)
    return 100 * float((part[src] != part[dst]).sum()) / max(src.numel(), 1)


def imbalance_of(weight: Tensor, part: Tensor, num_parts: int) -> float:
    """The heaviest part to the average one."""
    loads = torch.zeros(num_parts, dtype=torch.float64).index_add_(0, part.long(), weight.double())
    return float(loads.max() * num_parts / loads.sum())


def without_isolated(graph: Graph) -> Graph:
    """A homogeneous graph without the nodes that have no edge."""
    edges = graph.edge_index()
    used = torch.zeros(graph.num_nodes(), dtype=torch.bool)
    used[edges.view(-1)] = True
    number = used.cumsum(0) - 1
    return Graph.from_edge_index(number[edges], int(used.sum()))
