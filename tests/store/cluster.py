"""Several machines in one process: a shard behind a real server each, and a store per rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gnnsys.comm import Client, Server
from gnnsys.store import Shard, Store


class Cluster:
    """`stores[r]` is rank r's; ranks are spread over the machines in turn."""

    def __init__(self, shards: list[Shard], servers: list[Server], stores: list[Store], clients: list[Client]) -> None:
        self.shards, self.servers, self.stores, self.clients = shards, servers, stores, clients


@contextmanager
def cluster(machine_of_part: Sequence[int], num_ranks: int = 1, num_machines: int | None = None) -> Iterator[Cluster]:
    """Machines 0, 1, ... that serve the parts as told; everything is closed at the end."""
    count = num_machines or max(machine_of_part) + 1
    shards = [Shard(machine) for machine in range(count)]
    servers = [Server(shard.handlers()).start() for shard in shards]
    peers = {machine: server.endpoints[0] for machine, server in enumerate(servers)}
    clients = [Client(peers, sender=rank, incarnation=rank + 1, timeout=20) for rank in range(num_ranks)]
    stores = [
        Store(
            machine_of_part=machine_of_part,
            machine=rank % count,
            client=client,
            rank=rank,
            world_size=num_ranks,
        )
        for rank, client in enumerate(clients)
    ]
    try:
        yield Cluster(shards, servers, stores, clients)
    finally:
        for closing in [*clients, *servers, *shards]:
            closing.close()
