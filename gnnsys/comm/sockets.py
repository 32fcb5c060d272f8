"""How our ZeroMQ sockets are set up, and how threads share one.

Handing a message to another thread costs more than sending it. So any thread sends, under the socket's lock, and one
thread at a time reads. The reader sleeps on the socket's descriptor. Where a sender's call took the news that something
arrived, the sender wakes the reader.
A dead connection is noticed by the kernel (keep-alive, unacknowledged data): unlike ZMTP's own heartbeats that does not
take a large message on a slow link for silence. Send queues of clients have no count limit: what a process may have in
flight is bounded by its outstanding requests. A server's have one: a client that does not read loses what is beyond it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import ipaddress
import os
import socket as sockets
import threading
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as Raw  # without the Python layer's options, which cost as much as the call

from gnnsys.comm.arrays import FRAME_BYTES
from gnnsys.comm.keys import Keys
from gnnsys.comm.sealing import SealedChannel
from gnnsys.comm.wire import Buffer

_SILENCE_MS = 30_000
_HANDSHAKE_MS = 10_000  # a peer that connects and shows no key holds a descriptor for so long
_SEAL_BYTES = 256  # more than CURVE or sealing adds to a frame
_BACKLOG = 100  # as ZeroMQ has it
UNSENT_BYTES = 1 << 16  # that the kernel takes of a connection before it can send them: what it has is not overtaken
_NOBLOCK, _EVENTS, _IN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK_MORE = _NOBLOCK | int(zmq.SNDMORE)
_COPIED = frozenset((bytes, bytearray))  # what libzmq copies; all else it reads where it lies
_raw_send: Any = Raw.send
_raw_recv: Any = Raw.recv


def _find_getsockopt() -> Any:
    """libzmq's own, of the library that pyzmq has loaded: pyzmq's takes longer to find the option than to ask for it.

    None where it cannot be called.
    """
    try:
        found = ctypes.PyDLL(importlib.import_module("zmq.backend.cython._zmq").__file__).zmq_getsockopt
    except (ImportError, OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return found


_getsockopt = _find_getsockopt()


def host_of(endpoint: str) -> str:
    """The host of a `tcp://host:port` endpoint, without the brackets of IPv6."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def port_of(endpoint: str) -> int:
    """The port of a `tcp://host:port` endpoint; 0 of any other."""
    port = endpoint.rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp://") and port.isdecimal() else 0


def bulk_place(endpoint: str, port: int | str = "*") -> str:
    """Another port of the same host."""
    return f"{endpoint.rpartition(':')[0]}:{port}"


def is_loopback(endpoint: str) -> bool:
    """Whether only processes of this machine can reach what is bound here."""
    if not endpoint.startswith("tcp://"):
        return True  # ipc and inproc
    try:
        return ipaddress.ip_address(host_of(endpoint).partition("%")[0]).is_loopback
    except ValueError:
        return False


def make_socket(context: zmq.Context, kind: int) -> Any:
    """A DEALER or ROUTER with our options, neither bound nor connected. Who announces a larger frame is disconnected.

    That limit is for all who connect, also before they have shown a key: libzmq has no other for those.
    """
    socket: Any = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 0
    socket.maxmsgsize = FRAME_BYTES + _SEAL_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 10
    socket.tcp_keepalive_intvl = 5
    socket.tcp_keepalive_cnt = 4
    socket.setsockopt(zmq.TCP_MAXRT, _SILENCE_MS)
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    return socket


def bind(socket: Any, endpoint: str, *, is_reserved: bool = False) -> str:
    """Binds and returns the endpoint with its real port; the error names the endpoint.

    `is_reserved`: another process of this account holds the port by SO_REUSEPORT, which ZeroMQ does not say itself.
    """
    socket.ipv6 = _wants_ipv6(endpoint)
    try:
        if endpoint.startswith("tcp://") and (is_reserved or _is_address(host_of(endpoint))):
            made, endpoint = _listen(endpoint, is_reserved)
            socket.setsockopt(zmq.USE_FD, made)
        socket.bind(endpoint)
        socket.setsockopt(zmq.USE_FD, -1)
    except (zmq.ZMQError, OSError) as error:
        raise ValueError(
            f"cannot serve at {endpoint!r}: {error}. Write tcp://ADDRESS:* with an address of this machine, "
            "IPv6 in brackets; the port is chosen"
        ) from None
    return str(socket.last_endpoint.decode().rstrip("\0"))


def _is_address(host: str) -> bool:
    """Whether this is an address or a host's name; libzmq also takes names of interfaces, and * for all of them."""
    try:
        return bool(sockets.getaddrinfo(host, 0, type=sockets.SOCK_STREAM))
    except OSError:
        return False


