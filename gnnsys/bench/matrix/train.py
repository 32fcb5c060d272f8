"""One rank of a cell: `torchrun -m gnnsys.bench.matrix.train CELL RESULT`, an ordinary script.

CELL says what to train, a file or the text of one. Rank 0 writes RESULT: what was measured, repeat by repeat; it prints
it where RESULT is "-". It prints a line when all ranks are ready, and one when a repeat begins or ends: whoever started
the job may set limits and read counters then.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import gnnsys
from gnnsys.bench.await_file import WAIT_SECONDS, await_file
from gnnsys.bench.matrix.cell import (
    FIGURES,
    FULL_GRAPH,
    GO_FILE,
    MINI_BATCH,
    PRINTED,
    READY,
    REPLICATED,
    SHARE_CORES,
    Cell,
)
from gnnsys.bench.matrix.full_graph import FullGraphTrainer, ReplicatedTrainer
from gnnsys.bench.matrix.mini_batch import MiniBatchTrainer
from gnnsys.bench.matrix.rank_trainer import RankTrainer
from gnnsys.bench.report import hardware, library_versions
from gnnsys.observe import num_usable_cores

TRAINERS: dict[str, type[RankTrainer]] = {
    MINI_BATCH: MiniBatchTrainer,
    FULL_GRAPH: FullGraphTrainer,
    REPLICATED: ReplicatedTrainer,
}
PIECE = 30_000  # characters of a printed line: a launcher may cut longer ones


def main(cell: Cell, result: str) -> None:
    options = cell.options
    if SHARE_CORES in os.environ:
        torch.set_num_threads(max(1, num_usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.manual_seed(options.seed)
    with gnnsys.init(timeout=WAIT_SECONDS, encrypt=options.encrypt, device=options.device) as session:
        trainer = TRAINERS[options.training](session, gnnsys.open(cell.parts, verify=False), cell)
        session.barrier()
        trainer.say(READY)
        if session.rank == 0 and GO_FILE in os.environ:
            await_file(Path(os.environ[GO_FILE]))
        session.barrier()
        ranks = session.group.gather("suite-figures", [asdict(figures) for figures in trainer.measure()])
        hosts = session.group.gather("suite-hosts", {host_name(): hardware()})
        if session.rank == 0:
            told = {
                "device": str(session.device), "world_size": session.world_size, "ranks": ranks,
                "hosts": {name: facts for each in hosts for name, facts in each.items()},
                "versions": library_versions(),
            }  # fmt: skip
            write_figures(json.dumps(told), result)
        trainer.close()


def host_name() -> str:
    """As the launcher knows it."""
    return os.environ.get("GNNSYS_LAUNCH_HOST") or socket.gethostname()


def write_figures(text: str, result: str) -> None:
    """To the file, or as lines that begin with the number of each."""
    if result != PRINTED:
        Path(result).write_text(text)
        return
    for number, begin in enumerate(range(0, len(text), PIECE)):
        print(f"{FIGURES} {number} {text[begin : begin + PIECE]}", flush=True)


def read_cell(told: str) -> Cell:
    return Cell.from_text(told if told.startswith("{") else Path(told).read_text())


if __name__ == "__main__":
    main(read_cell(sys.argv[1]), sys.argv[2])
