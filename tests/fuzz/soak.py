"""A server at full load, clients coming and going: memory, descriptors, threads and throughput are flat, or it fails.

    python -m tests.fuzz.soak --seconds 600

Two clients pull rows without pause, checked; a third is made anew every time: it pulls, pushes, creates a table, drops
it and leaves, every other time without a word (its process's sockets are simply closed).

Clients ask again as soon as they are answered, so what they ask is what is answered, and throughput is what must not
fall: per second of the server's CPU time always; per second of the clock where the machine was otherwise idle, for
else the figure is of what others did. An interval in which nobody was answered fails in any case.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

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
IDLE_SHARE = 0.1  # of the machine's processors that others may take while throughput is judged by the clock
LEAST_SHARE = 0.7  # of the throughput at first that is left at last
_ROWS = 2000
_TICKS = os.sysconf("SC_CLK_TCK")


class Interval(NamedTuple):
    """What was answered, per second of the server's CPU time and per second, and the share of others in the machine."""

    per_cpu_second: float
    per_second: float
    others: float = 0.0


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
        client = Client({0: self._endpoint}, sender=sender, incarnation=1, timeout=120)
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
            thread.join(180)


def soak(folder: Path, seconds: float, every: float, *, by_rate: bool = True) -> str | None:
    """What grew or, `by_rate`, fell; None where everything was flat. The first fifth is for getting there."""
    graph = write_graph(folder)
    with served(folder) as server:
        load = Load(folder, server.endpoint, graph)
        try:
            return _watch(server, load, seconds, every, by_rate)
        finally:
            load.close()


def _watch(server: Served, load: Load, seconds: float, every: float, by_rate: bool) -> str | None:
    usages: list[Usage] = []
    intervals: list[Interval] = []
    began = now = time.monotonic()
    while now - began < seconds:
        pulls, clocks, last = load.num_pulls, _clocks(server.process.pid), now
        time.sleep(every)  # the measure itself, not a wait for something
        if load.error is not None or server.process.poll() is not None:
            return f"{load.error!r}, exit code {server.process.poll()}"
        usages.append(server.usage())
        now = time.monotonic()
        own, all_of_them, spent = (
            after - before for before, after in zip(clocks, _clocks(server.process.pid), strict=True)
        )
        others = max(0.0, all_of_them - own - spent) / ((now - last) * (os.cpu_count() or 1))
        num_pulls = load.num_pulls - pulls
        intervals.append(Interval(num_pulls / max(spent, 1e-9), num_pulls / (now - last), others))
        print(
            f"{now - began:6.0f} s  {intervals[-1].per_second:8.0f} pulls/s  {intervals[-1].per_cpu_second:8.0f} per "
            f"CPU second  others {others:4.0%}  {load.num_clients} clients came and went  {usages[-1]}",
            flush=True,
        )
    return judge(usages, intervals if by_rate else [])


def judge(usages: list[Usage], intervals: list[Interval]) -> str | None:
    """What grew or fell since the first fifth."""
    first = len(usages) // 5
    settled, last = usages[first], usages[-1]
    if last.memory > settled.memory + MEMORY_SLACK:
        return f"memory grew from {settled.memory} to {last.memory} bytes"
    if last.descriptors > settled.descriptors + DESCRIPTOR_SLACK or last.tables > settled.tables + DESCRIPTOR_SLACK:
        return f"descriptors grew: {settled}, {last}"
    if last.threads > settled.threads:
        return f"threads grew: {settled}, {last}"
    if not all(each.per_second for each in intervals[first:]):
        return "nobody was answered for a while"
    if not intervals:
        return None
    idle = [each for each in intervals[first:] if each.others <= IDLE_SHARE]
    fell = _fall([each.per_cpu_second for each in intervals[first:]], "pulls per CPU second")
    if len(idle) < (len(intervals) - first) / 2:
        print("not judged by the clock: others have used the machine", flush=True)
        return fell
    return fell or _fall([each.per_second for each in idle], "pulls per second")


def _fall(rates: list[float], unit: str) -> str | None:
    third = max(1, len(rates) // 3)
    before, after = statistics.median(rates[:third]), statistics.median(rates[-third:])
    return f"throughput fell from {before:.0f} to {after:.0f} {unit}" if after < LEAST_SHARE * before else None


def _clocks(pid: int) -> tuple[float, float, float]:
    """Seconds of CPU time so far: of this process, of all processes, of the one that serves."""
    with open(
        "/proc/stat"
    ) as file:  # user nice system idle iowait irq softirq; the rest is the hypervisor's, or a part
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return time.process_time(), (user + nice + system + irq + softirq) / _TICKS, _cpu_seconds(pid)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


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
