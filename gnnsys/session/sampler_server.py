"""A sampler: a process that makes batches for trainers, wherever it runs. It serves LOADER and BATCH, and no rows.

It is told its directory of parts when it is started. Trainers tell it the rest: which machine serves which part, and
where (`GraphOpening`). Of parts that are served by its own machine it reads the files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnsys.comm import Client, Handler, Keys, Kind, Reply, Request, RequestContext, Server, default_lanes
from gnnsys.graph import MANIFEST
from gnnsys.loader import BatchService
from gnnsys.observe import num_usable_cores
from gnnsys.partition import Placement, open_parts
from gnnsys.sampling import DistGraph
from gnnsys.session.open_parts import open_alone
from gnnsys.store import Store

MOST_GRAPHS = 4  # that are open at once: of jobs that came one after the other
SENDERS = 1 << 20  # how senders that are no ranks are numbered: from here on


@dataclass(frozen=True, kw_only=True)
class GraphOpening:
    """What a sampler must know of a job's graph: `machine_of_part`, and where each machine's server listens (`peers`;
    none where the job has one process). `digest` is that of the parts' manifest. Seconds: as of the job's session.
    `priority` and `path`: of what is asked of these servers, as `gnnsys.open` was given them."""

    digest: str
    machine_of_part: tuple[int, ...]
    peers: tuple[str, ...] = ()
    incarnation: int = 0
    timeout: float = 60.0
    lost_after: float = 30.0
    priority: int | None = None
    path: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GraphOpening:
        """ValueError, one line, for anything that `to_json` did not write."""
        if sorted(values) != sorted(cls.__dataclass_fields__):
            raise ValueError(f"a graph is told by {', '.join(cls.__dataclass_fields__)}")
        machines, peers = values["machine_of_part"], values["peers"]
        if not isinstance(values["digest"], str) or not _is_list(peers, str) or not _is_list(machines, int):
            raise ValueError("a graph is told by a digest, the machine of each part, and where machines listen")
        if not machines or not all(0 <= machine < max(1, len(peers)) for machine in machines):
            raise ValueError(f"parts are on machines that nobody serves: {str(machines)[:200]} of {len(peers)}")
        if any(not peer.startswith("tcp://") for peer in peers):
            raise ValueError("machines listen at tcp:// endpoints")
        seconds = [values["timeout"], values["lost_after"]]
        if not all(isinstance(each, (int, float)) and 1.0 <= each <= 86400.0 for each in seconds):
            raise ValueError(f"seconds must be from 1 to 86400, got {str(seconds)[:200]}")
        if not _is_list([values["incarnation"]], int) or not 0 <= values["incarnation"] < 1 << 63:
            raise ValueError(f"incarnation must be a number of 63 bits, got {str(values['incarnation'])[:200]}")
        RequestContext(priority=values["priority"], path=values["path"])  # says what is wrong with them
        return cls(**{**values, "machine_of_part": tuple(machines), "peers": tuple(peers)})


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)


class SamplerServer:
    """`machine` is the one of the job on whose host it runs, -1 for a host that serves no parts. `number` tells the
    samplers of a job apart."""

    def __init__(
        self,
        path: str,
        machine: int = -1,
        number: int = 0,
        *,
        bind: Sequence[str] = ("tcp://127.0.0.1:*",),
        keys: Keys | None = None,
        threads: int = 2,
        is_reserved: bool = False,
    ) -> None:
        self.stopped = threading.Event()
        self._path, self._machine, self._number, self._keys = path, machine, number, keys
        self._digest = hashlib.sha256((Path(path) / MANIFEST).read_bytes()).hexdigest()
        self._graphs: OrderedDict[GraphOpening, DistGraph] = OrderedDict()
        self._clients: dict[GraphOpening, Client] = {}
        self._lock = threading.Lock()
        service = BatchService(self._open, threads)
        handlers: dict[int, Handler] = {**service.handlers(), Kind.STATUS: self._status}
        self.server = Server(
            handlers, bind=bind, keys=keys, threads=threads, name=f"sampler-{number}", is_reserved=is_reserved,
            at_once=(Kind.STATUS,), on_raise=service.on_raise,
        )  # fmt: skip

    def start(self) -> list[str]:
        """Begins to serve; the endpoints."""
        self.server.start()
        return self.server.endpoints

    def close(self) -> None:
        """Ends it, within seconds: what it asks others for first, so that no batch waits for these."""
        with self._lock:
            for opening in list(self._graphs):
                self._shut(opening)
        self.server.close()

    def _open(self, values: Mapping[str, Any]) -> DistGraph:
        opening = GraphOpening.from_json(values)
        if opening.digest != self._digest:
            raise ValueError(f"the sampler has other parts: {Path(self._path) / MANIFEST} is not that of the job")
        with self._lock:
            if opening not in self._graphs:
                self._graphs[opening] = self._make(opening)
            self._graphs.move_to_end(opening)
            while len(self._graphs) > MOST_GRAPHS:
                self._shut(next(iter(self._graphs)))
            return self._graphs[opening]

    def _make(self, opening: GraphOpening) -> DistGraph:
        if not opening.peers:
            return open_alone(self._path, verify=False)
        parts = open_parts(self._path, verify=False)
        machines = list(opening.machine_of_part)
        if len(machines) != parts.num_parts:
            raise ValueError(f"the job has {len(machines)} parts, {self._path} has {parts.num_parts}")
        client = Client(
            dict(enumerate(opening.peers)),
            sender=SENDERS + self._number,
            incarnation=opening.incarnation,
            keys=self._keys,
            timeout=opening.timeout,
            name=f"sampler-{self._number}",
            lost_after=opening.lost_after,
            lanes=default_lanes(num_usable_cores(), 1),
        )
        client.context = RequestContext(priority=opening.priority, path=opening.path)
        self._clients[opening] = client
        store = Store(
            machine_of_part=machines, machine=self._machine, client=client, rank=0, world_size=1,
            timeout=opening.timeout,
        )  # fmt: skip
        graph = DistGraph(parts, store, client, self._machine, machines)
        graph.placement = Placement(0, (max(0, self._machine),), tuple(machines))
        return graph

    def _shut(self, opening: GraphOpening) -> None:
        graph = self._graphs.pop(opening)
        client = self._clients.pop(opening, None)
        if client is not None:
            client.close()
        graph.store.close()

    def _status(self, request: Request) -> Reply:
        counters = {"counters": self.server.summary()} if request.options.get("counters") is True else {}
        load = self.server.load(without=(Kind.STATUS,))
        return Reply(options={"pid": os.getpid(), **load, "digest": self._digest, **counters})
