"""The process that keeps graphs for jobs: `python -m gnnsys.jobs.holder_process`, started by `GraphHolder`.

It runs no code of a user and knows nothing of graphs. It keeps blocks of memory by name, on a device or on the host.
Whoever asks for a name first is told to make it, gets a block to fill, and says when that is done; the others wait, and
then map the same block. A user is a connection: the kernel closes it when a process ends, however it does. A block is
freed when the service says so and nobody uses it, and all of them with this process, which ends with the service.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnsys.jobs.cuda_memory import CudaDevice, CudaError, CudaOutOfMemory
from gnnsys.jobs.holder_messages import HolderMessages, MessageError, send, short_path

HOST = "cpu"
_SEND_SECONDS = 10.0  # a user that does not read for so long is let go
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class RefusedError(Exception):
    """What is told to whoever asked: one line."""


class HostBlock:
    """Memory without a name (memfd). Once sealed nobody writes to it: what a user writes goes to pages of its own."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.descriptor = os.memfd_create(f"gnnsys-graph-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)  # memory that is not there is refused now
        except OSError as error:
            os.close(self.descriptor)
            raise RefusedError(f"the host has no {num_bytes:,} bytes for graph {name}: {error.strerror}") from error
        self.handle = ""

    def seal(self) -> None:
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        os.close(self.descriptor)


class DeviceBlock:
    """Memory of a GPU. Its handle is told in hexadecimal digits."""

    descriptor = None

    def __init__(self, device: CudaDevice, name: str, num_bytes: int) -> None:
        self._device = device
        try:
            self._address = device.allocate(num_bytes)
        except CudaOutOfMemory as error:
            free, _ = device.memory()
            raise RefusedError(
                f"graph {name} takes {num_bytes:,} bytes of the device, where {free:,} are free: out of memory"
            ) from error
        self.handle = device.export(self._address).hex()

    def seal(self) -> None:
        """Nothing on a device keeps a process from writing; `shared_graph` sees writes of torch's."""

    def close(self) -> None:
        with contextlib.suppress(CudaError):
            self._device.free(self._address)


@dataclass(eq=False)
class HolderConnection:
    """One process that uses graphs, or the service. It asks one thing at a time, `request` the last."""

    socket: socket.socket
    pid: int
    request: int = 0
    reader: HolderMessages = field(default_factory=HolderMessages)


@dataclass
class HeldBlock:
    """One name on one device. `filler` makes it until it is ready; `waiting` are told then."""

    number: int
    filler: HolderConnection | None = None
    is_ready: bool = False
    is_stale: bool = False  # somebody wrote to it: whoever asks next gets one that is made anew
    num_bytes: int = 0
    description: Any = None
    opened: Any = ()  # files that were read to make it, and their states: for who gets it to compare
    block: HostBlock | DeviceBlock | None = None
    users: Counter[HolderConnection] = field(default_factory=Counter)
    waiting: list[HolderConnection] = field(default_factory=list)


