"""A graph in two parts: one mapped here, the other behind a graph server in a process of its own, over loopback."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from gnnsys.bench.workload import Workload
from gnnsys.comm import Client, Keys, Kind
from gnnsys.graph import EDGE, MANIFEST, NODE, Graph
from gnnsys.partition import Placement, open_parts, partition_graph
from gnnsys.sampling import DistGraph
from gnnsys.session import ServerProcess
from gnnsys.store import Store

HERE, THERE = 0, 1
_OPEN_SECONDS = 600.0
NUM_CLASSES = 47


class TwoMachines:
    """Machine 0 is this process with part 0, machine 1 the server with part 1. `tables` is a store whose parts are all
    at the server, for tables made at run time. There are `lanes` connections, each with a thread of its own at both
    ends."""

    def __init__(self, path: Path, *, keys: Keys | None = None, lanes: int = 1) -> None:
        self._server = ServerProcess()
        self._client: Client | None = None
        try:
            threads = max(2, lanes)
            self._server.order(THERE, bind=["tcp://127.0.0.1:*"], keys=keys, threads=threads, io_threads=lanes)
            endpoint = self._server.endpoints(_OPEN_SECONDS)[0]
            client = self._client = Client({THERE: endpoint}, sender=0, incarnation=1, keys=keys, lanes=lanes)
            options = {"path": str(path), "parts": [THERE], "verify": False}
            client.request(THERE, Kind.OPEN, options=options, timeout=_OPEN_SECONDS).result()
            parts, machine_of_part = open_parts(path, verify=False), [HERE, THERE]
            self.store = Store(machine_of_part=machine_of_part, machine=HERE, client=client)
            self.tables = Store(machine_of_part=[THERE], machine=HERE, client=client)
            self.graph = DistGraph(parts, self.store, client, HERE, machine_of_part)
            self.graph.placement = Placement(0, (HERE,), tuple(machine_of_part))
            bounds = self.store.spec(f"node/{NODE}/x").bounds
        except BaseException:
            self.close()
            raise
        self.first_there = bounds[1]
        """Global ids from here on are at the server."""

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._server.close()

    def __enter__(self) -> TwoMachines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def two_machines(work: Workload, *, encrypts: bool | str = False, lanes: int = 1) -> TwoMachines:
    """The run's own, started when first asked for; with `encrypts` it has a key: True for sealed rows, or "curve"."""
    keys = Keys.generate(encrypts=encrypts) if encrypts else None
    name = f"two machines {encrypts=} {lanes=}"
    return work.once(name, lambda: work.enter(TwoMachines(parts_folder(work), keys=keys, lanes=lanes)))


def parts_folder(work: Workload) -> Path:
    """The run's power-law graph with features, labels and a second table, in two parts at random."""
    sizes = work.sizes
    out = work.folder / f"rmat-{sizes.num_nodes}-{sizes.num_edges}-{sizes.dim}"
    if not (out / MANIFEST).exists():
        labels = work.ids(sizes.num_nodes, sizes.num_nodes) % NUM_CLASSES
        rows = {"x": work.rows(sizes.num_nodes, sizes.dim), "y": labels, "z": work.rows(sizes.num_nodes, 16)}
        graph = Graph({NODE: sizes.num_nodes}, {EDGE: work.csc}, {NODE: rows})
        partition_graph(graph, 2, out, method="random", balance=["nodes"], edge_ids=False)
    return out
