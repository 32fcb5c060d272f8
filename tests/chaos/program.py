"""The job that chaos breaks, as a user would write it: GraphSAGE on rows and an embedding, with `gnnsys.resume`.

Beside training it only tells: its moments to the injector, and every batch to a file of its rank, from which the judge
reads what was done, rolled back and done again. Run with the file of a `tests.chaos.job.Plan`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.nn import GraphSAGE
from tests.support.faults import Fault, Injector

DIM, CLASSES = 8, 4


def main(path: str) -> None:
    torch.set_num_threads(1)
    plan = json.loads(Path(path).read_text())
    folder = Path(plan["folder"])
    with gnnsys.init(timeout=plan["timeout"]) as session:
        faults = [Fault.parse(line) for line in plan["faults"]]
        injector = Injector(faults, folder, machine=session.machine, local_rank=session.local_rank)
        train(session, plan, folder, injector)


def train(session: gnnsys.Session, plan: dict[str, Any], folder: Path, injector: Injector) -> None:
    log = Log(folder / f"rank-{session.rank}.log")
    log.write(life=os.getpid())
    injector.reached("open")
    graph = gnnsys.open(plan["parts"])
    loader = gnnsys.NeighborLoader(
        graph, [4, 3], input_nodes=gnnsys.split(graph, "train"), batch_size=plan["batch_size"], shuffle=True, seed=3
    )
    torch.manual_seed(0)
    width = graph.node_data["node"]["x"].shape[1] + (DIM if plan["trains_rows"] else 0)
    # Buckets that are laid out anew after the first backward pass would be summed in another order after a restart.
    model = DistributedDataParallel(GraphSAGE(width, 16, 2, CLASSES, dropout=0.3), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    embedding = sparse = None
    if plan["trains_rows"]:
        embedding = gnnsys.DistEmbedding(graph, graph.num_nodes(), DIM, "users")
        sparse = gnnsys.SparseAdam([embedding], lr=0.02)
        states |= {"users": embedding, "sparse": sparse}
    torch.manual_seed(100 + session.rank)  # every rank drops other units

    where = folder / (f"checkpoints-{session.machine}" if plan["own_disks"] else "checkpoints")
    injector.reached("resume-again" if log.has_lines else "resume")
    saver = gnnsys.resume(where, every=plan["every"], session=session, **states)
    saver.on_stage = lambda stage: injector.reached(  # one save is over before the next begins
        f"{stage.replace(' ', '-')}:{saver.steps // plan['every'] * plan['every']}"
    )
    log.write(resumed=saver.steps)
    for epoch in range(loader.epoch, plan["epochs"]):
        for batch in loader:
            x = batch.x if embedding is None else torch.cat([batch.x, embedding(batch.n_id)], 1)
            out = model(x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size], reduction="sum") / max(1, batch.batch_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if sparse is not None:
                sparse.lr = 2 * scheduler.get_last_lr()[0]
                sparse.step()
            scheduler.step()
            step = saver.steps + 1
            log.write(step=step, epoch=epoch, seeds=batch.n_id[: batch.batch_size].tolist())
            injector.reached(f"step:{step}")
            saver.step()
    saver.close()
    log.write(shard_lives=[status["life"] for status in session.status()])
    write_end(session, folder, states, embedding)


def write_end(
    session: gnnsys.Session, folder: Path, states: dict[str, Any], embedding: gnnsys.DistEmbedding | None
) -> None:
    """What the job came to. Replicas are alike, so that each rank's can be compared; rows are read by one."""
    end = {name: states[name].state_dict() for name in ("model", "optimizer", "scheduler")}
    end["generator"] = torch.get_rng_state()
    if session.rank == 0 and embedding is not None:
        store = embedding.store
        end["rows"] = {name: store.tensor(name)[:] for name in ("users", "users/exp_avg", "users/exp_avg_sq")}
    torch.save(end, folder / f"end-{session.rank}.pt")


class Log:
    """Lines that stay, however the process ends: each is one write."""

    def __init__(self, path: Path) -> None:
        self.has_lines = path.exists() and path.stat().st_size > 0  # of lives before this one
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")
