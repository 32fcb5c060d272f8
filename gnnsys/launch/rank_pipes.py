"""What ranks print goes through pipes, not through files that torchrun reads: no job fills the disk of its host.

A rank that prints faster than the launcher is read waits, as in any pipe. Runs in torchrun's process (`torchrun.py`);
`rank_output.py` reads what it writes.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import threading
from collections.abc import Iterator

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from gnnsys.launch.rank_output import BEGIN, END

_CHUNK = 1 << 20  # more than a pipe holds
_MOST_PIECE = 900  # letters; a write of up to 4096 bytes is not mixed with those of other threads
_ATOMIC = select.PIPE_BUF


class RankPipes:
    """A pipe for each stream of each rank, and a thread that writes what comes to stdout (1) or stderr (2)."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[str, int, codecs.IncrementalDecoder]] = {}  # by the end that is read
        self._writers: list[int] = []
        self._wake_reader, self._wake_writer = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._wake_reader, select.POLLIN)
        self._thread = threading.Thread(target=self._pump, daemon=True)

    def add(self, rank: str, stream: int) -> str:
        """A file that the rank is to have as its stream: a path, since torchrun takes nothing else."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._streams[reader] = rank, stream, codecs.getincrementaldecoder("utf-8")("replace")
        self._writers.append(writer)
        self._poll.register(reader, select.POLLIN)
        return f"/proc/{os.getpid()}/fd/{writer}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Passes on what has come until now, and returns. Processes that outlive their rank are not waited for."""
        os.close(self._wake_writer)
        if self._thread.is_alive():
            self._thread.join()

    def _pump(self) -> None:
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            is_last = self._wake_reader in ready
            for reader in list(self._streams) if is_last else ready:
                self._pass_on(reader)
            if is_last:
                return

    def _pass_on(self, reader: int) -> None:
        try:
            data = os.read(reader, _CHUNK)
        except BlockingIOError:
            return
        rank, stream, decoder = self._streams[reader]
        batch = b""
        for record in records(rank, decoder.decode(data)):
            if len(batch) + len(record) > _ATOMIC:
                _write(stream, batch)
                batch = b""
            batch += record
        _write(stream, batch)


def records(rank: str, text: str) -> Iterator[bytes]:
    """Text of a rank in pieces, each of one line at most and with a header: none is longer than a write may be."""
    *lines, last = text.replace(BEGIN, "\\x1e").split("\n")
    for line in lines:
        *pieces, end = _pieces(line)
        for piece in pieces:
            yield f"{BEGIN}{rank}{END}{piece}{BEGIN}{END}".encode()
        yield f"{BEGIN}{rank}{END}{end}\n".encode()
    for piece in _pieces(last) if last else ():
        yield f"{BEGIN}{rank}{END}{piece}{BEGIN}{END}".encode()  # the last header is nobody's: the line goes on


def _pieces(line: str) -> list[str]:
    return [line[begin : begin + _MOST_PIECE] for begin in range(0, len(line), _MOST_PIECE)] or [""]


def _write(stream: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads: ranks must not wait for it before they are ended
        while data:
            data = data[os.write(stream, data) :]


class PipedLogs(DefaultLogsSpecs):
    """torchrun's own idea of where ranks write, but that their streams are pipes."""

    def __init__(self, folder: str, pipes: RankPipes) -> None:
        super().__init__(log_dir=folder)
        self._pipes = pipes

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = super().reify(envs)
        for local_rank, env in envs.items():
            found.stdouts[local_rank] = self._pipes.add(env["RANK"], 1)
            found.stderrs[local_rank] = self._pipes.add(env["RANK"], 2)
        self._pipes.start()
        return found
