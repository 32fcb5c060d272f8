"""The tasks of a training job and who sends what to whom: §III of the paper, and what gnnsys does differently.

A task runs once per iteration. An edge joins iteration n of one task to iteration n + lag of another; where the two
are on different machines its bytes are a flow. `TrainingTasks.of_job` writes the tasks and edges down in the order
that everything else relies on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gnnsys.planning.simulation.machines import Ints

# Kinds of tasks. The first four are placed, in this order; every other one sits with one of them.
STORE, SAMPLER, WORKER, SERVER = "store", "sampler", "worker", "server"
SERVING, OWNER, RING, BARRIER = "serving", "owner", "ring", "barrier"
TASK_KINDS = (STORE, SAMPLER, WORKER, SERVER, SERVING, OWNER, RING, BARRIER)

# Kinds of edges that carry bytes, each with the shape of its block of edges.
GRAPH = "graph"  # [parts, samplers] store -> sampler
BATCH = "batch"  # [samplers] sampler -> its worker
GRADIENT = "gradient"  # [workers, servers] worker -> parameter server
PARAMETER = "parameter"  # [servers, workers] parameter server -> worker of the next iteration
CHUNK = "chunk"  # [steps, workers] ring: from a worker (step 0) or its ring task, to the next worker's ring task
PUSH = "push"  # [workers, parts] sparse gradients -> owner of the rows
PULL = "pull"  # [parts, workers] trained rows -> worker of the next iteration
REQUEST = "request"  # [parts, samplers] sampler -> what serves it `ahead` batches later, where requests have bytes
SIGNAL = "signal"  # no bytes: order only
EDGE_KINDS = (GRAPH, BATCH, GRADIENT, PARAMETER, CHUNK, PUSH, PULL, REQUEST, SIGNAL)

# What the receiver of an edge waits for.
DATA = 0  # the sender's end, and then the flow where the two are on different machines
AFTER_END = 1  # the sender's end
AFTER_START = 2  # the sender's start

SYNCS = ("ps", "ring", "ring-whole", "none")


@dataclass(frozen=True)
class TrainingTasks:
    """Tasks and edges of a job. Made by `of_job`.

    `kind`       [J] index into TASK_KINDS
    `host`       [J] the placed task whose machine this one is on; itself for the placed ones, which come first
    `source`, `target`, `lag`, `mode`, `edge_kind`  [E]
    `tasks_of`   kind -> (first task, shape of the block)
    `edges_of`   kind -> (first edge, shape of the block); SIGNAL edges are the rest
    """

    kind: Ints
    host: Ints
    source: Ints
    target: Ints
    lag: Ints
    mode: Ints
    edge_kind: Ints
    tasks_of: dict[str, tuple[int, tuple[int, ...]]]
    edges_of: dict[str, tuple[int, tuple[int, ...]]]
    worker_of_sampler: Ints
    sync: str = "ps"
    ahead: int | None = None
    options: dict[str, object] = field(default_factory=dict)

    @property
    def num_tasks(self) -> int:
        return len(self.kind)

    @property
    def num_placed(self) -> int:
        """How many entries a placement has: stores, samplers (unless they sit with their worker), workers, servers."""
        return int((self.host == np.arange(len(self.host))).sum())

    @property
    def num_edges(self) -> int:
        return len(self.source)

    def count(self, kind: str) -> int:
        return int(np.prod(self.tasks_of[kind][1])) if kind in self.tasks_of else 0

    def ids(self, kind: str) -> Ints:
        """Tasks of a kind, in the shape of their block."""
        return _block(self.tasks_of, kind)

    def edges(self, kind: str) -> Ints:
        """Edges of a kind, in the shape of their block; see the list at the top of this file."""
        return _block(self.edges_of, kind)

    def check_placement(self, placement: npt.ArrayLike, num_machines: int) -> Ints:
        """The placement as an array [num_placed], or what is wrong with it."""
        given = np.asarray(placement)
        if given.shape != (self.num_placed,) or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(
                f"placement: {self.num_placed} machine numbers are needed ({self.describe_placed()}), "
                f"got {given.dtype} of shape {given.shape}"
            )
        if len(given) and (given.min() < 0 or given.max() >= num_machines):
            raise ValueError(f"placement: machines are 0 to {num_machines - 1}, got {given.min()} to {given.max()}")
        return given.astype(np.int64)

    def machine_of(self, placement: npt.ArrayLike, num_machines: int) -> Ints:
        """[num_tasks]: where every task is, those that sit with another one too (constraint 4)."""
        return self.check_placement(placement, num_machines)[self.host]

    def describe_placed(self) -> str:
        placed = [(k, self.count(k)) for k in (STORE, SAMPLER, WORKER, SERVER)]
        if self.options.get("own_samplers"):
            placed = [pair for pair in placed if pair[0] != SAMPLER]
        return ", ".join(f"{count} {kind}s" for kind, count in placed if count)

    def name(self, task: int) -> str:
        """For reports: `worker 3`, `sampler 7 of worker 3`, `ring step 2 of worker 1`."""
        kind = TASK_KINDS[self.kind[task]]
        first, shape = self.tasks_of[kind]
        at = [int(i) for i in np.unravel_index(task - first, shape)]
        if kind == SAMPLER:
            return f"sampler {at[0]} of worker {self.worker_of_sampler[at[0]]}"
        if kind == SERVING:
            return f"store {at[0]} serving sampler {at[1]}"
        if kind == RING:
            return f"ring step {at[0]} of worker {at[1]}"
        return kind if kind == BARRIER else f"{kind} {at[0]}"

    @classmethod
    def of_job(
        cls,
        parts: int,
        workers: int,
        samplers_per_worker: int = 2,
        *,
        sync: str = "ps",
        servers: int = 1,
        ahead: int | None = None,
        own_samplers: bool = False,
        serve_each: bool = False,
        sparse: bool = False,
        requests: bool = False,
    ) -> TrainingTasks:
        """The tasks of a job. With the defaults it is the paper's.

        `sync`          "ps": `servers` parameter servers. "ring": 2 |J_w| - 2 steps, a task and a flow per worker each.
                        "ring-whole": the same bytes in one step, for many workers. "none": workers do not wait.
        `ahead`         how many batches a sampler may be ahead: the work for batch n begins when its worker starts
                        batch n - ahead. None is the paper's: samplers run ahead for ever.
        `own_samplers`  samplers are where their worker is, and are not placed.
        `serve_each`    a store works on each sampler's request by itself, instead of one task for all of them.
        `requests`      with `serve_each` and `ahead`: requests are flows too. A sampler sends that of batch n + `ahead`
                        when it has made batch n, which is before its worker starts n.
        `sparse`        workers push rows to the owner of each part and pull the next iteration's from it.
        """
        from gnnsys.planning.simulation.job_tasks import JobTasks

        return JobTasks(
            parts,
            workers,
            samplers_per_worker,
            sync,
            servers,
            ahead,
            own_samplers,
            serve_each,
            sparse,
            requests,
        ).build()


def _block(blocks: dict[str, tuple[int, tuple[int, ...]]], kind: str) -> Ints:
    if kind not in blocks:
        return np.zeros(0, dtype=np.int64)
    first, shape = blocks[kind]
    return first + np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