def _listen(endpoint: str, is_reserved: bool) -> tuple[int, str]:
    """A descriptor that listens there, which ZeroMQ will close, and the endpoint with its port.

    Connections that are accepted keep what is set here. `is_reserved`: beside who of this account says SO_REUSEPORT.
    """
    host, port = host_of(endpoint), endpoint.rpartition(":")[2].replace("*", "0")
    if not port.isdecimal():
        raise OSError(f"{port!r} is no port")
    family, kind, protocol, _, where = sockets.getaddrinfo(host, int(port), type=sockets.SOCK_STREAM)[0]
    with sockets.socket(family, kind, protocol) as made:
        made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)  # connections of a life before
        if is_reserved:
            made.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEPORT, 1)
        if hasattr(sockets, "TCP_NOTSENT_LOWAT"):
            made.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        made.bind(where)
        made.listen(_BACKLOG)
        made.setblocking(False)
        place = f"{endpoint.rpartition(':')[0]}:{made.getsockname()[1]}"
        return made.detach(), place


def connect(socket: Any, endpoint: str, keys: Keys | None) -> None:
    """Connects in the background: a peer that is not there yet is found when it comes."""
    socket.ipv6 = _wants_ipv6(endpoint)
    if keys is not None:
        keys.protect_client(socket)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot connect to {endpoint!r}: {error}") from None


def _wants_ipv6(endpoint: str) -> bool:
    """Everything but a written-out IPv4 address: with IPv6 on, libzmq looks names up there first."""
    try:
        return ipaddress.ip_address(host_of(endpoint).partition("%")[0]).version == 6
    except ValueError:
        return endpoint.startswith("tcp://")


class WakeUp:
    """Ends the owner's poll from any thread; costs a system call only while the owner sleeps."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self.sleeping = False
        self._lock = threading.RLock()  # of the descriptors; re-entrant: finalizers run anywhere

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        """Call after the work has been put where the owner looks for it."""
        if self.sleeping:
            self.sleeping = False
            with self._lock, contextlib.suppress(OSError):  # full: it is awake
                if self._write >= 0:  # a closed number may be another file's by now
                    os.write(self._write, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        with self._lock:
            if self._write >= 0:
                os.close(self._read)
                os.close(self._write)
            self._write = -1


class SharedSocket:
    """A socket that any thread sends on and one thread, the owner of `wake_up`, reads. Sending never waits.

    `is_cut` is for who closes it to say: libzmq has given its connection up, and another socket may reach the peer.
    What seals its messages, if anything, is its own, so that none is sent on it that is not sealed: see `channel`.
    """

    def __init__(self, socket: Any, wake_up: WakeUp, channel: SealedChannel | None = None) -> None:
        self.channel = channel
        self.fd: int = socket.fd  # readable when libzmq has news of any kind, once
        self.hot = True  # something may be there although the descriptor is silent
        self.lock = threading.RLock()
        self._socket: Any = socket
        self._handle: int = socket.underlying
        self._events, self._size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        self._events_at, self._size_at = ctypes.addressof(self._events), ctypes.addressof(self._size)
        self._wake_up = wake_up
        self._closed = False
        self.is_cut = False

    def send(self, frames: Sequence[Buffer]) -> None:
        """Sends one message, large arrays without a copy; ZMQError where the first frame has nowhere to go.

        `zmq.Again`: the peer's queue is full, or there is no connection and none is being made.
        """
        with self.lock:
            self.send_locked(frames)

    def send_locked(self, frames: Sequence[Buffer]) -> None:
        """The same for who has the lock."""
        if self._closed:
            raise zmq.Again() if self.is_cut else zmq.ZMQError(zmq.ENOTSOCK)
        socket, num_left = self._socket, len(frames)
        for frame in frames:
            num_left -= 1
            flags = _NOBLOCK_MORE if num_left else _NOBLOCK
            if type(frame) in _COPIED:
                _raw_send(socket, frame, flags)
            else:
                socket.send(frame, flags, copy=False)
        self._look_for_news()

    def _look_for_news(self) -> None:
        """Sending takes libzmq's news too: after that the descriptor is silent about them."""
        if not self.hot and self._has_news():
            self.hot = True
            self._wake_up.wake()

    def _has_news(self) -> bool:
        """Whether a message is there. Call with the lock."""
        if _getsockopt is None:
            return bool(self._socket.getsockopt(_EVENTS) & _IN)
        _getsockopt(self._handle, _EVENTS, self._events_at, self._size_at)
        return bool(self._events.value & _IN)

    def receive(self, max_frames: int, is_told: bool, is_routed: bool = False) -> list[Any] | None:
        """The next message that has arrived: its frames; where it `is_routed`, the sender's name (bytes) before them.

        Of a message with too many frames, one more than allowed. None where nothing is there, or it is closed. To ask
        whether something is there costs as much as a message, and to be wrong five times that: `is_told` is where the
        descriptor has just said so. Who has what it wants need not ask whether there is more: `hot` says so.
        """
        with self.lock:
            if self._closed:
                return None
            self.hot = is_told or self._has_news()
            if not self.hot:
                return None
            try:
                first: Any = _raw_recv(self._socket, _NOBLOCK, is_routed)
            except zmq.Again:  # the descriptor had other news
                self.hot = False
                return None
            frames = [first]
            has_more = is_routed or first.more  # a name never comes alone
            while has_more:
                frame: Any = _raw_recv(self._socket, 0, False)
                if len(frames) <= max_frames:
                    frames.append(frame)
                has_more = frame.more
        return frames

    def close(self, linger_ms: int) -> None:
        with self.lock:
            self._closed = True
            self._socket.close(linger=linger_ms)
