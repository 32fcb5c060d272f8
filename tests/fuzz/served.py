"""A graph server in a process of its own, on a small graph in two parts, and what that process takes of the machine.

`python -m tests.fuzz.served DIR [KEY]` is the process, KEY the file with its key. It prints its endpoint and lives
until its input closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch

from gnnsys.graph import Graph
from gnnsys.partition import Assignment, write_parts

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 180.0
NUM_NODES, NUM_EDGES, NUM_PARTS = 2000, 20_000, 2
M_ARENA_MAX = -8  # of malloc.h
TABLE_BYTES = 32 << 20  # that may be created: what is mutated creates tables, too


def make_graph() -> Graph:
    """Features, a mask, times and weights: something for every kind of request."""
    g = torch.Generator().manual_seed(7)
    node_data = {
        "x": torch.randn(NUM_NODES, 16, generator=g),
        "train_mask": torch.rand(NUM_NODES, generator=g) < 0.3,
        "t": torch.randint(0, 30, (NUM_NODES,), generator=g),
    }
    edge_data = {"w": torch.rand(NUM_EDGES, generator=g), "et": torch.randint(0, 30, (NUM_EDGES,), generator=g)}
    return Graph.from_edge_index(
        torch.randint(0, NUM_NODES, (2, NUM_EDGES), generator=g), NUM_NODES, node_data, edge_data
    )


def write_graph(folder: Path) -> Graph:
    graph = make_graph()
    parts = torch.randint(0, NUM_PARTS, (NUM_NODES,), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    write_parts(graph, Assignment(NUM_PARTS, 1, {t: parts for t in graph.node_types}), folder)
    return graph


@dataclass(frozen=True)
class Usage:
    """What a process has: bytes of memory that are its alone and not a table's, descriptors (but tables'), threads."""

    memory: int
    descriptors: int
    threads: int
    tables: int = 0  # descriptors of tables that were created: bounded by the server's own limit

    @classmethod
    def of(cls, pid: int) -> Usage:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        open_files = []
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                open_files.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        tables = sum("memfd:gnnsys-rows" in target for target in open_files)
        memory = int(fields["RssAnon"].split()[0]) * 1024
        return cls(memory, len(open_files) - tables, int(fields["Threads"]), tables)


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[bytes]
    endpoint: str

    def usage(self) -> Usage:
        return Usage.of(self.process.pid)


@contextlib.contextmanager
def served(folder: Path, key: Path | None = None) -> Iterator[Served]:
    """The server of the parts in `folder`, with the key in a file or with none; ends with the block."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.served", str(folder), *([] if key is None else [str(key)])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Served(process, _read_line(process.stdout.fileno()))
    finally:
        process.stdin.close()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _read_line(source: int) -> str:
    line, deadline = b"", time.monotonic() + DEADLINE
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not wait([source], left):
            raise TimeoutError("the server did not say where it listens")
        piece = os.read(source, 4096)
        if not piece:
            raise RuntimeError("the server ended before it listened")
        line += piece
    return line.decode().strip()


def main(folder: str, key: str | None = None) -> None:
    from gnnsys.comm import make_key
    from gnnsys.session.graph_server import GraphServer, wait_for_end

    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)  # or memory would depend on which thread has answered what
    tables = Path(folder).parent / "tables"
    keys = None if key is None else make_key(key)
    server = GraphServer(alone=True, folder=tables, max_table_bytes=TABLE_BYTES, keys=keys)
    server.open(folder, range(NUM_PARTS))
    print(*server.start(), flush=True)
    try:
        wait_for_end(server.stopped, [], watch_input=True)
    finally:
        server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
