"""Brings parts to the hosts that serve them, over the same channel as a job: no rsync, no shared file system.

All hosts at once. A host first says what it has: whole files are not sent, files that a killed push has begun are gone
on with where they end, what does not match its checksum is sent again and named. The manifest comes last, so parts that
can be opened are whole.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnsys.launch.channel import AgentChannel, HostError, HostLost, agent_command
from gnnsys.launch.hosts import Host
from gnnsys.launch.part_files import MANIFEST, PartFile, PartsListing, checksum, read_listing

CHUNK = 1 << 20
LOOK_SECONDS = 3600.0  # for a host to read what it has of its parts
FINISH_SECONDS = 600.0  # for a host to have a file on its disk


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """`ssh` None: agents run here. Seconds: `lost_after` of silence a host is dead, `connect_timeout` for ssh."""

    ssh: tuple[str, ...] | None = ("ssh",)
    overwrite: bool = False
    lost_after: float = 60.0
    connect_timeout: float = 20.0


@dataclass
class Pushed:
    """What a host got. `resumed`: bytes of files that were begun before; `replaced`: files that had been damaged."""

    host: str
    parts: Sequence[int]
    files_sent: int = 0
    bytes_sent: int = 0
    files_there: int = 0
    resumed: int = 0
    replaced: list[str] = field(default_factory=list)
    error: str | None = None


def push_parts(
    path: str | Path,
    hosts: Sequence[Host],
    options: PushOptions,
    *,
    to: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Pushed]:
    """Sends each host its parts of `path`, to `to` there (the same path by default); one result per host.

    An error of one host is in its result, and does not keep the others from theirs. An interrupt ends all of them.
    """
    listing = read_listing(Path(path))
    shares = shares_of(listing.num_parts, hosts)
    target = to or str(path)
    total = sum(file.bytes for share in shares for file in listing.of_parts(share))
    counted = _ByteCount(total, progress)
    channels, pool = _Channels(), ThreadPoolExecutor(max(1, len(hosts)))
    try:
        sending = [
            pool.submit(_push_to, listing, host, share, target, options, counted, channels)
            for host, share in zip(hosts, shares, strict=True)
        ]
        return [each.result() for each in sending]
    except BaseException:
        channels.cut()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def shares_of(num_parts: int, hosts: Sequence[Host]) -> list[list[int]]:
    """The parts of each host: those that its description names; else contiguous blocks, as `gnnsys.open` has them.

    >>> shares_of(4, [Host(name="a"), Host(name="b")])
    [[0, 1], [2, 3]]
    """
    if all(host.parts is None for host in hosts):
        owner = [part * len(hosts) // num_parts for part in range(num_parts)]
        return [[part for part in range(num_parts) if owner[part] == number] for number in range(len(hosts))]
    shares = [list(host.parts or ()) for host in hosts]
    for host, share in zip(hosts, shares, strict=True):
        if beyond := [part for part in share if part >= num_parts]:
            raise ValueError(
                f"host {host.name} is to serve part {beyond[0]}, there are {num_parts}: 0 to {num_parts - 1}"
            )
    if missing := [part for part in range(num_parts) if not any(part in share for share in shares)]:
        raise ValueError(f"no host is to serve part {missing[0]}: add it to a host's parts, or leave parts away")
    return shares


class _Channels:
    """The channels of all hosts, to be cut at once: whoever waits for one then has a HostLost."""

    def __init__(self) -> None:
        self._channels: list[AgentChannel] = []
        self._is_cut, self._lock = False, threading.Lock()

    def add(self, channel: AgentChannel) -> None:
        with self._lock:
            self._channels.append(channel)
            if self._is_cut:
                channel.cut()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for channel in self._channels:
                channel.cut()


class _ByteCount:
    """Bytes that are done with, of all hosts together."""

    def __init__(self, total: int, progress: Callable[[int, int, str], None] | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._lock = 0, threading.Lock()

    def add(self, count: int, what: str) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total, what)


def _push_to(
    listing: PartsListing,
    host: Host,
    share: list[int],
    target: str,
    options: PushOptions,
    counted: _ByteCount,
    channels: _Channels,
) -> Pushed:
    pushed = Pushed(host.name, share)
    try:
        command = agent_command(host, options.ssh, options.lost_after, options.connect_timeout)
        channel = AgentChannel(host, command, lambda *_: None, lost_after=options.lost_after)
        try:
            channels.add(channel)
            sender = _PartSender(channel, listing, target, pushed, counted)
            channel.result(channel.ask("hello", patience=options.lost_after, facts=False), options.connect_timeout)
            sender.send(share, options.overwrite)
        finally:
            channel.close()
    except (HostLost, HostError) as error:
        pushed.error = error.why.removeprefix("ValueError: ")
    except (OSError, ValueError) as error:  # of the files here
        pushed.error = str(error)
    return pushed


class _PartSender:
    def __init__(
        self, channel: AgentChannel, listing: PartsListing, target: str, pushed: Pushed, counted: _ByteCount
    ) -> None:
        self._channel, self._listing, self._target = channel, listing, target
        self._pushed, self._counted = pushed, counted

    def send(self, share: list[int], overwrite: bool) -> None:
        source = self._listing.path
        files = self._listing.of_parts(share)
        own = PartFile(MANIFEST, (source / MANIFEST).stat().st_size, self._listing.digest)
        wanted = [[file.name, file.bytes, file.crc32] for file in (*files, own)]
        there = self._ask("have", LOOK_SECONDS, path=self._target, files=wanted, manifest=own.crc32)
        if there["other_parts"] and not overwrite:
            raise ValueError(f"{self._target} holds other parts there: remove them, or push with --overwrite")
        whole = set(there["whole"])
        self._pushed.replaced = [name for name in there["damaged"] if name != MANIFEST]
        for file in files:
            if file.name in whole:
                self._pushed.files_there += 1
                self._counted.add(file.bytes, self._pushed.host)
            else:
                self._send_file(file, there["begun"].get(file.name))
        if own.name not in whole:
            self._send_file(own, None)

    def _send_file(self, file: PartFile, begun: list[int] | None) -> None:
        """Sends what the host has not. The file is compared with its checksum on both sides."""
        source, offset, crc32 = self._listing.path / file.name, 0, 0
        if begun is not None and begun[0] <= file.bytes and checksum(source, begun[0]) == begun[1]:
            offset, crc32 = begun
            self._pushed.resumed += offset
            self._counted.add(offset, self._pushed.host)
        with open(source, "rb") as stream:
            stream.seek(offset)
            data = stream.read(CHUNK)
            while True:  # at least once: an empty file, and one of which all had come, are begun too
                self._channel.tell(data, do="put", path=self._target, name=file.name, offset=offset, bytes=len(data))
                offset, crc32 = offset + len(data), zlib.crc32(data, crc32)
                self._pushed.bytes_sent += len(data)
                self._counted.add(len(data), self._pushed.host)
                if not (data := stream.read(CHUNK)):
                    break
        if (offset, crc32) != (file.bytes, file.crc32):
            raise ValueError(f"{source} does not match its checksum: it was altered here; make these parts again")
        self._ask("finish", FINISH_SECONDS, path=self._target, name=file.name, bytes=file.bytes, crc32=file.crc32)
        self._pushed.files_sent += 1

    def _ask(self, do: str, timeout: float, **arguments: Any) -> Any:
        return self._channel.result(self._channel.ask(do, **arguments), timeout)
