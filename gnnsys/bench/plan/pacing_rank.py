"""One rank of a job that compares paced replies with plain TCP: `-m gnnsys.bench.plan.pacing_rank FOLDER PARTS`.

Every host has one rank and serves one part. In one pattern all ranks but the first read rows of its part, in the other
it reads rows of all others. Ways take turns, each with one pull of many rows and one epoch of a loader with a model
behind it. Rank 0 prints what all ranks measured.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS
from gnnsys.nn import GraphSAGE
from gnnsys.store import Pull

FIGURES = "pacing-figures"
FROM_ONE, FROM_ALL = "all from one", "one from all"  # names of the patterns
PLAIN, PACED = "plain", "paced"
TABLE = "node/node/x"
HUB = 0
Span = tuple[float, float]  # begin and end; hosts of a lab are processes of one machine and have one clock


@dataclass(frozen=True, kw_only=True)
class PacingTask:
    """`megabytes` that each flow of a pull carries, `batches` of an epoch, `turns` of both ways."""

    rate: str
    megabytes: float = 4.0
    batches: int = 12
    batch_size: int = 100
    fanouts: tuple[int, ...] = (10, 5)
    turns: int = 5

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pacing.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> PacingTask:
        value = json.loads((folder / "pacing.json").read_text())
        return cls(**{**value, "fanouts": tuple(value["fanouts"])})


class PacingRank:
    """What one rank pulls and trains."""

    def __init__(self, session: gnnsys.Session, graph: gnnsys.DistGraph, task: PacingTask) -> None:
        self.session, self.graph, self.task = session, graph, task
        self.spec = graph.store.spec(TABLE)
        self._pool = ThreadPoolExecutor(max(1, session.num_machines))

    def parts(self, pattern: str) -> list[int]:
        """Those whose rows this rank reads in a pattern; none where it only serves."""
        is_hub = self.session.machine == HUB
        machines = self.graph.machine_of_part
        if pattern == FROM_ONE:
            return [] if is_hub else [part for part, machine in enumerate(machines) if machine == HUB]
        return [part for part, machine in enumerate(machines) if machine != HUB] if is_hub else []

    def pull(self, pattern: str, turn: int) -> list[Span]:
        """When the rows of each part were asked for, all at once, and when they were there."""
        row_bytes = self.spec.row_size * self.spec.dtype.itemsize
        asked, count = [], int(self.task.megabytes * 1e6 / row_bytes)
        began = time.monotonic()
        for part in self.parts(pattern):
            first, end = self.spec.bounds[part : part + 2]
            ids = torch.randint(first, end, (count,), generator=torch.Generator().manual_seed(turn))
            asked.append(self.graph.store.pull([Pull(TABLE, ids)]))

        def wait(pending: Any) -> Span:
            pending.result()
            return began, time.monotonic()

        return list(self._pool.map(wait, asked))

    def epoch(self, pattern: str, turn: int) -> list[Span]:
        """Begin and end of an epoch over seeds of the parts that are read; nothing where none are."""
        task, parts = self.task, self.parts(pattern)
        if not parts:
            return []
        share = -(-task.batches * task.batch_size // len(parts))
        chance = torch.Generator().manual_seed(1000 * turn + self.session.rank)
        ranges = [self.spec.bounds[part : part + 2] for part in parts]
        seeds = torch.cat([torch.randperm(end - first, generator=chance)[:share] + first for first, end in ranges])
        torch.manual_seed(0)
        model = GraphSAGE(self.spec.row_size, 16, len(task.fanouts), self.graph.info["num_classes"])
        loader = gnnsys.NeighborLoader(
            self.graph, list(task.fanouts), input_nodes=self.graph.from_global(seeds), batch_size=task.batch_size,
            shuffle=True, fetch=["x", "y"], num_threads=1, prefetch=1, seed=turn,
        )  # fmt: skip
        began = time.monotonic()
        for batch in loader:
            out = model(batch.x, batch.edge_index, num_sampled_nodes=batch.num_sampled_nodes)
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        ended = time.monotonic()
        loader.close()
        return [(began, ended)]

    def turn(self, pattern: str, way: str, turn: int) -> dict[str, Any]:
        """One pull and one epoch, which all ranks begin together."""
        self.session.pace(self.task.rate if way == PACED else False)
        self.session.barrier()
        pulled = self.pull(pattern, turn)
        self.session.barrier()
        epoch = self.epoch(pattern, turn)
        self.session.barrier()
        return {"pattern": pattern, "way": way, "turn": turn, "pulled": pulled, "epoch": epoch}

    def close(self) -> None:
        self._pool.shutdown()


def main(folder: Path, parts: str) -> None:
    torch.set_num_threads(1)
    task = PacingTask.load(folder)
    with gnnsys.init(timeout=WAIT_SECONDS) as session:
        graph = gnnsys.open(parts, verify=False)
        rank = PacingRank(session, graph, task)
        told = []
        for turn in range(-1, task.turns):  # the first one opens connections, and is not counted
            ways = (PLAIN, PACED) if turn % 2 else (PACED, PLAIN)
            for pattern in (FROM_ONE, FROM_ALL):
                for way in ways:
                    figures = rank.turn(pattern, way, turn)
                    if turn >= 0:
                        told.append(figures)
        everyone = session.group.gather("pacing", told)
        rank.close()
        if session.rank == 0:
            print(f"{FIGURES} {json.dumps(everyone)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
