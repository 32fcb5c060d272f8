"""What one more trainer on a machine takes: processes that open the same parts and load the same batches.

What the second adds is what it shares with nobody (private pages, clean or not), once the first has touched the same
pages. Of that, what a process takes that has only imported everything is not the graph's doing, and is taken off. (Sums
of PSS would not do: a graph server that maps the same files has its share of them, which shrinks.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from gnnsys.bench.case import OURS, Case, Side, Versus, value
from gnnsys.bench.child_process import Child
from gnnsys.bench.two_machines import parts_folder
from gnnsys.bench.workload import Workload

SHARE = 0.15
MODULE = "gnnsys.bench.store.load_batches"


def memory(work: Workload) -> Iterator[Case]:
    def sides() -> dict[str, Side]:
        found = work.once("memory", lambda: _measure(parts_folder(work)))
        graph_bytes = folder_bytes(parts_folder(work))
        return {
            OURS: Side(lambda: (found["second"] - found["bare"]) / 1e6),
            "share of the graph": Side(lambda: SHARE * graph_bytes / 1e6),
            "first trainer": Side(lambda: (found["first"] - found["bare"]) / 1e6),
            "bare process": Side(lambda: found["bare"] / 1e6),
        }

    versus = (Versus(("share of the graph",), 1.0), Versus(("first trainer",)), Versus(("bare process",)))
    yield Case("memory/one more trainer", value("MB"), sides, versus, repeats=1)


def _measure(parts: Path) -> dict[str, float]:
    """Bytes: of a process without a graph, of the first trainer, and what the second adds."""
    with ExitStack() as stack:
        bare = stack.enter_context(Child(MODULE))
        bare.answer()
        alone = proportional_bytes(bare.pid, only_private=True)
        first = stack.enter_context(Child(MODULE, str(parts)))
        first.answer()
        trainer = proportional_bytes(first.pid)
        second = stack.enter_context(Child(MODULE, str(parts)))
        second.answer()
        return {"bare": alone, "first": trainer, "second": proportional_bytes(second.pid, only_private=True)}


def proportional_bytes(pid: int, *, only_private: bool = False) -> float:
    """Memory of a process with shared pages divided among those that share them; or only what it has to itself."""
    fields = ("Private_Clean:", "Private_Dirty:") if only_private else ("Pss:",)
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return 1024.0 * sum(int(line[1]) for line in lines if line[0] in fields)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.npy"))
