"""Several machines in one process: a shard behind a real server each, and a store per rank."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Client, Kind, Request, Server
from gnnsys.store import Shard, Store, TableSpec

DEADLINE = 180.0


@dataclass
class Cluster:
    """`stores[r]` is rank r's, on machine r modulo the number of machines.

    `pulls` are the requests for rows so far, each with the machine that served it.
    """

    machine_of_part: Sequence[int]
    shards: list[Shard]
    servers: list[Server]
    clients: list[Client]
    stores: list[Store]
    pulls: list[tuple[int, Request]] = field(default_factory=list)

    def add(self, spec: TableSpec, rows: Tensor) -> None:
        """A table of the graph: served by the machines, and mapped by the ranks of each machine."""
        for part, machine in enumerate(self.machine_of_part):
            piece = rows[spec.bounds[part] : spec.bounds[part + 1]]
            self.shards[machine].add(spec, part, piece)
            for store in self.stores:
                store.register(spec)
                if store.machine == machine:
                    store.add_local(spec, part, piece)

    def on_ranks(self, body: Callable[[Store], Any]) -> list[Any]:
        """Runs `body` for every rank at once, each in a thread; what the first one raises is raised here.

        Others may wait for a rank that has failed: they are left to their own deadlines.
        """
        with ThreadPoolExecutor(len(self.stores)) as pool:
            running = [pool.submit(body, store) for store in self.stores]
            done, waiting = wait(running, DEADLINE, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if waiting:
                raise TimeoutError(f"ranks are not done after {DEADLINE} s. All threads:\n{stacks()}")
            return [future.result() for future in running]


def stacks() -> str:
    """Where every thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def noting_pulls(shard: Shard, pulls: list[tuple[int, Request]]) -> dict[int, Any]:
    """A shard's handlers; requests for rows are added to `pulls`."""
    handlers = dict(shard.handlers())
    serve = handlers[Kind.PULL]

    def pull(request: Request) -> Any:
        pulls.append((shard.machine, request))
        return serve(request)

    return {**handlers, Kind.PULL: pull}


@contextmanager
def cluster(
    machine_of_part: Sequence[int], num_ranks: int = 1, lanes: int = 1, *, short: bool = False
) -> Iterator[Cluster]:
    """Machines 0, 1, ... that serve the parts as told; everything is closed at the end.

    With `short`, small pulls are answered from their bytes, and are not among the pulls that are noted.
    """
    shards = [Shard(machine) for machine in range(max(machine_of_part) + 1)]
    pulls: list[tuple[int, Request]] = []
    servers = [
        Server(noting_pulls(shard, pulls), short={Kind.PULL: shard.answer_small} if short else None).start()
        for shard in shards
    ]
    peers = {machine: server.endpoints[0] for machine, server in enumerate(servers)}
    clients = [Client(peers, sender=rank, incarnation=1, timeout=120, lanes=lanes) for rank in range(num_ranks)]
    try:
        yield Cluster(
            machine_of_part, shards, servers, clients,
            [
                Store(
                    machine_of_part=machine_of_part, machine=rank % len(shards), client=client, rank=rank,
                    world_size=num_ranks,
                )
                for rank, client in enumerate(clients)
            ],
            pulls,
        )  # fmt: skip
    finally:
        for closing in [*clients, *servers, *shards]:
            closing.close()


@contextmanager
def alone(num_parts: int = 1) -> Iterator[Store]:
    """A process of its own: the store on its shard, without any socket."""
    shard = Shard(0)
    try:
        yield Store(machine_of_part=[0] * num_parts, local=shard)
    finally:
        shard.close()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_ids(count: int, bound: int, seed: int = 1) -> Tensor:
    return torch.randint(0, bound, (count,), generator=generator(seed))


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed)) * 50).to(dtype)
