"""A server at full load, clients coming and going: memory, descriptors, threads and throughput are flat, or it fails.

    python -m tests.fuzz.soak --seconds 600

Two clients pull rows without pause, checked; a third is made anew every time: it pulls, pushes, creates a table, drops
it and leaves, every other time without a word (its process's sockets are simply closed).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from gnnsys.comm import Client
from gnnsys.graph import Graph
from gnnsys.partition import open_parts
from gnnsys.sampling import graph_tables
from gnnsys.store import Pull, Store
from gnnsys.store.spec import node_table
from tests.fuzz.served import NUM_NODES, NUM_PARTS, Served, Usage, served, write_graph

MEMORY_SLACK = 32 << 20
DESCRIPTOR_SLACK = 16
_ROWS = 2000


class Load:
    """Clients in threads; `num_pulls` counts what they were answered, and the first error ends them all."""

    def __init__(self, folder: Path, endpoint: str, graph: Graph) -> None:
        self.num_pulls = self.num_clients = 0
        self.error: BaseException | None = None
        self._endpoint, self._ended = endpoint, threading.Event()
        parts = open_parts(folder)
        (self._type,) = graph.node_types
        self._specs = graph_tables(parts)
        self._x = torch.empty(NUM_NODES, 16)
        for part in range(NUM_PARTS):
            own = parts.book.part_range(part)
            self._x[own.start : own.stop] = parts.part(part).node_data[self._type]["x"]
        self._threads = [threading.Thread(target=self._guard, args=(body,), daemon=True) for body in
                         (self._pull_on, self._pull_on, self._come_and_go)]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def _store(self, sender: int) -> tuple[Client, Store]:
        client = Client({0: self._endpoint}, sender=sender, incarnation=1, timeout=30)
        store = Store(machine_of_part=[0] * NUM_PARTS, machine=-1, client=client, rank=0, world_size=1)
        for spec in self._specs.values():
            store.register(spec)
        return client, store

    def _guard(self, body) -> None:
        try:
            body()
        except BaseException as error:
            self.error = self.error or error
            self._ended.set()

    def _pull(self, store: Store, generator: torch.Generator) -> None:
        ids = torch.randint(0, NUM_NODES, (_ROWS,), generator=generator)
        (rows,) = store.pull([Pull(node_table(self._type, "x"), ids)]).result()
        assert torch.equal(rows, self._x[ids]), "rows are not those of the graph"
        self.num_pulls += 1

    def _pull_on(self) -> None:
        client, store = self._store(0)
        with client:
            generator = torch.Generator().manual_seed(0)
            while not self._ended.is_set():
                self._pull(store, generator)

    def _come_and_go(self) -> None:
        generator = torch.Generator().manual_seed(1)
        while not self._ended.is_set():
            client, store = self._store(1 + self.num_clients % 50)
            with client:
                self._pull(store, generator)
                name = f"for a while {self.num_clients}"
                store.create(name, 1000, (4,))
                store.push(name, torch.arange(10), torch.ones(10, 4)).result()
                store.drop(name)
                if self.num_clients % 2:  # leaves with something unanswered
                    store.pull([Pull(node_table(self._type, "x"), torch.arange(NUM_NODES))])
            self.num_clients += 1

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)


def soak(folder: Path, seconds: float, every: float) -> str | None:
    """What grew or fell; None where everything was flat. The first fifth is for getting there."""
    graph = write_graph(folder)
    with served(folder) as server:
        load = Load(folder, server.endpoint, graph)
        try:
            return _watch(server, load, seconds, every)
        finally:
            load.close()


def _watch(server: Served, load: Load, seconds: float, every: float) -> str | None:
    usages: list[Usage] = []
    rates: list[float] = []
    began = now = time.monotonic()
    while now - began < seconds:
        pulls, cpu = load.num_pulls, _cpu_seconds(server.process.pid)
        time.sleep(every)  # the measure itself, not a wait for something
        if load.error is not None or server.process.poll() is not None:
            return f"{load.error!r}, exit code {server.process.poll()}"
        usages.append(server.usage())
        spent = _cpu_seconds(server.process.pid) - cpu
        rates.append((load.num_pulls - pulls) / max(spent, 1e-9))
        now = time.monotonic()
        print(
            f"{now - began:6.0f} s  {(load.num_pulls - pulls) / every:8.0f} pulls/s  {rates[-1]:8.0f} per CPU second  "
            f"{load.num_clients} clients came and went  {usages[-1]}",
            flush=True,
        )
    return judge(usages, rates)


def judge(usages: list[Usage], rates: list[float]) -> str | None:
    """Throughput is judged per second of the server's CPU time: what else the machine does is not the server's."""
    first = len(usages) // 5
    settled, last = usages[first], usages[-1]
    if last.memory > settled.memory + MEMORY_SLACK:
        return f"memory grew from {settled.memory} to {last.memory} bytes"
    if last.descriptors > settled.descriptors + DESCRIPTOR_SLACK or last.tables > settled.tables + DESCRIPTOR_SLACK:
        return f"descriptors grew: {settled}, {last}"
    if last.threads > settled.threads:
        return f"threads grew: {settled}, {last}"
    third = max(1, (len(rates) - first) // 3)
    before, after = statistics.median(rates[first : first + third]), statistics.median(rates[-third:])
    if after < 0.7 * before:
        return f"throughput fell from {before:.0f} to {after:.0f} pulls per CPU second"
    return None


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gnnsys-soak-") as folder:
        why = soak(Path(folder) / "parts", args.seconds, min(args.every, args.seconds / 5))
    print("FAILED: " + why if why else "flat", flush=True)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
