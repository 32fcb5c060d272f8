"""The explaining process of a machine: `python -m gnnsys.explain.serve`, started by `Explaining`.

One line on its standard input says where it reads what to do. A byte there means that weights or rows are new; it ends
when that input closes, and in the middle of a round when its parent ends. Errors of a round are lines of JSON on its
standard output. Once there are masks, newer ones are made of what trainers leave of the processors (`Pace`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.explain.explainers import Explainer, frozen
from gnnsys.explain.explanation_graph import explain_part, pool_part
from gnnsys.explain.guide import Guide
from gnnsys.explain.mailbox import Mailbox
from gnnsys.explain.masks import Masks, masks_from_arrays, masks_to_arrays
from gnnsys.explain.pace import Pace
from gnnsys.explain.weights import check_layout, layout_of, load_state_bytes
from gnnsys.graph import NODE
from gnnsys.partition import Part, open_parts

_NICE = 10  # trainers come first
_NICER = 9  # more of it, once there are masks
_MOST_TEXT = 4000  # of an error: fits a pipe, whoever reads it


class PartExplanation:
    """Rounds of one part. Each is a function of its number, of the weights and of the remote rows that it is made with,
    and of nothing that was before: whoever reads the masks adds them to those before (`Masks.over`).

    The first round of rows explains all of them, later ones `round_rows` of them in turn.
    """

    def __init__(self, part: Part, guide: Guide, rows: Mailbox, masks: Mailbox) -> None:
        self.part, self.guide, self._rows_box, self.masks_box = part, guide, rows, masks
        self.pooled = pool_part(part, guide.pools, seed=guide.seed)
        self.core_rows = part.node_data[NODE][guide.features]
        self._rows: Tensor | None = None
        self._rows_number, self._slice, self._num_slices = 0, -1, 1
        self._explained = 0  # the number of the rows that were explained last
        written = masks.read()  # by the process before this one
        self.version = 0 if written is None else masks_from_arrays(written[1]).version

    def has_rows(self, number: int) -> bool:
        """Whether rows of slice `number` are here, or others that no round has seen, looking for new ones.

        Rows may come slower than weights: then waiting for the slice of the newest weights could last for ever. Not
        where the guide is exact: then weights wait for masks.
        """
        if self._rows_box.newest != self._rows_number and (found := self._read_rows()) is not None:
            self._rows_number, (head, rows) = found[0], (found[1][0], found[1][1])
            self._slice, self._num_slices = head.tolist()
            self._rows = rows.view(-1, self.core_rows.shape[1])
        wanted = number % self._num_slices if self.guide.nodes else 0
        return self._rows is not None and (
            self._slice == wanted or (self._rows_number != self._explained and not self.guide.exact)
        )

    def _read_rows(self) -> tuple[int, list[Tensor]] | None:
        """Rows stay where they are in shared memory, unless slices take turns: then others are written over them."""
        found = self._rows_box.read(copy=False)
        is_kept = found is None or int(found[1][0][1]) == 1 or not self.guide.nodes
        return found if is_kept else self._rows_box.read()

    def explain(
        self, model: nn.Module, explainer: Explainer, version: int, position: int, pause: Callable[[], None]
    ) -> None:
        """One round: masks of the remote nodes whose rows are here and whose turn it is."""
        begin = time.perf_counter()
        assert self._rows is not None
        present = None
        if self._num_slices > 1:
            present = torch.arange(self._slice, self.pooled.num_remote, self._num_slices, device="cpu")
        with frozen(model):
            graph = explain_part(
                self.pooled, model, self.core_rows, self._rows, present, turn=self._turn(version),
                with_target=explainer.needs_target,
            )  # fmt: skip
        found = explainer.importance(model, graph, pause)
        seconds = time.perf_counter() - begin
        masks = Masks(version, self.part.index, graph.ids, found.sn, found.sf, position, found.divergence, seconds)
        self.masks_box.write(masks_to_arrays(masks))
        self.version, self._explained = version, self._rows_number

    def _turn(self, version: int) -> slice | None:
        """Which of the rows that are here are explained; None for all."""
        assert self._rows is not None
        num_turns = -(-self._rows.shape[0] // self.guide.round_rows)
        number = (version - 1) // self._num_slices  # of the round, among those of these rows
        return slice(number % num_turns, None, num_turns) if number and num_turns > 1 else None


class ExplainingProcess:
    """The parts of a machine, the model, and the mailbox its weights come by."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        guide = Guide(**orders["guide"])
        self._model, self._explainer = guide.make_model(), guide.make_explainer()
        check_layout(orders["layout"], layout_of(self._model), guide.model)
        self._weights = Mailbox.open(orders["weights"])
        self.position = -1  # of the newest weights
        self._pace = None if guide.exact else Pace(guide.share)  # nobody waits for masks that are not exact
        self._is_nice = False
        parts = open_parts(orders["path"], verify=False)  # the machine's graph server has checked these files
        self._parts = [
            PartExplanation(parts.part(int(index)), guide, Mailbox.open(boxes["rows"]), Mailbox.open(boxes["masks"]))
            for index, boxes in orders["parts"].items()
        ]

    def round(self) -> None:
        """Explains the newest weights for every part that has its rows and was not explained with them."""
        found = self._weights.read()
        if found is None:
            return
        head, state = found[1]
        self.position, number = head.tolist()
        version = number + 1  # rounds are counted from 1
        waiting = [part for part in self._parts if part.version < version and part.has_rows(number)]
        if not waiting:
            return
        load_state_bytes(self._model, state)
        for part in waiting:
            is_first = part.version == 0
            pause = self._pace.pause if self._pace is not None and not is_first else _go_on
            part.explain(self._model, self._explainer, version, self.position, pause)
            give_memory_back()
            if self._pace is not None:
                (self._pace.skip if is_first else self._pace.pause)()
        if self._pace is not None and not self._is_nice:
            be_nice(_NICER)  # from now on
            self._is_nice = True


