"""The explaining process of a machine, seen from the trainer that starts it, which never waits for it.

Weights go to the process and masks come back through shared memory; remote rows are fetched by a thread here, which
also starts the process again when it ends. Killed, stopped or slow, it has no newer masks, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

import gnnsys
from gnnsys.comm import close_in_forks
from gnnsys.explain.guide import Guide
from gnnsys.explain.mailbox import Mailbox, message_bytes
from gnnsys.explain.mask_reader import MaskReader
from gnnsys.explain.masks import Masks, masks_to_arrays
from gnnsys.explain.weights import check_layout, layout_of, plain_model, state_to_bytes
from gnnsys.graph import NODE, some
from gnnsys.sampling import DistGraph
from gnnsys.store import DistTensor

_log = logging.getLogger(__name__)

_END_SECONDS = 5.0
_LOOK_SECONDS = 0.5  # how soon a process that has ended is noticed
_MAX_RESTARTS = 3
_FETCH_BYTES = 4 << 20  # of remote rows that are asked for at once
_NOT_STARTED = "the explaining process cannot be started"


class Explaining:
    """Masks of the parts of this machine, made beside training. One per machine, in its first trainer.

    >>> explaining = Explaining(graph, model, Guide(model="my_models:make"))  # doctest: +SKIP
    >>> for position, batch in enumerate(loader):  # doctest: +SKIP
    ...     ...                                    # a step
    ...     explaining.give(model, position)
    ...     masks = explaining.take()              # None, or newer masks of one part

    A run that goes on where another stopped gives the masks that it had then (`before`, by part), and how often weights
    had been handed over (`rounds`).
    """

    def __init__(
        self,
        graph: DistGraph,
        model: nn.Module,
        guide: Guide,
        *,
        parts: Sequence[int] | None = None,
        before: Mapping[int, Masks] | None = None,
        rounds: int = 0,
    ) -> None:
        self.guide, self._graph = guide, graph
        self._parts = list(graph.parts_here if parts is None else parts)
        check_guided(graph, guide)
        if missing := set(self._parts) - set(graph.parts_here):
            raise ValueError(f"parts {sorted(missing)} are not on this machine, which has {graph.parts_here}")
        self._layout = layout_of(plain_model(model))
        check_layout(self._layout, layout_of(guide.make_model()), guide.model)
        self._table = graph.node_data[NODE][guide.features]
        self._ids = {part: remote_ids(graph, part) for part in self._parts}
        self._dtype = guide.rows_as(self._table.dtype)
        row_bytes = max(1, self._table.shape[1] * self._dtype.itemsize)
        most_rows = max(1, guide.row_bytes // row_bytes)  # by part: slices are the same wherever parts are explained
        if not guide.nodes:
            most_rows = min(most_rows, guide.round_rows)  # a sample says enough of columns
        self._num_slices = {part: max(1, -(-ids.numel() // most_rows)) for part, ids in self._ids.items()}
        self._weights = Mailbox.create(message_bytes([_head(0, 0), state_to_bytes(plain_model(model))]))
        self._rows_boxes = {part: Mailbox.create(self._rows_capacity(part)) for part in self._parts}
        self._mask_boxes = {part: Mailbox.create(self._masks_capacity(part)) for part in self._parts}
        self._reader, self._rounds = MaskReader.of(self._mask_boxes, before), rounds
        self._given: int | None = None  # the position of the newest weights
        self._newest: dict[int, Masks] = {}
        self._num_masks = self._mask_bytes = self._row_bytes = self._wire_row_bytes = self._restarts = 0
        self.error = ""  # what the process said last
        self._failed_at = -1  # the position of the newest weights that it failed with
        self._said = b""  # by it, of a line that has not ended
        self._orders: Mailbox | None = None  # what it is to do
        self._is_over = False  # it is not started again
        self._is_closed = False
        self._wanted = rounds  # the slice of rows that the newest weights are explained with
        self._news = threading.Condition()
        self._piping = threading.Lock()  # held while a pipe is used or closed: its number may be another file's then
        self._running: list[subprocess.Popen[bytes] | None] = [
            None
        ]  # the thread ends it where nobody has this any more
        try:
            self._running[0] = self._start()
        except Exception as error:  # no process is to be had now: training goes on, and the keeper tries again
            self.error = f"{_NOT_STARTED}: {error!r}"
            _log.warning("explanation: %s; training goes on without masks", self.error)
        self._fetched: dict[int, int] = {}  # the slice of rows that the process has, by part
        self._keeper = threading.Thread(
            target=_keep, args=(weakref.ref(self), self._running), name="gnnsys-explaining", daemon=True
        )
        self._keeper.start()

    def give(self, model: nn.Module, position: int) -> bool:
        """Hands the weights over if `every` steps have passed since the last time; whether it did.

        `position` is the batch number, which the masks made of them carry. Called after each step; it copies the
        model's state, and waits for nothing else.
        """
        if self._is_closed:
            raise ValueError("this explanation is closed: make another")
        if self._given is not None and 0 <= position - self._given < self.guide.every:
            return False
        wanted = self._rounds + self._weights.newest  # counted by what was given: the same in every run
        self._weights.write([_head(position, wanted), state_to_bytes(plain_model(model))])
        self._given = position
        if self.guide.nodes and any(count > 1 for count in self._num_slices.values()):
            with self._news:
                self._wanted = wanted
                self._news.notify()
        self._wake()
        return True

    def take(self) -> Masks | None:
        """Masks of one of the parts that are newer than those taken before, or None. Never waits."""
        self._listen()
        masks = self._reader.take()
        if masks is not None:
            self._newest[masks.requester] = masks
            self._num_masks += 1
            self._mask_bytes += masks.nbytes
        return masks

    def wait(self, position: int, timeout: float) -> list[Masks]:
        """Masks of every part that were made of the weights of `position` or later; TimeoutError where they are late.

        RuntimeError where they cannot be made. For runs that must repeat bit by bit; other runs `take`.
        """
        deadline = time.monotonic() + timeout
        while any(part not in self._newest or self._newest[part].position < position for part in self._parts):
            if self.take() is not None:
                continue
            if self._is_closed or self._is_over or self._failed_at >= position:
                raise RuntimeError(f"no masks of position {position}: {self.error or 'the process has ended'}")
            if time.monotonic() > deadline:
                why = self.error or "the process is slow or stopped"
                raise TimeoutError(f"no masks of position {position} within {timeout:g} s: {why}")
            time.sleep(0.005)  # masks come through shared memory: nothing wakes who waits for them
        return [self._newest[part] for part in self._parts]

    def addresses(self) -> dict[int, dict[str, int]]:
        """Where other trainers of this machine find the masks: for `MaskReader`."""
        return {part: box.address() for part, box in self._mask_boxes.items()}

    def counters(self) -> dict[str, float]:
        """What it does and costs.

        `version` and `age` (batches since the weights they were made of) of the oldest masks in use, `seconds` and
        `loss` (divergence) of their rounds, masks taken, times that the process was started again, and bytes: rows of
        other parts, those of them that came from other machines, weights and masks.
        """
        newest = list(self._newest.values())
        oldest = min(newest, key=lambda masks: masks.version) if len(newest) == len(self._parts) and newest else None
        return {
            "version": 0 if oldest is None else oldest.version,
            "age": -1 if oldest is None or self._given is None else self._given - oldest.position,
            "seconds": max((masks.seconds for masks in newest), default=0.0),
            "loss": max((masks.divergence for masks in newest), default=0.0),
            "masks": self._num_masks,
            "restarts": self._restarts,
            "torn": self._reader.torn,
            "row_bytes": self._row_bytes,
            "wire_row_bytes": self._wire_row_bytes,
            "weight_bytes": self._weights.newest * self._weights.capacity,
            "mask_bytes": self._mask_bytes,
        }

    @property
    def _process(self) -> subprocess.Popen[bytes] | None:
        return self._running[0]

    @property
    def pid(self) -> int:
        """0 where it could not be started yet."""
        return 0 if self._process is None else self._process.pid

    def close(self, timeout: float = _END_SECONDS) -> None:
        """Ends the process, by force where it does not end in time. Idempotent."""
        with self._news:
            if self._is_closed:
                return
            self._is_closed = True
            self._news.notify()
        self._keeper.join(_END_SECONDS)
        with self._piping:
            _end(self._process, timeout)
        for box in (self._orders, self._weights, *self._rows_boxes.values(), *self._mask_boxes.values()):
            if box is not None:
                box.close()

    def __enter__(self) -> Explaining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the process ---------------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(gnnsys.__file__).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", "gnnsys.explain.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            close_in_forks([process.stdin, process.stdout])
            self._tell(process.stdin)
        except BaseException:
            _end(process, 0.0)
            raise
        return process

    def _tell(self, stdin: IO[bytes]) -> None:
        """What the process is to do."""
        orders = {
            "path": str(Path(self._graph.parts.path).resolve()),
            "guide": self.guide.options() | {"arguments": dict(self.guide.arguments)},
            "layout": self._layout,
            "weights": self._weights.address(),
            "parts": {
                part: {"rows": self._rows_boxes[part].address(), "masks": self._mask_boxes[part].address()}
                for part in self._parts
            },
            "paths": sys.path,
            "parent": os.getpid(),
        }
        told = torch.frombuffer(bytearray(json.dumps(orders), "utf-8"), dtype=torch.uint8)
        self._orders = Mailbox.create(message_bytes([told]))  # a pipe takes 64 KiB, and waits for who reads
        self._orders.write([told])
        with contextlib.suppress(BrokenPipeError):  # it ended at once; the keeper sees to that
            stdin.write(json.dumps(self._orders.address()).encode() + b"\n")
            stdin.flush()
        os.set_blocking(stdin.fileno(), False)

    def _wake(self) -> None:
        """A byte through the pipe; nothing where the pipe is full or the process has ended."""
        with self._piping, contextlib.suppress(OSError, ValueError):
            if self._process is not None:
                assert self._process.stdin is not None
                os.write(self._process.stdin.fileno(), b"n")

    def _listen(self) -> None:
        """Reads what the process has said of errors, as far as it is there."""
        look = select.poll()
        with self._piping, contextlib.suppress(OSError, ValueError):
            if self._process is None:
                return
            assert self._process.stdout is not None
            stdout = self._process.stdout.fileno()
            look.register(stdout, select.POLLIN)
            if look.poll(0) and (said := os.read(stdout, 65536)):
                self._note(said)

    def _note(self, said: bytes) -> None:
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                values = json.loads(line)
                self.error = str(values["error"])
                self._failed_at = max(self._failed_at, int(values["position"]))
                self._is_over = self._is_over or bool(values["is_final"])
                _log.warning("explanation: %s; training goes on with the masks it has", self.error)

    def _tend(self) -> bool:
        """Fetches rows that are wanted, and starts the process again if it has ended; False once this is closed."""
        wanted = self._wanted
        try:
            for part in self._parts:
                number = wanted % self._num_slices[part] if self.guide.nodes else 0
                if self._fetched.get(part) != number and not self._is_closed:
                    self._fetch(part, number)
                    self._fetched[part] = number
        except Exception as error:  # of a store that is lost or closed, say: who trains hears of it there
            if self.error != (said := f"remote rows cannot be fetched: {error}"):
                self.error = said
                _log.warning("explanation: %s", said)
        with self._news:
            if self._wanted == wanted and not self._is_closed:
                self._news.wait(_LOOK_SECONDS)
            if self._is_closed:
                return False
        if (self._process is None or self._process.poll() is not None) and not self._is_over:
            self._start_again()
        return True

    def _start_again(self) -> None:
        self._listen()
        how = "could not be started" if self._process is None else f"ended with {self._process.returncode}"
        if self._is_over or self._restarts == _MAX_RESTARTS:
            self._is_over = True
            _log.warning("the explaining process %s and is not started again", how)
            return
        self._restarts += 1
        _log.warning("the explaining process %s; it is started again", how)
        try:
            started = self._start()
        except Exception as error:  # no process or no shared memory is to be had now: the keeper tries again
            self.error = f"{_NOT_STARTED}: {error!r}"
            self._is_over = self._restarts == _MAX_RESTARTS  # after the error: who waits says why
            _log.warning("explanation: %s; training goes on with the masks it has", self.error)
            return
        if self.error.startswith(_NOT_STARTED):
            self.error = ""
        with self._piping:
            _end(started if self._is_closed else self._process, 0.0)
            if not self._is_closed:
                self._running[0] = started

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _fetch(self, part: int, number: int) -> None:
        """Brings slice `number` of a part's remote rows, and tells the process."""
        num_slices, width = self._num_slices[part], self._table.shape[1]
        ids = self._ids[part][number::num_slices].contiguous()
        rows = torch.empty(ids.numel(), width, dtype=self._dtype, device="cpu")
        count = max(1, _FETCH_BYTES // max(1, width * self._table.dtype.itemsize))
        for first in range(0, ids.numel(), count):  # few at a time: batches are fetched meanwhile
            some_ids = ids[first : first + count]
            rows[first : first + count] = self._table.pull(
                some_ids, wire_dtype=None if self._dtype == self._table.dtype else self._dtype
            )  # also those of this machine are narrowed: masks are the same wherever parts are
            if self._is_closed:
                return
        self._row_bytes += rows.nbytes
        owner = self._graph.book.part_of(ids)
        away = torch.tensor([machine != self._graph.machine for machine in self._graph.machine_of_part], device="cpu")
        self._wire_row_bytes += int(away[owner].sum()) * (rows.nbytes // max(1, ids.numel()))
        self._rows_boxes[part].write([_head(number, num_slices), rows.view(-1)])
        self._wake()

    def _rows_capacity(self, part: int) -> int:
        count = -(-self._ids[part].numel() // self._num_slices[part])
        rows = torch.empty(0, dtype=self._dtype, device="cpu")
        return message_bytes([_head(0, 0), rows]) + count * self._table.shape[1] * self._dtype.itemsize + 8

    def _masks_capacity(self, part: int) -> int:
        ids, sf = self._ids[part], torch.ones(self._table.shape[1], device="cpu")
        return message_bytes(masks_to_arrays(Masks(1, part, ids, torch.ones_like(ids).to(torch.uint8), sf)))


def check_guided(graph: Any, guide: Guide) -> None:
    """ValueError unless draws on this graph can be guided."""
    if not isinstance(graph, DistGraph):
        raise ValueError("a guide is for a graph in parts: open one with gnnsys.open(DIR)")
    if not graph.is_homogeneous:
        raise ValueError(
            f"a guide takes graphs of one node type and one edge type, and this one has {some(graph.edge_types)}: "
            "leave the guide out, or partition the relation that you train on"
        )
    if guide.features not in graph.node_data[NODE]:
        raise ValueError(f"features={guide.features!r} is not among the rows of nodes, {some(graph.node_data[NODE])}")
    table = graph.node_data[NODE][guide.features]
    if not isinstance(table, DistTensor) or table.store is not graph.store:
        raise ValueError(
            f"features={guide.features!r} must be rows that the parts have, not given to this process alone: partition "
            "the graph with these rows"
        )
    if len(table.shape) != 2 or not table.dtype.is_floating_point:
        raise ValueError(f"features={guide.features!r} must be rows of floating point, got {table.dtype} {table.shape}")
    if table.mutable:
        raise ValueError(
            f"features={guide.features!r} trains, and masks are made of rows that stay: leave the guide out"
        )


def remote_ids(graph: DistGraph, part: int) -> Tensor:
    """Global ids, ascending, of the nodes of other parts that have edges into the core of a part, int64."""
    opened = graph.parts.part(part)
    first, end = opened.hops()[:2]
    return opened.halo()[: end - first].long()


def _keep(reference: weakref.ref[Explaining], running: list[subprocess.Popen[bytes] | None]) -> None:
    """Until it is closed, or nobody has it any more: that ends the process too."""
    while (explaining := reference()) is not None:
        if not explaining._tend():
            return
        del explaining
    _end(running[0], _END_SECONDS)


def _head(first: int, second: int) -> Tensor:
    return torch.tensor([first, second], dtype=torch.int64, device="cpu")


def _end(process: subprocess.Popen[bytes] | None, timeout: float) -> None:
    if process is None:
        return
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:  # it is stopped, or in the middle of a round
        process.kill()
        process.wait()
    process.stdout.close()
