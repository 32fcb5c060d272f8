"""Lives of a job on two machines, one after the other in the same two processes: what the test of ranks runs.

A life that is cut short ends the writing thread of rank 1 where a killed process would have ended, and leaves the rest
as it is then. Prints one JSON object per life.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import gnnsys
from tests.checkpoint.training import Job, digest

DEADLINE = 180.0


class Killed(BaseException):
    """What ends a thread and is caught by nobody."""


def life(session: gnnsys.Session, name: str, parts: str, folder: str, until: int, every: int, **how: Any) -> None:
    """Trains to step `until`; with `cut`, in whose save rank 1 ends at that stage. `flip`: machines change places."""
    cut = how.get("cut")
    where = Path(folder.format(machine=(session.machine + how.get("flip", 0)) % 2))
    job = Job(gnnsys.open(parts, verify=False))
    saver = gnnsys.resume(where, every=every, **job.states)
    told = {"life": name, "from": saver.steps}
    saves = []

    def end(stage: str) -> None:
        saves.append(stage)
        if session.rank == 1 and stage == cut and saves.count("begun") == until // every:
            raise Killed

    saver.on_stage = end
    job.run(saver, until)
    session.barrier()
    told |= {"losses": [loss.hex() for _, loss in sorted(job.losses.items())], "trained": digest(job.values())}
    if cut is None:
        saver.close()
    else:
        give_up(session, saver, where / f"step-{until:010d}")
    session.barrier()
    told["folder"] = sorted(path.name for path in where.iterdir() if not path.name.startswith("."))
    if session.rank == 0 and how.get("drop"):
        for table in (job.embedding.name, job.scores.name):
            job.embedding.store.drop(table)
    session.barrier()
    job.loader.close()
    print(json.dumps(told), flush=True)


def give_up(session: gnnsys.Session, saver: gnnsys.Saver, named: Path) -> None:
    """Ends a save that rank 1 has left, once rank 0 has done all that it does alone: it names the checkpoint."""
    writer, deadline = saver._thread, time.monotonic() + DEADLINE
    assert writer is not None
    if session.rank == 1:
        writer.join(DEADLINE)  # it ends by itself, at its stage
    while session.rank == 0 and not named.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    saver.close(wait=False)
    writer.join(DEADLINE)
    assert not writer.is_alive()


class Strange:
    """A state that cannot be read back without unpickling."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError


def complaints(session: gnnsys.Session, parts: str, base: str) -> None:
    """What is wrong on one rank is told on both."""
    graph = gnnsys.open(parts, verify=False)
    table = graph.store.create("t", 10)
    errors = []
    bad = slice(1) if session.rank == 1 else 1
    try:
        gnnsys.resume(f"{base}/strange", strange=Strange(bad), table=table)
    except ValueError as error:
        errors.append(str(error))
    strange = Strange(1)
    with gnnsys.resume(f"{base}/strange", strange=strange, table=table) as saver:
        strange.value = bad
        for _ in range(session.rank):
            saver.steps += 1
        for act in (saver.save, lambda: setattr(saver, "steps", 5), saver.save):
            try:
                act()
            except ValueError as error:
                errors.append(str(error))
    session.barrier()
    left = [path.name for path in Path(f"{base}/strange").iterdir()]
    own = f"{base}/file" if session.rank else f"{base}/other"
    for folder, names in ((base, "table" if session.rank else "other"), (own, "table")):
        try:
            gnnsys.resume(folder, **{names: table})
        except ValueError as error:
            errors.append(str(error))
    for number in range(2):  # savers of one session do not hear each other
        with gnnsys.resume(f"{base}/twice-{number}", table=table, asynchronous=False) as saver:
            saver.save()
    uneven = gnnsys.DistEmbedding(graph.store, None, 2, "uneven", bounds=(0, 10, 10))  # machine 1 has none of it
    sparse, steps = gnnsys.SparseAdam([uneven], 0.1), []
    for _ in range(2):
        with gnnsys.resume(f"{base}/uneven", uneven=uneven, sparse=sparse, asynchronous=False) as saver:
            uneven(torch.arange(3)).sum().backward()
            sparse.step()
            saver.step()
            saver.save()
            steps.append(saver.steps)
    print(json.dumps({"life": "complaints", "errors": errors, "left": left, "uneven": steps}), flush=True)


def main() -> None:
    threading.excepthook = lambda args: None  # Killed: as silent as a kill is
    parts, base = sys.argv[1:]
    with gnnsys.init(timeout=120) as session:
        life(session, "unbroken", parts, f"{base}/shared", 8, 4, drop=True)
        life(session, "cut", parts, f"{base}/own-{{machine}}", 6, 2, cut="described")
    with gnnsys.init(timeout=120) as session:
        life(session, "resumed", parts, f"{base}/own-{{machine}}", 8, 2, flip=1)
        life(session, "grown", parts, f"{base}/alone", 9, 3)
        complaints(session, parts, base)


if __name__ == "__main__":
    main()