def main() -> int:
    """The process: reads its orders, explains, ends when its input closes or on SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    orders = _orders()
    if not orders:
        return 1  # whoever started this process has gone already
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes where errors go
    _end_with(int(orders["parent"]))
    be_nice(_NICE)
    torch.set_num_threads(1)
    sys.path += [path for path in orders["paths"] if path not in sys.path]
    try:
        process = ExplainingProcess(orders)
    except Exception as error:  # whatever it is, the trainer tells it
        _tell(answers, error, -1, is_final=True)
        return 1
    failed: tuple[str, int] | None = None
    while True:
        try:
            process.round()
        except Exception as error:  # of the user's model, say: weights to come may do better
            if failed != (failed := (repr(error), process.position)):
                _tell(answers, error, process.position, is_final=False)
        if not _wait_for_news():
            return 0


def be_nice(more: int) -> None:
    """Gives way to others. Where the kernel shares time among sessions first, the one of this process does, too."""
    with contextlib.suppress(OSError):
        os.nice(more)
        Path("/proc/self/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))


def give_memory_back() -> None:
    """What a round took goes back to the machine, where the C library can do so."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _go_on() -> None:
    """No pause."""


def _end_with(parent: int) -> None:
    """Ends this process when its parent ends, whichever of the parent's threads has started it.

    The kernel's own signal (`end_with_parent`) comes when that thread ends, so that it is of no use to a process that
    was started again.
    """
    try:
        descriptor = os.pidfd_open(parent)
    except (OSError, AttributeError):  # an old kernel: it ends with its input, after a round
        return
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll()
        os._exit(1)

    threading.Thread(target=watch, name="gnnsys-parent", daemon=True).start()


def _orders() -> dict[str, Any]:
    """What the process is to do; nothing where nobody is there to say so."""
    try:
        read = Mailbox.open(json.loads(_line())).read()
    except ValueError:  # no line, or no such mailbox any more
        return {}
    return {} if read is None else json.loads(bytes(read[1][0].numpy()))  # type: ignore[no-any-return]


def _line() -> bytes:
    """One line of the input, byte by byte: what follows is for `poll`, and no buffer may hold it."""
    line = bytearray()
    while (byte := os.read(0, 1)) and byte != b"\n":
        line += byte
    return bytes(line) if byte else b""


def _wait_for_news() -> bool:
    """Until a byte comes; False where the input was closed. No deadline: this is the process's life."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN | select.POLLHUP)
    waiting.poll()
    return bool(os.read(0, 65536))


def _tell(pipe: Any, error: Exception, position: int, *, is_final: bool) -> None:
    told = {"error": f"{type(error).__name__}: {error}"[:_MOST_TEXT], "position": position, "is_final": is_final}
    with contextlib.suppress(OSError):  # who started this process has gone, and it ends as well
        pipe.write(json.dumps(told) + "\n")
        pipe.flush()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