class Holder:
    """What is held, and who is told what. `serve` returns when its input ends."""

    def __init__(self, listener: socket.socket, device: str) -> None:
        self._listener, self._device = listener, device
        self._cuda: CudaDevice | None = None
        self._held: dict[tuple[str, str], HeldBlock] = {}
        self._replaced: list[HeldBlock] = []  # stale ones that still have users
        self._numbers = itertools.count()
        self._connections: set[HolderConnection] = set()
        self._selector = selectors.DefaultSelector()

    def serve(self, until: int) -> None:
        self._selector.register(until, selectors.EVENT_READ, "end")
        self._selector.register(self._listener, selectors.EVENT_READ, "new")
        while True:
            for key, _ in self._selector.select():
                if key.data == "end":
                    if not os.read(until, 4096):
                        return
                elif key.data == "new":
                    self._accept()
                else:
                    self._read(key.data)

    # -- connections -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", credentials)
            if uid != os.getuid():
                accepted.close()
                return
            accepted.settimeout(_SEND_SECONDS)
            connection = HolderConnection(accepted, pid)
            self._connections.add(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: HolderConnection) -> None:
        if connection not in self._connections:  # let go by what another one asked for
            return
        try:
            data = connection.socket.recv(1 << 16)
            if not data:
                return self._let_go(connection)
            for message in connection.reader.feed(data):
                self._answer(connection, message)
        except (OSError, MessageError):
            self._let_go(connection)

    def _send(self, connection: HolderConnection, message: dict[str, Any], descriptor: int | None = None) -> None:
        try:
            send(connection.socket, {**message, "id": connection.request}, descriptor)
        except (OSError, MessageError):
            self._let_go(connection)

    def _let_go(self, connection: HolderConnection) -> None:
        """A process has ended or left: it uses nothing, and what it was making is another's to make."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        for held in [*self._held.values(), *self._replaced]:
            held.users.pop(connection, None)
            held.waiting = [other for other in held.waiting if other is not connection]
        for key, held in list(self._held.items()):
            if held.filler is connection:
                self._give_up(key, held)
        self._free_replaced()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _answer(self, connection: HolderConnection, message: dict[str, Any]) -> None:
        try:
            connection.request, kind = int(message.get("id", 0)), message.get("do")
            if kind in ("get", "allot", "ready", "failed", "cancel"):
                key = str(message["name"]), str(message["device"])
                getattr(self, f"_{kind}")(connection, key, message)
            elif kind == "leave":
                self._leave(connection, message)
            elif kind == "graphs":
                self._send(connection, {"graphs": self._listed()})
            elif kind == "drop":
                self._send(connection, {"dropped": self._drop(message["names"])})
            else:
                raise RefusedError(f"the holder of graphs does not know {kind!r}")
        except RefusedError as refused:
            self._send(connection, {"error": str(refused)})
        except (KeyError, TypeError, ValueError) as error:
            self._send(connection, {"error": f"a malformed request: {error!r}"})

    def _get(self, connection: HolderConnection, key: tuple[str, str], _: dict[str, Any]) -> None:
        if key[1] not in (HOST, self._device):
            raise RefusedError(f"graphs are kept on {self._device} and on the host, not on {key[1]}")
        held = self._held.get(key)
        if held is not None and held.is_ready and held.is_stale:
            self._replaced.append(self._held.pop(key))
            self._free_replaced()
            held = None
        if held is None:
            self._held[key] = HeldBlock(next(self._numbers), filler=connection)
            self._send(connection, {"state": "yours"})
        elif held.is_ready:
            self._hand_out(connection, held)
        elif held.filler is connection:
            raise RefusedError(f"graph {key[0]} is asked for while this process makes it: it cannot contain itself")
        else:
            held.waiting.append(connection)

    def _allot(self, connection: HolderConnection, key: tuple[str, str], message: dict[str, Any]) -> None:
        """A block for a graph that is to be filled; none where it stays in its files."""
        held = self._filled_by(connection, key)
        num_bytes = int(message["bytes"])
        if num_bytes < 0 or held.block is not None:
            raise RefusedError(f"graph {key[0]} has its room already, or wants {num_bytes} bytes")
        if not message["in_files"]:
            held.block = self._allocate(key, max(1, num_bytes))
        held.num_bytes, held.description, held.opened = num_bytes, message["description"], message["opened"]
        if held.block is None:
            self._send(connection, {"handle": ""})
        else:
            self._send(connection, {"handle": held.block.handle}, held.block.descriptor)

    def _ready(self, connection: HolderConnection, key: tuple[str, str], _: dict[str, Any]) -> None:
        held = self._filled_by(connection, key)
        try:
            if held.block is not None:
                held.block.seal()
        except OSError as error:
            self._give_up(key, held)
            raise RefusedError(f"graph {key[0]} cannot be closed to writers: {error.strerror}") from error
        held.is_ready, held.filler = True, None
        self._hand_out(connection, held)
        waiting, held.waiting = held.waiting, []
        for other in waiting:
            self._hand_out(other, held)

    def _failed(self, connection: HolderConnection, key: tuple[str, str], _: dict[str, Any]) -> None:
        self._give_up(key, self._filled_by(connection, key))
        self._send(connection, {})

    def _cancel(self, connection: HolderConnection, key: tuple[str, str], _: dict[str, Any]) -> None:
        """Who asked for it no longer waits, and throws away what it may have been told since."""
        held = self._held.get(key)
        if held is not None:
            held.waiting = [other for other in held.waiting if other is not connection]
            held.users -= Counter([connection])
            if held.filler is connection:
                self._give_up(key, held)
        self._send(connection, {})

    def _leave(self, connection: HolderConnection, message: dict[str, Any]) -> None:
        """One use less of each; those that were written to are not handed out again."""
        left, written = Counter(map(int, message["left"])), set(map(int, message["written"]))
        for held in [*self._held.values(), *self._replaced]:
            held.users -= Counter({connection: left[held.number]})
            held.is_stale |= held.number in written
        self._free_replaced()
        self._send(connection, {})

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _filled_by(self, connection: HolderConnection, key: tuple[str, str]) -> HeldBlock:
        held = self._held.get(key)
        if held is None or held.filler is not connection:
            raise RefusedError(f"graph {key[0]} is not this process's to make")
        return held

    def _allocate(self, key: tuple[str, str], num_bytes: int) -> HostBlock | DeviceBlock:
        name, device = key
        if device == HOST:
            return HostBlock(name, num_bytes)
        try:
            if self._cuda is None:
                self._cuda = CudaDevice(int(device.partition(":")[2] or 0))
            return DeviceBlock(self._cuda, name, num_bytes)
        except CudaError as error:
            raise RefusedError(f"graph {name} cannot be put on {device}: {error}") from error

    def _hand_out(self, connection: HolderConnection, held: HeldBlock) -> None:
        held.users[connection] += 1
        block = held.block
        message = {
            "state": "ready",
            "number": held.number,
            "bytes": held.num_bytes,
            "description": held.description,
            "opened": held.opened,
            "handle": "" if block is None else block.handle,
            "in_files": block is None,
        }
        self._send(connection, message, None if block is None else block.descriptor)

    def _give_up(self, key: tuple[str, str], held: HeldBlock) -> None:
        """Its maker failed: the first one that waits is to make it."""
        if held.block is not None:
            held.block.close()
        held.block, held.filler = None, None
        if held.waiting:
            held.filler = held.waiting.pop(0)
            self._send(held.filler, {"state": "yours"})
        else:
            self._held.pop(key, None)

    def _drop(self, names: list[str] | None) -> list[str]:
        dropped = []
        for key, held in list(self._held.items()):
            if held.is_ready and not held.users and (names is None or key[0] in names):
                del self._held[key]
                if held.block is not None:
                    held.block.close()
                dropped.append(key[0])
        return dropped

    def _free_replaced(self) -> None:
        for held in [each for each in self._replaced if not each.users]:
            self._replaced.remove(held)
            if held.block is not None:
                held.block.close()

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "device": device,
                "bytes": held.num_bytes,
                "is_ready": held.is_ready,
                "users": sorted({each.pid for each in held.users}),
            }
            for (name, device), held in self._held.items()
        ]


def main() -> None:
    """Orders come as a line of JSON on standard input, whose end is the end; a line says that it listens."""
    orders = json.loads(sys.stdin.buffer.readline())
    path = Path(orders["socket"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as name:
            listener.bind(name)
        listener.listen(128)
        os.chmod(path, 0o600)
    except OSError as error:
        print(json.dumps({"error": f"{path}: {error.strerror}"}), flush=True)
        return
    try:
        with contextlib.suppress(BrokenPipeError):  # the service has gone meanwhile
            print(json.dumps({"listens": True, "at": time.time()}), flush=True)
            Holder(listener, orders["device"]).serve(sys.stdin.fileno())
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
