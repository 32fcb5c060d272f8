"""gather_rows into a reused buffer, beside index_select, and reading the same rows without writing any (the limit)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gnnsys.bench.case import OURS, Case, Side, Versus, of_peer, rate
from gnnsys.bench.workload import Workload
from gnnsys.ops import gather_rows, read_rows

READ = "reading alone"
DIM = 128  # 512 bytes a row, as the target says, in quick runs too


def gather(work: Workload) -> Iterator[Case]:
    num_rows = work.sizes.num_nodes
    num_gathered = min(81_000, num_rows // 2)  # the input nodes of a three-hop batch
    for threads in (1, 2):

        def sides(threads: int = threads) -> dict[str, Side]:
            table = work.rows(num_rows, DIM)
            index = work.ids(num_gathered, num_rows)
            ours, selected, copied = (torch.ones(num_gathered, DIM) for _ in range(3))
            theirs = {
                "index_select(out=)": lambda: torch.index_select(table, 0, index, out=selected),
                "index_select": lambda: table.index_select(0, index),
            }
            return {
                OURS: Side(lambda: gather_rows(table, index, out=ours), threads),
                **{name: of_peer(lambda call=call: call, threads) for name, call in theirs.items()},  # type: ignore[misc]
                READ: Side(lambda: read_rows(table, index), threads),
                "memcpy": Side(lambda: copied.copy_(table[:num_gathered]), threads),
            }

        yield Case(
            f"gather_rows/512B/{threads}t",
            rate("GB/s", 1e-9 * num_gathered * DIM * 4),
            sides,
            (
                Versus((READ,), 0.95),
                Versus(("index_select(out=)",), 1.2),
                Versus(("index_select",)),
                Versus(("memcpy",)),
            ),
            limit=READ,
        )


BENCHMARKS = [gather]
