"""The steps of the command one by one (DistDGLv2, Table 2), beside DGL's, and what a part's structure takes on disk."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gnnsys.bench import peers
from gnnsys.bench.case import OURS, Case, Refused, Side, Versus, value
from gnnsys.bench.measure import reason_of
from gnnsys.bench.partition.run_one import dgl_graph
from gnnsys.bench.workload import SEED, Workload
from gnnsys.graph import Graph, load, rmat, save
from gnnsys.partition import PartitionOptions, assign_parts, open_parts, write_parts

PARTS = 8
STEPS = ("read", "partition", "write", "load")
BYTES_PER_EDGE, BYTES_PER_NODE = 4.6, 16


def steps(workload: Workload) -> Iterator[Case]:
    """Reading a saved graph, partitioning, writing and loading the parts; at a fifth of the size for DGL's sake."""
    missing = peers.missing("dgl")
    runs = _Runs(workload.sizes.num_nodes // 5, workload.sizes.num_edges // 5, with_dgl="dgl" not in missing)
    for step in STEPS:
        yield _case(
            f"steps/{step}", "s", runs, step, () if step == "read" else ("dgl",) if step == "load" else (), missing
        )
    yield _case("steps/partition and write", "s", runs, "partition and write", ("dgl",), missing)
    yield Case("storage of structure", value("MB"), lambda: _storage(workload), (Versus(("bound",), 1.0),), repeats=1)


def _case(name: str, unit: str, runs: _Runs, step: str, names: tuple[str, ...], missing: dict[str, str]) -> Case:
    def sides() -> dict[str, Side]:
        found = {OURS: Side(lambda: runs.ours[step], 2)}
        return found if missing or not names else found | {"dgl": Side(lambda: runs.dgl[step], 2, foreign=True)}

    versus = tuple(Versus((n,)) for n in names) or (Versus((), required=False, label="-"),)
    return Case(name, value(unit), sides, versus, repeats=1, missing=missing)


class _Runs:
    """Each side once, from a graph saved on disk, when a figure is first asked for."""

    def __init__(self, num_nodes: int, num_edges: int, *, with_dgl: bool) -> None:
        self._size, self._with_dgl = (num_nodes, num_edges), with_dgl
        self._found: dict[str, dict[str, float]] | None = None
        self._refused: str | None = None

    @property
    def ours(self) -> dict[str, float]:
        return self._run()[OURS]

    @property
    def dgl(self) -> dict[str, float]:
        found = self._run()
        if self._refused is not None:
            raise Refused(self._refused)
        return found["dgl"]

    def _run(self) -> dict[str, dict[str, float]]:
        if self._found is None:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "graph"
                save(rmat(*self._size, num_features=64, seed=SEED), source)
                self._found = {OURS: _our_steps(source, Path(folder) / "ours")}
                if self._with_dgl:
                    try:
                        self._found["dgl"] = _dgl_steps(load(source), Path(folder) / "dgl")
                    except Exception as error:  # whatever it is, it is the reason of each of its rows
                        self._refused = reason_of(error)
        return self._found


def _our_steps(source: Path, out: Path) -> dict[str, float]:
    clock = _Clock()
    graph = clock.time("read", lambda: load(source))
    assigned = clock.time("partition", lambda: assign_parts(graph, PARTS, options=PartitionOptions(balance=["edges"])))
    clock.time("write", lambda: write_parts(graph, assigned.assignment, out))
    clock.time("load", lambda: [open_parts(out).part(i) for i in range(PARTS)])
    clock.seconds["partition and write"] = clock.seconds["partition"] + clock.seconds["write"]
    return clock.seconds


def _dgl_steps(graph: Graph, out: Path) -> dict[str, float]:
    import dgl

    theirs = dgl_graph(graph)
    theirs.ndata["x"] = graph.node_data["node"]["x"]
    clock = _Clock()
    with contextlib.redirect_stdout(io.StringIO()):
        clock.time(
            "partition and write",
            lambda: dgl.distributed.partition_graph(theirs, "graph", PARTS, str(out), balance_edges=True),
        )
        config = str(out / "graph.json")
        clock.time("load", lambda: [dgl.distributed.load_partition(config, i) for i in range(PARTS)])
    return clock.seconds


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, step: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.seconds[step] = time.perf_counter() - start
        return result


def _storage(workload: Workload) -> dict[str, Side]:
    """Structure without edge ids: offsets, neighbours, halo tables and original ids of all parts."""

    def ours() -> float:
        torch.set_num_threads(2)
        graph = workload.graph
        assigned = assign_parts(graph, PARTS, options=PartitionOptions(balance=["edges"]))
        with tempfile.TemporaryDirectory() as folder:
            write_parts(graph, assigned.assignment, Path(folder) / "parts", edge_ids=False)
            stored = open_parts(Path(folder) / "parts").stored_bytes()
        return sum(stored[role] for role in ("indptr", "indices", "halo", "original_ids")) / 1e6

    sizes = workload.sizes
    bound = BYTES_PER_EDGE * sizes.num_edges + BYTES_PER_NODE * sizes.num_nodes
    return {OURS: Side(ours, 2), "bound": Side(lambda: bound / 1e6)}
