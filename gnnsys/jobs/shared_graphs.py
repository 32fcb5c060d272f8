"""`shared_graph`: one graph for all jobs of a queue, in memory once; without a queue simply the graph.

A graph is known by what it is made of (`GraphSource`). On the host jobs map the same pages, copy on write. On a device
they map the same block, which nothing protects: rows that a job writes to change for all. Writes of torch's are seen
when the job ends (`release_graphs`), and the next job makes the graph again.
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import Graph, pack_plan, unpack
from gnnsys.jobs.cuda_memory import CudaDevice, MappedBlock
from gnnsys.jobs.graph_holder import HOLDER, JOB_DEVICE, GraphHolderLost, connect, lost
from gnnsys.jobs.graph_source import AnyShared, GraphSource
from gnnsys.jobs.holder_messages import receive, send
from gnnsys.jobs.memory_cap import allow_mapping
from gnnsys.jobs.opened_files import are_unchanged
from gnnsys.store import free_memory, note_shared_memory

_NO_RESERVE = 0x4000  # MAP_NORESERVE: pages that are never written to need no memory
_MAKE_SECONDS = 3600.0  # to wait for another process that makes a graph
_CONNECT_SECONDS = 120.0


def shared_graph(
    source: str | os.PathLike[str] | Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    depends: Sequence[str | os.PathLike[str]] | None = None,
    timeout: float = _MAKE_SECONDS,
) -> Any:
    """The graph at a path (as `gnnsys.graph.load` reads it), or that a function of a module returns, on `device`.

    `arguments` go to the function, or to `load`; they must be JSON. A function returns a `Graph`, or tensors by name.
    In a job of a queue the graph is in memory once for all jobs that name it so. Elsewhere it is loaded, so that the
    same job runs alone. `device` is the job's own by default: that of the queue, else a GPU where there is one.

    Jobs share a function's graph if these are equal: the function, its arguments, its file and your modules that it
    imports, the working folder, the job's variables, and torch's default dtype and device. The next job calls the
    function again if a file has changed that it reads, or that one of these modules reads on import. `depends` lists
    the files and folders that it reads; then the folder, the variables and your other modules do not count. During the
    call, generators are seeded from the function's name and arguments, and afterwards restored. To draw other numbers,
    give the function a seed argument.

    Do not write to its rows. On the host a job that does has pages of its own; on a device it changes them for all.

    >>> graph = gnnsys.jobs.shared_graph("products/")  # doctest: +SKIP
    >>> graph = gnnsys.jobs.shared_graph(gnnsys.graph.sbm, {"num_nodes": 100_000})  # doctest: +SKIP
    """
    wanted, target = GraphSource.of(source, arguments or {}, depends), _job_device(device)
    address, noted = os.environ.get(HOLDER), _noted.get()
    if address is None:
        graph = _moved(wanted.make(), target)
        if noted is not None:
            noted.own(wanted.name, graph)
        return graph
    graph, num_bytes = _user_of(address).graph(wanted, target, timeout)
    if noted is not None:
        noted.graphs[wanted.name] = num_bytes
    return graph


@contextmanager
def noted_graphs() -> Iterator[NotedGraphs]:
    """Which graphs are shared in this block, by name, with their bytes: what `WaitingJob.graphs` says of a job.

    Inside, tensors of these graphs are nobody's own (`gnnsys.store.is_shared_memory`): an estimate that is made in the
    block has the job's own memory alone.
    """
    noted = NotedGraphs()
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)
        noted.kept.clear()


class Released(NamedTuple):
    """What a job left behind: graphs that something still refers to, and those that it wrote to."""

    alive: list[str]
    written: list[str]


def release_graphs() -> Released:
    """After a job, once nothing refers to its model and loader: gives its graphs back to the holder."""
    user = _users.get(os.environ.get(HOLDER, ""))
    return Released([], []) if user is None or user.pid != os.getpid() else user.release()


def check_holder() -> None:
    """GraphHolderLost where the process that keeps this job's graphs has ended. Takes microseconds: call it in every
    step. Without a queue there is nothing to lose."""
    user = _users.get(os.environ.get(HOLDER, ""))
    if user is not None and user.pid == os.getpid():
        user.check()


@dataclass(eq=False)
class NotedGraphs:
    """See `noted_graphs`."""

    graphs: dict[str, int] = field(default_factory=dict)
    kept: list[_Mapped] = field(default_factory=list)

    def own(self, name: str, graph: AnyShared) -> None:
        """A graph that was loaded here, and would be shared in a queue."""
        mapped = _Mapped(graph, pack_plan(graph).num_bytes)
        self.graphs[name] = mapped.num_bytes
        self.kept.append(mapped)  # so that its addresses are nobody else's while they are noted
        _note_tensors(mapped, graph)


class GraphUser:
    """This process's connection to a holder, and the graphs that it has mapped."""

    def __init__(self, address: str) -> None:
        self.pid, self._address = os.getpid(), address
        self._lock = threading.RLock()
        self._mapped: dict[tuple[str, str], _Mapped] = {}
        self._lingering: list[_Use] = []  # that a job which is over still refers to
        self._cuda: CudaDevice | None = None
        self._request = 0
        try:
            self._connection = connect(Path(address), _CONNECT_SECONDS)
        except OSError as error:
            raise GraphHolderLost(lost(address, error)) from error
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLHUP | select.POLLRDHUP)

    def graph(self, wanted: GraphSource, device: torch.device, timeout: float) -> tuple[AnyShared, int]:
        """The graph, mapped, and its bytes. Made here where nobody has made it yet."""
        key = wanted.name, str(device)
        with self._lock:
            if key not in self._mapped:
                request = {"name": key[0], "device": key[1]}
                answer, descriptor = self._get(wanted, request, timeout)
                while answer["state"] == "ready" and not are_unchanged(answer["opened"]):
                    if descriptor is not None:
                        os.close(descriptor)
                    stale = [answer["number"]]
                    self._ask({"do": "leave", "left": stale, "written": stale}, _CONNECT_SECONDS, "an answer")
                    answer, descriptor = self._get(wanted, request, timeout)
                if answer["state"] == "yours":
                    answer, descriptor = self._make(wanted, device, request)
                self._mapped[key] = self._map(wanted, device, answer, descriptor)
            mapped = self._mapped[key]
            graph = mapped.graph.copy() if isinstance(mapped.graph, Graph) else dict(mapped.graph)
            return graph, mapped.num_bytes

    def release(self) -> Released:
        """Gives back what nothing refers to. What something does is looked at again when the next job is over."""
        with self._lock:
            used = [_Use(key[0], each.number, each.block) for key, each in self._mapped.items()]
            changed = [each for (_, on), each in self._mapped.items() if on != "cpu" and each.was_written()]
            written = {each.number for each in changed}
            del changed
            self._mapped.clear()
            gc.collect()
            used += self._lingering
            self._lingering = [use for use in used if use.is_alive()]
            left = [use.number for use in used if not use.is_alive()]
            if left or written:
                message = {"do": "leave", "left": left, "written": sorted(written)}
                self._ask(message, _CONNECT_SECONDS, "an answer")
            alive = [use.name for use in self._lingering]
            return Released(alive, [use.name for use in used if use.number in written])

    def check(self) -> None:
        if self._poll.poll(0):
            raise GraphHolderLost(lost(self._address, ConnectionResetError()))

    def _get(self, wanted: GraphSource, request: dict[str, str], timeout: float) -> tuple[dict[str, Any], int | None]:
        """What the holder says of it: that it is ready, or this job's to make."""
        try:
            return self._ask({"do": "get", **request}, timeout, f"graph {wanted.name} to be made")
        except TimeoutError:
            self._ask({"do": "cancel", **request}, _CONNECT_SECONDS, "an answer")
            raise

    # -- making and mapping ------------------------------------------------------------------------------------------

    def _make(
        self, wanted: GraphSource, device: torch.device, request: dict[str, str]
    ) -> tuple[dict[str, Any], int | None]:
        """Makes the graph, fills the block that the holder gives for it, and says so; what the holder hands out."""
        try:
            plan = pack_plan(wanted.make())
            in_files = wanted.is_mapped and device.type == "cpu"
            allot = {"do": "allot", **request, "bytes": plan.num_bytes, "in_files": in_files}
            allot |= {"description": None if in_files else plan.description, "opened": wanted.opened}
            if device.type == "cpu" and not in_files and plan.num_bytes > free_memory():
                raise MemoryError(
                    f"graph {wanted.name} takes {plan.num_bytes:,} bytes, {free_memory():,} are free here"
                )
            answer, descriptor = self._ask(allot, _CONNECT_SECONDS, "room for a graph")
            if not in_files:
                plan.fill(self._open(device, answer["handle"], descriptor, plan.num_bytes, mmap.MAP_SHARED)[1])
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        except GraphHolderLost:
            raise
        except BaseException:
            self._ask({"do": "failed", **request}, _CONNECT_SECONDS, "an answer")
            raise
        return self._ask({"do": "ready", **request}, _CONNECT_SECONDS, "an answer")

    def _map(
        self, wanted: GraphSource, device: torch.device, answer: dict[str, Any], descriptor: int | None
    ) -> _Mapped:
        num_bytes = answer["bytes"]
        if device.type == "cpu":
            allow_mapping(num_bytes)
        if answer["in_files"]:
            graph = wanted.make(verify=False)  # whoever came first has compared checksums
            mapped = _Mapped(graph, num_bytes, answer["number"])
            _note_tensors(mapped, graph)
            return mapped
        block, take = self._open(device, answer["handle"], descriptor, num_bytes, mmap.MAP_PRIVATE)
        note_shared_memory(block, take(0, 1).data_ptr(), num_bytes)
        return _Mapped(unpack(answer["description"], take, device), num_bytes, answer["number"], weakref.ref(block))

    def _open(
        self, device: torch.device, handle: str, descriptor: int | None, num_bytes: int, flags: int
    ) -> tuple[Any, Callable[[int, int], Tensor]]:
        """A block that the holder keeps, and a function that gives pieces of it, which keep it open."""
        if device.type == "cuda":
            if self._cuda is None:
                self._cuda = CudaDevice(device.index or 0)
            block = MappedBlock(self._cuda, bytes.fromhex(handle))
            return block, lambda at, size: torch.as_tensor(block.piece(at, size), device=device)
        assert descriptor is not None
        try:
            reserve = _NO_RESERVE if flags == mmap.MAP_PRIVATE else 0
            size, access = max(1, num_bytes), mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(descriptor, size, flags | reserve, access)
        finally:
            os.close(descriptor)
        return memory, lambda at, size: torch.frombuffer(memory, dtype=torch.uint8, offset=at, count=size)

    def _ask(self, message: dict[str, Any], timeout: float, what: str) -> tuple[dict[str, Any], int | None]:
        self._request += 1
        end = time.monotonic() + timeout
        try:
            self._connection.settimeout(timeout)
            send(self._connection, {**message, "id": self._request})
            while True:
                answer, descriptor = receive(self._connection, end - time.monotonic())
                if answer["id"] == self._request:
                    break
                if descriptor is not None:  # of an answer that came too late
                    os.close(descriptor)
        except TimeoutError as error:
            why = "another job makes it still, or the process that keeps graphs is stuck"
            raise TimeoutError(f"waited {timeout:g} s for {what}: {why}") from error
        except OSError as error:
            raise GraphHolderLost(lost(self._address, error)) from error
        if "error" in answer:
            text = answer["error"]
            raise (torch.OutOfMemoryError if "out of memory" in text else RuntimeError)(text)
        return answer, descriptor


