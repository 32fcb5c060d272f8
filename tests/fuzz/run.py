"""Mutated messages against a real server process, while a correct client checks its answers throughout.

    python -m tests.fuzz.run --messages 1000000 --seed 0
    python -m tests.fuzz.run --messages 500 --seed 0 --first 123000    # those of a run that failed, again
    python -m tests.fuzz.run --sealed --messages 1000000    # sealed ones, of which none may be accepted

Ends with 0 where the server answered the correct client every time and has the memory and descriptors that it had.
Memory must have stopped growing, not only grown little: what is judged is its slope over the second half.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import zmq

import gnnsys
from gnnsys.comm import Kind, Limits, wire
from gnnsys.graph import Graph
from gnnsys.sampling import NeighborSampler, SampleKey
from tests.fuzz.mutate import message
from tests.fuzz.record import Frames, record
from tests.fuzz.sealed import AcceptedError, SealedAttacker
from tests.fuzz.served import NUM_NODES, Served, Usage, served, write_graph
from tests.sampling.machines import assert_same_sample

Point = tuple[int, Usage]  # messages so far, and what the server has then

BATCH = 250
WAIT_MS = 30_000
MEMORY_SLACK = 16 << 20  # since the first quarter: names, kept replies and the allocator's own
GROWTH_SLACK = 8 << 20  # of the second half: 16 bytes per message of a million are found, the allocator's own is not
NUM_POINTS = 40  # at which memory is looked at
BATCHES_PER_CHECK = 20  # in which the correct client must have been answered; one check is some ten requests
CHECK_SECONDS = 120.0
DESCRIPTOR_SLACK = 16  # connections come and go


class Attacker:
    """Sends mutated messages over several connections, and takes whatever comes back."""

    def __init__(self, endpoint: str, recorded: list[Frames], seed: int, num_connections: int = 3) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()
        self._recorded, self._seed = recorded, seed
        self._context = zmq.Context()
        self._sockets = [self._connect(endpoint) for _ in range(num_connections)]

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.rcvtimeo, socket.rcvhwm, socket.sndhwm = 0, WAIT_MS, 0, 0
        socket.connect(endpoint)
        return socket

    def message(self, number: int) -> tuple[int, Frames]:
        """Message `number` of a run, and the connection it goes over."""
        return number % len(self._sockets), message(self._seed, number, self._recorded)

    def send(self, first: int, end: int) -> None:
        """Messages [first, end); returns when all but those that wait are done. `zmq.Again` where that is never."""
        for number in range(first, end):
            connection, frames = self.message(number)
            self._sockets[connection].send_multipart(frames)
        marker = (1 << 62) + end
        for socket in self._sockets:  # the least urgent of all is answered after what came before it
            header = wire.make_header(Kind.DESCRIBE, marker, timeout_us=3 * 10**7, priority=2**31 - 1)
            socket.send_multipart([bytes(frame) for frame in wire.encode(header, (), None, Limits())])
        for socket in self._sockets:
            while True:
                front = socket.recv_multipart()[0]
                answered = wire.read_header(front, Limits())
                self.statuses[answered.status] += 1
                if answered.request_id == marker and answered.kind == Kind.DESCRIBE:
                    break

    def check(self) -> str | None:
        """What is wrong with what the server has done: nothing that this attacker could tell."""
        return None

    def close(self) -> None:
        self._context.destroy(linger=0)


class Checker:
    """A correct client in a thread: rows, samples and what it wrote itself, compared for as long as this lasts."""

    def __init__(self, folder: Path, endpoint: str, truth: Graph, key: Path | None = None) -> None:
        self.num_checks = 0
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._session = gnnsys.init(process_group=False, timeout=120)
        self._graph = self._session.open(folder, servers=[endpoint], key=key)
        (self._type,) = self._graph.node_types
        self._x = truth.node_data[self._type]["x"][self._graph.original_ids(torch.arange(NUM_NODES))]
        # More than fits a first frame: from here on pyzmq's own thread is there, which lets go of what was sent.
        many = torch.arange(NUM_NODES).repeat(4)
        assert torch.equal(self._graph.node_data[self._type]["x"][many], self._x[many])
        self._own = self._graph.store.create("of the correct client", NUM_NODES, (4,), dtype=torch.int64)
        self._written = torch.zeros(NUM_NODES, 4, dtype=torch.int64)
        self._generator = torch.Generator().manual_seed(1)
        self._seeds = torch.arange(0, NUM_NODES, 40)
        self._sampler = NeighborSampler(self._graph, [4, 3])
        self._sampled = NeighborSampler(truth, [4, 3]).sample({self._type: self._seeds}, key=SampleKey(5))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(0.02):
                self.check()
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        ids = torch.randint(0, NUM_NODES, (300,), generator=self._generator)
        assert torch.equal(self._graph.node_data[self._type]["x"][ids], self._x[ids]), "rows are not those of the graph"
        self._own[ids[:50]] = torch.full((50, 4), self.num_checks)
        self._written[ids[:50]] = self.num_checks
        assert torch.equal(self._own[ids], self._written[ids]), "rows are not those that were written"
        seeds = self._graph.global_ids(self._seeds)
        assert_same_sample(self._sampler.sample({self._type: seeds}, key=SampleKey(5)), self._sampled, self._graph)
        self.num_checks += 1

    def await_checks(self, count: int) -> bool:
        """Whether `count` more checks were done in time."""
        wanted, deadline = self.num_checks + count, time.monotonic() + CHECK_SECONDS
        while self.num_checks < wanted and self.error is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.num_checks >= wanted

    def close(self) -> None:
        """Idempotent; `error` is final then."""
        self._ended.set()
        self._thread.join(120)
        if self._thread.is_alive():
            self.error = self.error or TimeoutError("the last check of the correct client has no end")
        self._session.close()


def fuzz(
    folder: Path, *, num_messages: int, seed: int, first: int = 0, report: float = 10.0, is_sealed: bool = False
) -> str | None:
    """What went wrong, with the numbers of the messages that were under way; None where nothing did.

    With `is_sealed` the server has a key, and sealed messages are changed: none of them may be accepted.
    """
    truth = write_graph(folder)
    with contextlib.ExitStack() as ends:
        server, key = ends.enter_context(served(folder)), None
        recorded = record(folder, server.endpoint)
        if is_sealed:
            key = folder.parent / "key"
            server = ends.enter_context(served(folder, key))
        checker = Checker(folder, server.endpoint, truth, key)
        ends.callback(checker.close)
        attacker: Attacker | SealedAttacker
        if key is None:
            attacker = Attacker(server.endpoint, recorded, seed)
        else:
            attacker = SealedAttacker(server.endpoint, key, recorded, seed)
        ends.callback(attacker.close)
        points: list[Point] = []
        checks = checker.num_checks
        began = reported = time.monotonic()
        for at in range(first, first + num_messages, BATCH):
            end = min(at + BATCH, first + num_messages)
            try:
                attacker.send(at, end)
            except zmq.Again:
                return _failed(server, attacker, seed, at, end, "the server does not read any more")
            except AcceptedError as error:
                return _failed(server, attacker, seed, at, end, str(error))
            if server.process.poll() is not None or checker.error is not None:
                return _failed(server, attacker, seed, at, end, repr(checker.error))
            if (end - first) % (BATCHES_PER_CHECK * BATCH) == 0:
                if checker.num_checks == checks and not checker.await_checks(1):
                    return _failed(server, attacker, seed, at, end, f"the correct client starves: {checker.error!r}")
                checks = checker.num_checks
            if (end - first) * NUM_POINTS >= (len(points) + 1) * num_messages:
                points.append((end - first, server.usage()))
            if time.monotonic() - reported > report:
                reported = time.monotonic()
                print(f"{end - first:,} messages, {checker.num_checks} checks, {server.usage()}", flush=True)
        rate = num_messages / (time.monotonic() - began)
        if not checker.await_checks(2):  # the second began after the last message
            return _failed(server, attacker, seed, at, end, f"the correct client starves: {checker.error!r}")
        checks = checker.num_checks
        checker.close()
        if checker.error is not None:
            return _failed(server, attacker, seed, at, end, repr(checker.error))
        if (why := attacker.check()) is not None:
            return why
        for at, usage in points[:: max(1, NUM_POINTS // 10)]:
            print(f"{at:>12,} messages: {usage}")
        print(f"{num_messages:,} messages, {rate:,.0f}/s, {checks} checks; growth {growth(points) / 1e6:.1f} MB")
        print(f"answers by status: {dict(attacker.statuses)}")
        return judge(points)


def growth(points: Sequence[Point]) -> float:
    """Bytes that the second half added: the median slope between any two of its points, times its messages."""
    half = points[len(points) // 2 :]
    if len(half) < 2:
        return 0.0
    slopes = [(b.memory - a.memory) / (j - i) for (i, a), (j, b) in itertools.combinations(half, 2)]
    return statistics.median(slopes) * (half[-1][0] - half[0][0])


def judge(points: Sequence[Point]) -> str | None:
    """What grew; None where everything is as it was after a quarter, and memory has stopped growing."""
    settled, last = points[len(points) // 4][1], points[-1][1]
    if last.memory > settled.memory + MEMORY_SLACK:
        return f"memory grew from {settled.memory} to {last.memory} bytes"
    if growth(points) > GROWTH_SLACK:
        return f"memory grows: {growth(points):.0f} bytes in the second half"
    if last.descriptors > settled.descriptors + DESCRIPTOR_SLACK or last.threads > settled.threads:
        return f"descriptors or threads grew: {settled}, {last}"
    return None


def _failed(server: Served, attacker: Attacker | SealedAttacker, seed: int, first: int, end: int, why: str) -> str:
    code = server.process.poll()
    file = Path(tempfile.gettempdir()) / f"gnnsys-fuzz-{seed}-{first}.hex"
    lines = [" ".join(frame.hex() for frame in attacker.message(number)[1]) for number in range(first, end)]
    file.write_text("\n".join(lines))
    return f"{why} (exit code {code}) after messages {first} to {end} of seed {seed}; they are in {file}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sealed", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gnnsys-fuzz-") as folder:
        parts = Path(folder) / "parts"
        why = fuzz(parts, num_messages=args.messages, seed=args.seed, first=args.first, is_sealed=args.sealed)
    print("FAILED: " + why if why else "ok", flush=True)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
