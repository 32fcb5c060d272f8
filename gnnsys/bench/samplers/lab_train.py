"""One trainer of the lab's job: `torchrun -m gnnsys.bench.samplers.lab_train FOLDER PARTS`.

A phase's name says what is sampled. "both-start" makes a loader with a guide and trains until masks are in use; "both"
goes on with them while newer ones are made, "both-frozen" while none are, without the process that makes them, and
"both-idle" while none are asked for. "uniform-start" makes a loader as well: whatever fills its pipeline is counted for
uniform draws, too. What follows an @ tells phases of one name apart.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS
from gnnsys.bench.dist.phase import FIGURES, MODES, Phase, load
from gnnsys.bench.dist.task import Task
from gnnsys.bench.dist.train import NODE, PhaseTrainer, RankFigures, endless
from gnnsys.explain import Guide
from gnnsys.nn import GraphSAGE
from gnnsys.sampling import FastGCNSampler, LaborSampler, LadiesSampler, Sampler

SIZES = "GNNSYS_BENCH_MODEL"  # columns, hidden units, classes and layers: processes that explain have it from here
START, FROZEN, IDLE, AGAIN, BF16 = "-start", "-frozen", "-idle", "-again", "-bf16"
TURN = "@"
GUIDES: dict[str, dict[str, Any]] = {
    "nodes": {"num_features": 1.0},
    "columns": {"nodes": False},
    "both": {},
}
LAYER_WISE: dict[str, Callable[..., Sampler]] = {
    "fastgcn": FastGCNSampler,
    "ladies": LadiesSampler,
}  # draws of a layer: in the task's graph, by name


def make_model() -> GraphSAGE:
    """What the job trains."""
    columns, hidden, num_classes, num_layers = map(int, os.environ[SIZES].split(","))
    return GraphSAGE(columns, hidden, num_layers, num_classes)


def main(folder: Path, parts: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Task.load(folder)
    with gnnsys.init(timeout=WAIT_SECONDS, encrypt=task.encrypt) as session:
        graph = gnnsys.open(parts, verify=False)
        width, num_classes = graph.node_data[NODE]["x"].shape[1], graph.info["num_classes"]
        os.environ[SIZES] = f"{width},{task.hidden},{num_classes},{len(task.fanouts)}"
        trainer = SamplerTrainer(session, graph, task, None)
        for phase in load(folder):
            figures = trainer.run(phase, folder)
            everyone = session.group.gather(f"figures-{phase.name}", figures)
            trainer.say(f"{FIGURES} {phase.name} {json.dumps(everyone)}")
        trainer.close()


class SamplerTrainer(PhaseTrainer):
    """Makes the loader that a phase's name asks for, or goes on with that of the phase before."""

    _guide: Guide | None = None
    _is_frozen = _is_idle = False

    def run(self, phase: Phase, folder: Path) -> dict[str, Any]:
        asked = phase.name.split(TURN)[0]
        name = asked.removesuffix(START).removesuffix(FROZEN).removesuffix(IDLE).removesuffix(AGAIN)
        self._is_idle = asked.endswith(IDLE)
        if asked.endswith(FROZEN):
            assert self._guide is not None and name == self._mode
            self._guide.close()  # batches go on as they are guided now
            self._is_frozen = True
        elif name != self._mode:
            self._make(name, phase.mode)
        began = _cpu_seconds(self._explaining_pid())
        figures = super().run(phase, folder)
        if asked.endswith(START) and self._guide is not None:
            self._wait_for_masks()
        pid = self._explaining_pid()
        status = self._guide.status() if self._guide is not None else {}
        return figures | {
            "memory": _memory(),
            "explaining_memory": _proportional(pid),
            "explaining_cpu": (_cpu_seconds(pid) - began) / max(1, figures["steps"]),
            "round_seconds": status.get("seconds", 0.0),
            "guide": status,
        }

    def _explaining_pid(self) -> int:
        """0 where there is no such process."""
        if self._guide is None or self._is_frozen or self._guide._sampler()._explaining is None:
            return 0
        return self._guide._sampler()._explaining.pid  # type: ignore[union-attr]

    def close(self) -> None:
        if self._guide is not None:
            self._guide.close()
        super().close()

    def _use(self, mode: str) -> None:
        """The phase's name has decided already."""

    def _make(self, name: str, mode: str) -> None:
        self.close()
        self._mode, self._guide, self._is_frozen = name, None, False
        task, kind = self.task, name.removesuffix(BF16)
        options: dict[str, Any] = {**MODES[mode], "wire_dtype": torch.bfloat16 if name.endswith(BF16) else None}
        if kind in GUIDES:
            self._guide = Guide(model="gnnsys.bench.samplers.lab_train:make_model", **GUIDES[kind])
            options |= {"num_neighbors": list(task.fanouts), "guide": self._guide}
        elif kind == "uniform":
            options |= {"num_neighbors": list(task.fanouts)}
        elif kind == "labor":
            options |= {"sampler": LaborSampler(self.graph, list(task.fanouts), normalize=True)}
        else:
            draws = [int(task.graph[kind])] * len(task.fanouts)
            options |= {"sampler": LAYER_WISE[kind](self.graph, draws)}
        self._loader = gnnsys.NeighborLoader(
            self.graph, input_nodes=self.seeds, batch_size=task.batch_size, shuffle=True, fetch=["x", "y"], **options
        )
        self._batches = endless(self._loader)

    def _step(self, batch: Any, figures: RankFigures) -> None:
        began = time.perf_counter()
        edges = [next(iter(block.csc.values())) for block in batch.blocks] or batch.edge_index
        out = self.model(batch.x, edges)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self._guide is not None and not self._is_frozen and not self._is_idle:
            self._guide.update(self.model)
        figures.computed += time.perf_counter() - began
        figures.steps += 1
        figures.seeds += batch.batch_size
        figures.input_nodes += batch.x.shape[0]
        figures.loss = loss.item()

    def _wait_for_masks(self) -> None:
        """Until batches that nobody has begun are guided."""
        assert self._guide is not None
        deadline = time.monotonic() + WAIT_SECONDS
        while self._guide.status()["begins_at"] < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no masks within {WAIT_SECONDS:g} s")
            time.sleep(0.05)
            self._guide.update(self.model)
        self.session.barrier()


def _memory() -> int:
    """Bytes that the processes of this host have, shared ones split among them: a host of the lab has its own /proc.

    Where machines are process groups, those of this process and of its children, at any depth.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    if "GNNSYS_BENCH_GROUPS" in os.environ:
        parents = {pid: _parent(pid) for pid in pids}
        own = {os.getpid()}
        while grown := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= grown
        pids = list(own)
    return sum(_proportional(pid) for pid in pids)


def _stat(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat: state, parent and so on; nothing where the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    told = _stat(pid)
    return int(told[1]) if told else 0


def _cpu_seconds(pid: int) -> float:
    """Of a process and its threads; 0 where there is none."""
    told = _stat(pid) if pid else []
    return sum(map(int, told[11:13])) / os.sysconf("SC_CLK_TCK") if told else 0.0


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
