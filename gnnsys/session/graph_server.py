"""A machine's graph server: rows and structure of the parts it serves, for trainers here and elsewhere.

One that takes the place of another is told which parts that had open, and which life of the machine's shard it is.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnnsys.comm import Handler, Keys, Kind, Reply, Request, Server, default_server_io_threads
from gnnsys.graph import MANIFEST
from gnnsys.observe import num_usable_cores
from gnnsys.partition import open_parts
from gnnsys.sampling import GraphService, PartMasks, graph_tables, part_rows
from gnnsys.session.open_parts import survey
from gnnsys.store import Life, Shard

GRAPH_KINDS = (
    Kind.PREPARE, Kind.SAMPLE, Kind.FIND_EDGES, Kind.EDGE_ENDS, Kind.SELECT, Kind.VISITS, Kind.INDUCED, Kind.GUIDE,
    Kind.SHARES,
)  # fmt: skip
_MAX_RANKS = 1024  # whose silence is told at once


class GraphServer:
    """The services of one machine behind one `comm.Server`: tables from the start, the graph once it is opened.

    A server that stands on its own (`alone`) takes no OPEN and no STOP from clients, and saves and loads tables below
    `folder` only, or nowhere. `max_table_bytes`: see `Shard`; `is_reserved`, `bulk_port`, `rate_out`, `order`: see
    `Server`; `io_threads` follow from the cores where they are not said. `on_open(path, options)` is called once parts
    are open, with what was asked; its answer is told.
    """

    def __init__(
        self,
        machine: int = 0,
        *,
        bind: Sequence[str] = ("tcp://127.0.0.1:*",),
        keys: Keys | None = None,
        threads: int = 2,
        io_threads: int | None = None,
        life: int = 0,
        lost_after: float = 30.0,
        alone: bool = False,
        folder: Path | None = None,
        max_table_bytes: int | None = None,
        is_reserved: bool = False,
        bulk_port: int = 0,
        on_open: Callable[[str, Mapping[str, Any]], dict[str, Any]] | None = None,
        rate_out: float | None = None,
        order: str = "auto",
    ) -> None:
        self._on_open = on_open
        self.stopped = threading.Event()
        self._life = Life(machine, life, lost_after, self._silent_for)
        nowhere = Path(os.devnull) if alone else None
        self._make_shard = lambda: Shard(machine, self._life, max_bytes=max_table_bytes, folder=folder or nowhere)
        self._shard = self._make_shard()
        self._services: dict[int, Handler] = dict(self._shard.handlers())
        self._opened: dict[str, Any] | None = None
        self._is_verified = False
        self._lock = threading.Lock()
        handlers: dict[int, Handler] = dict.fromkeys([*self._services, *GRAPH_KINDS], self._ask)
        handlers[Kind.STATUS] = self._status
        if not alone:
            handlers |= {Kind.OPEN: self._handle_open, Kind.STOP: self._stop}
        io_threads = default_server_io_threads(num_usable_cores()) if io_threads is None else io_threads
        native_threads = 2 if (os.cpu_count() or 1) >= 8 else 1  # few cores are left to the trainers
        self.server = Server(
            handlers, bind=bind, keys=keys, threads=threads, native_threads=native_threads, name=f"machine-{machine}",
            is_reserved=is_reserved, at_once=(Kind.STATUS, Kind.STOP),
            short={Kind.PULL: lambda header, front: self._shard.answer_small(header, front)},
            io_threads=io_threads, bulk_port=bulk_port, rate_out=rate_out, order=order,
        )  # fmt: skip

    def start(self) -> list[str]:
        """Begins to serve; the endpoints."""
        self.server.start()
        return self.server.endpoints

    def open(self, path: str, own_parts: Sequence[int], *, verify: bool = True) -> None:
        """Opens and checks `own_parts` of a directory and serves them from now on.

        Opening the same again is a no-op, except that a check that was left out before is made.
        """
        own_parts = sorted(own_parts)
        wanted: dict[str, Any] = {"path": str(Path(path).resolve()), "parts": own_parts}
        with self._lock:
            if self._opened is None:
                parts = open_parts(path, verify=verify)
                rows_of = {part: part_rows(parts, part) for part in own_parts}  # opens every part, and so checks it
                tables = graph_tables(parts)
                for part, rows in rows_of.items():
                    for name, values in rows.items():
                        self._shard.add(tables[name], part, values)
                self._services.update(GraphService(parts, own_parts).handlers().items())
                self._services[Kind.SELECT] = PartMasks(parts, own_parts).handle
                self._is_verified = verify
                self._opened = wanted | {"digest": hashlib.sha256((Path(path) / MANIFEST).read_bytes()).hexdigest()}
            elif not wanted.items() <= self._opened.items():
                raise ValueError(f"this server has {self._opened['path']!r} open and serves no second directory")
            elif verify and not self._is_verified:  # opened again after a restart, or without a check
                again = open_parts(path, verify=True)
                for part in own_parts:
                    again.part(part)
                self._is_verified = True

    def shut(self) -> None:
        """Serves nothing any more, until another directory is opened. Tables that were created are gone."""
        with self._lock:
            self._shard.close()
            self._shard = self._make_shard()
            self._services, self._opened = dict(self._shard.handlers()), None

    def lose_ranks_after(self, seconds: float) -> None:
        """From now on a rank that is silent for so long counts as dead."""
        self._life.lost_after = seconds

    def close(self) -> None:
        """Ends it, within seconds."""
        self.server.close()
        self._shard.close()

    def _ask(self, request: Request) -> Any:
        handler = self._services.get(request.kind)
        if handler is None:
            what = "no graph is open here" if self._opened is None else f"{Kind(request.kind).name} is not served here"
            raise ValueError(f"{what}: open one with gnnsys.open(DIR)")
        return handler(request)

    def _handle_open(self, request: Request) -> Reply:
        options = request.options
        if "rate_out" in options:
            rate = options["rate_out"]
            self.server.set_rate_out(None if rate is None else float(rate))
            return Reply()
        if "order" in options:
            self.server.set_order(str(options["order"]))
            return Reply()
        if options["path"] is None:
            self.shut()
            return Reply()
        path = str(options["path"])
        if options.get("survey") is True:
            return Reply(options=survey(path))
        self.open(path, [int(part) for part in options["parts"]], verify=bool(options["verify"]))
        return Reply(options=None if self._on_open is None else self._on_open(path, options))

    def _status(self, request: Request) -> Reply:
        load = self.server.load(without=(Kind.STATUS,))
        opened = self._opened or {"path": None, "parts": [], "digest": None}
        own = {"pid": os.getpid(), "life": self._life.number, **load}
        ranks = [int(rank) for rank in request.options.get("ranks", ())[:_MAX_RANKS]]
        silent = [self._silent_for(rank, request.incarnation) for rank in ranks]
        counters = {"counters": self.server.summary()} if request.options.get("counters") is True else {}
        return Reply(options={**own, **opened, "silent": silent, **counters})

    def _silent_for(self, rank: int, incarnation: int) -> float:
        return self.server.liveness.silent_for(rank, incarnation)

    def _stop(self, request: Request) -> Reply:
        self.stopped.set()
        return Reply()


def wait_for_end(stopped: threading.Event, signals: Sequence[int], *, watch_input: bool) -> None:
    """Until `stopped` is set, one of `signals` comes, or the input closes: no deadline, this is the server's life."""
    reader, writer = os.pipe()
    for number in signals:
        signal.signal(number, lambda *_: os.write(writer, b"x"))

    def forward() -> None:
        stopped.wait()
        os.write(writer, b"x")

    threading.Thread(target=forward, name="gnnsys-stop", daemon=True).start()
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    if watch_input:
        waiting.register(0, select.POLLIN | select.POLLHUP)
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor == reader or not os.read(0, 4096):
                return
