"""A cell on hosts of the lab: its limits hold from the moment that all ranks are ready; links are read per repeat."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.bench.matrix.cell import GO_FILE, READY, REPEAT, Cell
from gnnsys.bench.matrix.processes import Ended
from gnnsys.lab import Lab


def run_in_lab(cell: Cell, job: list[str], folder: Path) -> tuple[Ended, list[dict[int, list[int]]]]:
    """How it ended, and per repeat what went into and out of every host."""
    go = folder / "go"
    go.unlink(missing_ok=True)
    reads: list[dict[int, Any]] = []
    with Lab(cell.hosts) as lab:

        def hear(line: str) -> None:
            if line.startswith(READY):  # importing torch is not what is measured
                lab.set_rate(cell.options.rate)
                lab.set_cpu(cell.options.cpu)
                go.touch()
            elif line.startswith(REPEAT):
                reads.append(lab.bytes())

        results = lab.run(
            ["--nproc-per-node", str(cell.trainers), *job],
            timeout=cell.deadline,
            check=False,
            env=trainer_environment(**{GO_FILE: str(go)}),
            heard=lambda _, line: hear(line),
        )
    failed = [result for result in results if not result.ok]
    output = "\n".join(f"--- h{result.host}\n{result.output}" for result in failed or results)
    moved = [{host: after[host] - of for host, of in before.items()} for before, after in pairwise(reads)]
    traffic = [{host: [of.bytes_in, of.bytes_out] for host, of in each.items()} for each in moved]
    late = any(result.code is None for result in failed) and all(result.code in (None, 0) for result in results)
    code = 0 if not failed else None if late else next(r.code for r in failed if r.code is not None)
    return Ended(code, output), traffic