class _Use(NamedTuple):
    """One use of a graph, by the number that the holder gave to what it keeps."""

    name: str
    number: int
    block: weakref.ref[Any] | None

    def is_alive(self) -> bool:
        """Whether something still refers to its memory."""
        return self.block is not None and self.block() is not None


class _Mapped:
    """A graph that is mapped here for the job that runs. `block` is alive as long as something refers to its tensors;
    None where they are maps of files."""

    def __init__(
        self, graph: AnyShared, num_bytes: int, number: int = -1, block: weakref.ref[Any] | None = None
    ) -> None:
        self.graph, self.num_bytes, self.number, self.block = graph, num_bytes, number, block
        self._writes = self._count_writes()

    def was_written(self) -> bool:
        """Whether torch has written to one of its tensors, as torch counts."""
        return self._writes != self._count_writes()

    def _count_writes(self) -> list[int]:
        return [tensor._version for tensor in _tensors(self.graph) if not tensor.is_inference()]


def _tensors(graph: AnyShared) -> list[Tensor]:
    return pack_plan(graph).tensors


def _note_tensors(owner: object, graph: AnyShared) -> None:
    for tensor in _tensors(graph):
        storage = tensor.untyped_storage()
        note_shared_memory(owner, storage.data_ptr(), storage.nbytes())


def _moved(graph: AnyShared, device: torch.device) -> AnyShared:
    return graph.to(device) if isinstance(graph, Graph) else {key: each.to(device) for key, each in graph.items()}


def _job_device(device: torch.device | str | None) -> torch.device:
    """Where a job's graph is wanted, with its number."""
    said = os.environ.get(JOB_DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(said if device is None else device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if found.type == "cpu" else found


def _user_of(address: str) -> GraphUser:
    with _users_lock:
        user = _users.get(address)
        if user is None or user.pid != os.getpid():  # a forked child has a connection of its own
            user = _users[address] = GraphUser(address)
        return user


_noted: ContextVar[NotedGraphs | None] = ContextVar("gnnsys_noted_graphs", default=None)
_users: dict[str, GraphUser] = {}  # a connection belongs to the process, as its mappings do
_users_lock = threading.Lock()
