"""The store is a dictionary of dense tensors: whatever several clients do at once, and whatever their wires do.

Every thread of every rank pushes rows of its own, which nobody else writes, and reads them back at once; all ranks add
to common rows and take steps together; in between one of them makes, saves, loads or drops tables. Meanwhile
connections are cut and replies and requests swallowed. What is done follows from the seed; so do the faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.comm import Client, Kind, Server
from gnnsys.store import Pull, Shard, Store
from tests.comm.endpoints import Proxy
from tests.store.cluster import DEADLINE, generator

# To replay a case: GNNSYS_TEST_SEEDS="17" pytest tests/store/test_model.py
GIVEN = [int(seed) for seed in os.environ.get("GNNSYS_TEST_SEEDS", "").split()]
SEEDS = GIVEN or [1, pytest.param(2, marks=pytest.mark.long)]
MACHINE_OF_PART = (0, 1, 1)
MACHINES = (0, 1, 7)  # of the ranks: two read some rows by themselves, the last has all from afar
THREADS = 2  # of every rank
NUM_RANKS = len(MACHINES)
WRITERS = NUM_RANKS * THREADS
ROWS = 20 * WRITERS
PHASES, TURNS = 4, 6
ADAGRAD = {"kind": "adagrad", "lr": 0.5, "lr_decay": 0.0, "initial": 0.0, "eps": 1e-3}


class Model:
    """What the tables hold: rows, and the sums of squares that the optimizer keeps for those that train."""

    def __init__(self) -> None:
        self.tables: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.saved: dict[str, tuple[str, Tensor, Tensor]] = {}  # by folder: the table, its rows, its sums
        self.lock = threading.Lock()

    def create(self, name: str, dtype: torch.dtype) -> None:
        self.tables[name] = torch.zeros(ROWS, 4, dtype=dtype)
        self.sums[name] = torch.zeros(ROWS, 4)

    def push(self, name: str, ids: Tensor, rows: Tensor, mode: str) -> None:
        with self.lock:
            for i, row in zip(ids.tolist(), rows, strict=True):
                self.tables[name][i] = row if mode == "write" else self.tables[name][i] + row

    def step(self, name: str, brought: list[tuple[Tensor, Tensor]]) -> None:
        total = torch.zeros(ROWS, 4)
        for ids, grads in brought:
            total.index_add_(0, ids, grads)
        mean = total / NUM_RANKS
        touched = torch.cat([ids for ids, _ in brought]).unique()
        self.sums[name][touched] += mean[touched] ** 2
        self.tables[name][touched] -= 0.5 * mean[touched] / (self.sums[name][touched].sqrt() + 1e-3)

    def save(self, name: str, folder: str) -> None:
        self.saved[folder] = (name, self.tables[name].clone(), self.sums[name].clone())

    def load(self, folder: str) -> str:
        name, rows, sums = self.saved[folder]
        self.tables[name], self.sums[name] = rows.clone(), sums.clone()
        return name

    def drop(self, name: str) -> None:
        del self.tables[name], self.sums[name]


class Wires:
    """A proxy between every rank and every machine, and a thread that breaks one after the other."""

    def __init__(self, servers: list[Server], seed: int) -> None:
        self.proxies = [[Proxy(server.endpoints[0]) for server in servers] for _ in MACHINES]
        self.done: list[str] = []
        self._chance = random.Random(f"wires {seed}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._break, daemon=True)
        self._thread.start()

    def _break(self) -> None:
        while not self._stop.is_set():
            rank, machine = self._chance.randrange(NUM_RANKS), self._chance.randrange(len(set(MACHINE_OF_PART)))
            what = self._chance.choice(["replies", "requests", "cut"])
            proxy = self.proxies[rank][machine]
            if what != "cut":
                proxy.swallow = what
                if not proxy.wait_swallowed(1, timeout=0.3):
                    what = "nothing"
            proxy.cut()
            self.done.append(what)
            self._stop.wait(self._chance.uniform(0.02, 0.2))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE)
        for proxy in [proxy for proxies in self.proxies for proxy in proxies]:
            proxy.close()


@contextlib.contextmanager
def broken_cluster(seed: int) -> Iterator[tuple[list[Store], list[Client], Wires]]:
    """A store per rank, each behind wires of its own that break all the time."""
    shards = [Shard(machine) for machine in sorted(set(MACHINE_OF_PART))]
    servers = [Server(shard.handlers(), short={Kind.PULL: shard.answer_small}).start() for shard in shards]
    wires = Wires(servers, seed)
    clients = [
        Client(
            {machine: proxy.endpoint for machine, proxy in enumerate(proxies)},
            sender=rank, incarnation=1, timeout=DEADLINE, resend_after=0.15, ping_interval=0.1, lost_after=DEADLINE,
        )
        for rank, proxies in enumerate(wires.proxies)
    ]  # fmt: skip
    try:
        stores = [
            Store(machine_of_part=MACHINE_OF_PART, machine=machine, client=client, rank=rank, world_size=NUM_RANKS)
            for rank, (machine, client) in enumerate(zip(MACHINES, clients, strict=True))
        ]
        yield stores, clients, wires
    finally:
        for closing in [*clients, wires, *servers, *shards]:
            closing.close()


def work(store: Store, thread: int, model: Model, seed: str) -> None:
    """What one thread of a rank does in a phase. It reads its own writes after each of them."""
    writer, chance = store.rank * THREADS + thread, random.Random(f"{seed} {store.rank} {thread}")
    names = sorted(name for name in model.tables if name.startswith("own"))
    for turn in range(TURNS):
        draws = generator(chance.randrange(1 << 30))
        for name in chance.sample(names, min(2, len(names))):
            ids = torch.randint(0, ROWS // WRITERS, (chance.randrange(1, 12),), generator=draws) * WRITERS + writer
            rows = (torch.randn(len(ids), 4, generator=draws) * 50).to(model.tables[name].dtype)
            mode = chance.choice(["write", "add"])
            pending = store.push(name, ids, rows, mode)
            model.push(name, ids, rows, mode)
            if chance.random() < 0.3:
                pending.result()
        if chance.random() < 0.5:
            ids, rows = torch.randint(0, ROWS, (5,), generator=draws), torch.arange(20).view(5, 4) - writer
            store.push("common", ids, rows, "add")
            model.push("common", ids, rows, "add")
        mine = torch.arange(writer, ROWS, WRITERS)
        name = chance.choice(names)
        (found,) = store.pull([Pull(name, mine)]).result()
        assert torch.equal(found, model.tables[name][mine]), f"turn {turn}: rank {store.rank} does not read its writes"
        if thread == 0 and turn % 3 == 0:
            take_step(store, f"{seed} {turn}", model)
    store.flush()


def gradients(rank: int, seed: str) -> tuple[Tensor, Tensor]:
    draws = generator(random.Random(f"{seed} step {rank}").randrange(1 << 30))
    ids = torch.randint(0, ROWS, (7 * rank,), generator=draws)
    return ids, torch.randn(len(ids), 4, generator=draws)


def take_step(store: Store, seed: str, model: Model) -> None:
    """All ranks do this in the same turns. The next step needs this rank too: what it reads now is this one."""
    store.step("trained", *gradients(store.rank, seed), ADAGRAD).result()
    with model.lock:
        if seed not in model.saved:  # the first rank that is back applies it to the model
            model.step("trained", [gradients(rank, seed) for rank in range(NUM_RANKS)])
            model.saved[seed] = ("", torch.empty(0), torch.empty(0))
        expected = model.tables["trained"].clone()
    torch.testing.assert_close(store.tensor("trained")[:], expected, msg=lambda text: f"rank {store.rank}: {text}")


def administer(stores: list[Store], model: Model, chance: random.Random, folder: Path) -> str:
    """One thing that is done to whole tables, while nobody pushes; what it was."""
    some = chance.choice(stores)
    names = sorted(model.tables)
    folders = sorted(path for path, (name, _, _) in model.saved.items() if name)
    what = chance.choice(["create", "save", "load", "drop"] if folders else ["create", "save"])
    if what == "create":
        name = f"own-{len(names)}-{chance.randrange(100)}"
        dtype = chance.choice([torch.float32, torch.int64, torch.bfloat16])
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            for made in [pool.submit(store.create, name, ROWS, (4,), dtype) for store in stores]:
                made.result(DEADLINE)
        model.create(name, dtype)
    elif what == "save":
        name, target = chance.choice(names), str(folder / str(len(model.saved)))
        some.save(name, target)
        model.save(name, target)
    elif what == "load":
        target = chance.choice(folders)
        name = model.load(target)
        for store in stores:
            store.load(name, target)
    else:
        name = chance.choice([name for name in names if name.startswith("own")])
        some.drop(name)
        model.drop(name)
        with pytest.raises(ValueError, match="does not exist"):
            chance.choice(stores).tensor(name)[torch.arange(3)]
        if not any(name.startswith("own") for name in model.tables):
            some.create("own", ROWS, (4,))
            model.create("own", torch.float32)
    return f"{what} {name}"


def compare(store: Store, model: Model, what: str) -> None:
    for name, rows in model.tables.items():
        found = store.tensor(name)[:]
        told = f"after {what}: rank {store.rank} finds another table {name!r} than the model has"
        if name == "trained":
            torch.testing.assert_close(found, rows, msg=lambda text, told=told: f"{told}: {text}")
        else:
            assert torch.equal(found, rows), told


@pytest.mark.parametrize("seed", SEEDS)
def test_the_store_is_a_dictionary_of_tensors_whatever_clients_and_wires_do(seed, tmp_path):
    model, chance = Model(), random.Random(seed)
    with broken_cluster(seed) as (stores, clients, wires), ThreadPoolExecutor(WRITERS) as pool:
        for name, dtype in (("own", torch.float32), ("common", torch.int64), ("trained", torch.float32)):
            stores[0].create(name, ROWS, (4,), dtype)
            model.create(name, dtype)
        for phase in range(PHASES):
            jobs = [(store, thread, model, f"{seed} {phase}") for store in stores for thread in range(THREADS)]
            for running in [pool.submit(work, *job) for job in jobs]:
                running.result(DEADLINE)
            for store in stores:
                compare(store, model, f"phase {phase}")
            for _ in range(2):
                what = administer(stores, model, chance, tmp_path)
                for store in stores:
                    compare(store, model, what)
        resent = sum(client.counters()["events"].get("resent", 0) for client in clients)
    assert {"replies", "requests", "cut"} <= set(wires.done) and resent > 0, f"nothing was broken: {wires.done}"
