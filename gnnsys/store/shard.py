"""A machine's tables: the rows of the parts it serves, and what others may ask of them. There is no network in here.

`handlers()` is what a server serves. A process that is alone calls the same handlers itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gnnsys.comm import Handler, Header, Kind, Reply, Request, ShortReply
from gnnsys.ops import BufferPool
from gnnsys.store.capacity import check_room, memory_for_tables, parts_of_tables
from gnnsys.store.describe import bounds_in, contribution_in, described, filler, name_in
from gnnsys.store.incarnation import Life
from gnnsys.store.lent_memory import Borrowed
from gnnsys.store.message_plan import PUSH_MODES, named_array, read_plan, unknown_table
from gnnsys.store.part_rows import PartRows
from gnnsys.store.pull_serving import answer_small, pull_chunks
from gnnsys.store.push_order import PushOrder
from gnnsys.store.rounds import Deadlines
from gnnsys.store.row_optimizers import STATES, state_row_shape
from gnnsys.store.saved import SavedPart, load_part, save_part
from gnnsys.store.snapshots import Snapshots
from gnnsys.store.spec import TableSpec, check_new
from gnnsys.store.table import Table, free

_FREE_BUFFERS = 16
_LOOKS = 8  # for dead ranks, in the time after which they count as such


class Shard:
    """The tables of one machine. Thread-safe: handlers are called by several threads at once.

    `max_bytes` is how much the tables that are created may take (by default `memory_for_tables()`), `folder` where
    whoever asks may have tables saved and loaded: None is anywhere, as the user whose process this is.
    """

    def __init__(
        self, machine: int = 0, life: Life | None = None, *, max_bytes: int | None = None, folder: Path | None = None
    ) -> None:
        self.machine = machine
        self._life = life or Life(machine)
        self._max_bytes = memory_for_tables() if max_bytes is None else max_bytes
        self._max_created = parts_of_tables()
        self._folder = None if folder is None else folder.resolve()
        self._tables: dict[int, Table] = {}  # by number
        self._names: dict[str, Table] = {}
        self._lock = threading.RLock()
        self._dropped: set[int | str] = set()  # numbers and names, in a later life
        self._pushes = PushOrder(forgot=self._life.gone if self._life.number else None)
        self._watches = False  # over ranks that steps wait for
        self._deadlines = Deadlines()
        self._snapshots = Snapshots()
        self._buffers = BufferPool(_FREE_BUFFERS)
        self._borrowed = Borrowed(self._deadlines.after)
        self._is_closed = False
        self._orders = ThreadPoolExecutor(1, "gnnsys-orders")  # what reads and writes whole tables; starts when needed
        weakref.finalize(self, _let_go, self._deadlines, self._orders).atexit = False

    def add(self, spec: TableSpec, part: int, rows: Tensor) -> None:
        """Serves `rows`, which never change: a map of the part's files, say."""
        added = PartRows(spec, part, rows)
        with self._lock:
            table = self.find(spec.name)
            if table is None:
                table = self._register(Table(spec, self._state))
            elif table.spec != spec or table.init is not None:
                raise ValueError(f"table {spec.name!r} exists and is another one: {table.spec}, not {spec}")
            table.parts[part] = added

    def create(self, spec: TableSpec, parts: Sequence[int], init: dict[str, Any], of: Table | None = None) -> Table:
        """Makes the rows of `parts`; again with the same arguments is nothing.

        `init` is {"kind": "zeros"}, {"kind": "constant", "value"} or {"kind": "uniform", "low", "high", "seed"}.
        `of` is the table that this one is an optimizer's state of.
        """
        fill = filler(init)
        if any(not 0 <= part < spec.num_parts for part in parts) or len(set(parts)) != len(parts):
            raise ValueError(f"table {spec.name!r} has parts 0 to {spec.num_parts - 1}, got {list(parts)}")
        with self._lock:
            table = self.find(spec.name)
            if table is not None:
                if (table.spec, table.init, sorted(table.parts)) != (spec, init, sorted(parts)):
                    raise ValueError(
                        f"table {spec.name!r} exists with {table.spec} and {table.init}, not {spec} and {init}: drop "
                        "it first, or choose another name"
                    )
                return table
            created = [
                rows for table in self._tables.values() if table.init is not None for rows in table.parts.values()
            ]
            check_room(spec, parts, [r.rows.nbytes for r in created], self._max_bytes, self._max_created, self.machine)
            table = Table(spec, self._state, of)
            table.init = init
            try:
                for part in parts:
                    table.parts[part] = PartRows.create(spec, part)
                    fill(table.parts[part])
                return self._register(table)
            except (RuntimeError, OverflowError, TypeError, ValueError) as error:
                table.drop()  # its memory and descriptors
                raise ValueError(f"table {spec.name!r} cannot begin with {init}: {error}") from error

    def load(self, name: str, parts: Sequence[int], folder: str, generation: int = 0) -> tuple[Table, str]:
        """Makes, or fills again, a table from what `save` wrote; returns it and the name of the save."""
        saved = [load_part(folder, name, part) for part in parts]
        if not saved:
            raise ValueError(f"machine {self.machine} serves no part of table {name!r}")
        first = saved[0]
        if any((s.spec, s.save, s.step_counts) != (first.spec, first.save, first.step_counts) for s in saved):
            raise ValueError(f"{folder!r} mixes parts of table {name!r} that were saved at different times")
        with self._lock:
            table = self.find(name)
            if table is None:
                table = self.create(replace(first.spec, generation=generation), parts, {"kind": "zeros"})
            if table.spec != first.spec or table.init is None or sorted(table.parts) != sorted(parts):
                remedy = ""
                if replace(table.spec, bounds=first.spec.bounds) == first.spec != table.spec:
                    remedy = (
                        f". Only their cuts differ: make the table with bounds={first.spec.bounds}, as it was saved; "
                        "an embedding of nodes with num_rows= and name=, and without node_type="
                    )
                raise ValueError(f"table {name!r} exists and is another one: {table.spec}, not {first.spec}{remedy}")
        with table.held():
            self._restart(table, "loaded from a save", sorted({state for s in saved for state in s.states}))
            for s in saved:
                table.part(s.part).fill(s.rows)
                for state, rows in s.states.items():
                    table.states[state].part(s.part).fill(rows)
            table.step_counts = dict(first.step_counts)
        return table, first.save

    def begin_restore(self, name: str, steps: int, states: Sequence[str]) -> Table:
        """Makes a table ready to be written from a checkpoint: with these optimizer states, after so many steps."""
        table = self.table(name)
        if table.init is None:
            raise ValueError(f"table {name!r} belongs to the graph's files and is not restored")
        if not {*states} <= {state for of in STATES.values() for state in of}:
            raise ValueError(f"table {name!r} cannot have states {list(states)}: optimizers here keep {STATES}")
        with table.held():
            self._restart(table, "restored from a checkpoint", states)
            table.set_steps(steps, states)
        return table

    def _restart(self, table: Table, what: str, states: Sequence[str]) -> None:
        """Gives up steps that wait, and has a table keep these optimizer states and no others: all that a save has."""
        with table.lock:
            table.rounds.restart(f"table {table.spec.name!r} was {what} meanwhile")
            for state in [state for state in table.states if state not in states]:
                self._drop_state(table, state)
            table.step_counts = {}
            for state in states:
                self._state(table, state)

    def drop(self, name: str) -> bool:
        """Forgets a table that was created, and its states; False where there was none."""
        with self._lock:
            table = self.find(name)
            if table is None:
                return False
            if table.init is None:
                raise ValueError(f"table {name!r} belongs to the graph's files and cannot be dropped")
            for dropped in [table, *table.states.values()]:
                del self._tables[dropped.spec.number], self._names[dropped.spec.name]
        for dropped in [table, *table.states.values()]:
            dropped.drop()
            if self._life.number:
                self._dropped |= {dropped.spec.number, dropped.spec.name}
        return True

    def save(self, name: str, folder: str, save: str, *, overwrite: bool = False) -> list[int]:
        """Writes the parts of a table, each whole or not at all; returns which."""
        table = self.table(name)
        with table.held():
            for part, rows in sorted(table.parts.items()):
                states = {state: t.part(part).rows for state, t in table.states.items()}
                saved = SavedPart(table.spec, part, save, dict(table.step_counts), rows.rows, states)
                save_part(saved, folder, overwrite, self._check_open)
        return sorted(table.parts)

    def table(self, name: str) -> Table:
        """The table of that name; ValueError where there is none."""
        table = self.find(name)
        if table is None:
            raise self._missing(name, f"table {name!r} does not exist: it was dropped, or never created")
        return table

    def names(self) -> list[str]:
        with self._lock:
            return sorted(table.spec.name for table in self._tables.values())

    def close(self) -> None:
        """Drops what was created, and ends its threads."""
        self._is_closed = True
        self._deadlines.close()
        self._snapshots.close()
        self._borrowed.close()
        self._orders.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            tables = list(self._tables.values())
            self._tables.clear()
            self._names.clear()
        for table in tables:
            table.drop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this shard is closed, and its tables are gone: its session has ended")

    def handlers(self) -> dict[int, Handler]:
        """What a server serves, by kind."""
        return {
            Kind.PULL: self._pull,
            Kind.PUSH: self._push,
            Kind.STEP: self._step,
            Kind.CREATE: self._create,
            Kind.DROP: lambda request: Reply(options={"dropped": self.drop(name_in(request))}),
            Kind.SAVE: self._save,
            Kind.DESCRIBE: self._describe,
        }

    def _pull(self, request: Request) -> Iterator[Reply]:
        return pull_chunks(request.arrays, self._by_number, self._buffers, request.chunk_bytes)

    def answer_small(self, header: Header, front: memoryview) -> ShortReply | None:
        """Answers a pull of few rows from the bytes of its message; None where the handler is to do it."""
        return answer_small(header, front, self._tables)

    def _push(self, request: Request) -> Any:
        arrays = request.arrays
        if self._life.number:  # before it waits for others of its stream, which may have come in an earlier life
            for item in read_plan(arrays, 5):
                self._by_number(item[0])

        def apply() -> Reply:
            items = read_plan(arrays, 5)
            work = [(self._by_number(i[0]), i[1], named_array(arrays, i[2]), named_array(arrays, i[3])) for i in items]
            for (table, part, ids, rows), item in zip(work, items, strict=True):
                if not 0 <= item[4] < len(PUSH_MODES):
                    raise ValueError(f"malformed request: unknown mode {item[4]}")
                if len(items) > 1:  # all or none of them; of one alone, the native code sees to it
                    table.check_push(part, ids, rows)
            with free(table for table, *_ in work):
                for (table, part, ids, rows), item in zip(work, items, strict=True):
                    table.push(part, ids, rows, add=PUSH_MODES[item[4]] == "add")
            return Reply()

        return self._pushes.submit(request, apply)

    def _step(self, request: Request) -> Any:
        if self._life.number and type(request.options.get("table")) is int:
            self._by_number(request.options["table"])

        def apply() -> Any:
            number, new = contribution_in(request)
            table, remaining = self._by_number(number), request.remaining()
            if "memory" in request.options:
                self._borrowed.bring(new, request, table)
            with free([table]):
                table.step(new)
            if not new.answer.done():
                self._deadlines.add(remaining, lambda: table.withdraw(new, remaining))
                self._watch_ranks()
            return new.answer

        return self._pushes.submit(request, apply)

    def _watch_ranks(self) -> None:
        """From the first step that waits on: those that wait for a rank that counts as dead are told."""
        if not self._watches and self._life.silent_for is not None:
            self._watches = True
            self._deadlines.after(self._life.lost_after / _LOOKS, self._look_for_ranks)

    def _look_for_ranks(self) -> None:
        life = self._life
        assert life.silent_for is not None
        with self._lock:
            tables = list(self._tables.values())
        for table in tables:
            with table.lock:
                table.rounds.lose_silent(life.silent_for, life.lost_after)
        self._deadlines.after(life.lost_after / _LOOKS, self._look_for_ranks)

    def _create(self, request: Request) -> Reply | Future[Reply]:
        self._check_open()
        options = request.options
        bounds = bounds_in(request.arrays[0]) if request.arrays else None
        generation, parts = int(options.get("generation", 0)), [int(part) for part in options["parts"]]
        if "load" in options or "restore" in options:
            if options.get("ends") is not None:
                self._pushes.end(request, int(options["ends"]))
            folder = self._allowed(options["load"]) if "load" in options else None
            return self._orders.submit(self._bring_back, request, parts, generation, folder)
        if "spec" not in options:
            raise ValueError("malformed request: no table is described")
        spec = TableSpec.from_json(options["spec"], bounds, generation)
        check_new(spec)
        with self._lock:
            existed = self.find(spec.name) is not None
            if self._life.number and options.get("existed") and not existed:
                raise self._life.gone()  # other machines have it since before this call: here it was, and is no more
            table = self.create(spec, parts, options["init"])
        return Reply([table.spec.bounds_tensor], {**self._made(table), "existed": existed})

    def _bring_back(self, request: Request, parts: list[int], generation: int, folder: str | None) -> Reply:
        """Loads a table from a save in `folder`, or makes one ready to be restored."""
        name, options = name_in(request), request.options
        if folder is not None:
            table, save = self.load(name, parts, folder, generation)
            return Reply([table.spec.bounds_tensor], {**self._made(table), "save": save})
        table = self.begin_restore(name, int(options["restore"]), [str(state) for state in options["states"]])
        return Reply([table.spec.bounds_tensor], described(table.spec))

    def _made(self, table: Table) -> dict[str, Any]:
        return {**described(table.spec), "life": self._life.number, "life_age": self._life.age}

    def _save(self, request: Request) -> Reply | Future[Reply]:
        """Writes a table; or takes a snapshot, to be written later; or says when that was done."""
        self._check_open()
        options = request.options
        if "written" in options:
            return self._snapshots.written(str(options["written"]))
        name, folder, save = name_in(request), self._allowed(options["folder"]), str(options["save"])

        def write() -> Reply:
            if options.get("snapshot"):
                copy = options.get("copy", True) is True
                return Reply(options=self._snapshots.take(self.table(name), folder, save, copy=copy))
            return Reply(options={"parts": self.save(name, folder, save, overwrite=options["overwrite"] is True)})

        return self._orders.submit(write)

    def _allowed(self, folder: Any) -> str:
        """A folder that somebody asks to save to or load from; ValueError where that is not for them to say."""
        if not isinstance(folder, str) or not folder or "\0" in folder:
            raise ValueError(f"malformed request: {folder!r} is not the path of a folder")
        if self._folder == Path(os.devnull):
            raise ValueError("this server saves and loads no tables: start it with --tables DIR")
        if self._folder is not None and not Path(folder).resolve().is_relative_to(self._folder):
            raise ValueError(f"{folder!r} is not below {str(self._folder)!r}, where tables may be saved")
        return folder

    def _describe(self, request: Request) -> Reply:
        """A table, with the addresses of rows in shared memory; without a name, how many tables there are."""
        if "name" not in request.options:
            return Reply(options={"machine": self.machine, "num_tables": len(self._tables)})
        table = self.table(name_in(request))
        shared = {str(p): rows.shared.address() for p, rows in table.parts.items() if rows.shared and not rows.dropped}
        steps = {"steps": table.steps, "step": table.rounds.next}
        options = {**described(table.spec), "shared": shared, **steps}
        if "memory" in request.options:
            options["reads_memory"] = self._borrowed.reaches(request.options["memory"])
        return Reply([table.spec.bounds_tensor], options)

    def _register(self, table: Table) -> Table:
        known = self._tables.setdefault(table.spec.number, table)
        if known is not table:
            raise ValueError(f"table {table.spec.name!r} cannot be told apart from {known.spec.name!r}: rename one")
        self._names[table.spec.name] = table
        return table

    def find(self, name: str) -> Table | None:
        """The table of that name, or None."""
        return self._names.get(name)

    def _by_number(self, number: int) -> Table:
        table = self._tables.get(number)
        if table is None:
            raise self._missing(number, unknown_table(number))
        return table

    def _missing(self, which: int | str, text: str) -> Exception:
        """What is said of a table that is not here: an earlier life may have had it."""
        return self._life.gone() if self._life.number and which not in self._dropped else ValueError(text)

    def _drop_state(self, table: Table, name: str) -> None:
        with self._lock:
            dropped = table.states.pop(name)
            del self._tables[dropped.spec.number], self._names[dropped.spec.name]
        dropped.drop()

    def _state(self, table: Table, name: str, initial: float = 0.0) -> Table:
        """A state that an optimizer keeps beside a table, made where it is missing."""
        with self._lock:
            if name not in table.states:
                shape = state_row_shape(name, table.spec.row_shape)
                spec = table.spec.like(f"{table.spec.name}/{name}", table.spec.dtype, shape)
                if self._tables.get(table.spec.number) is not table:
                    raise ValueError(f"table {table.spec.name!r} was dropped")
                if self.find(spec.name) is not None:
                    raise ValueError(
                        f"table {spec.name!r} exists, and its name is kept for an optimizer's state of "
                        f"{table.spec.name!r}: drop it, and choose another"
                    )
                init = {"kind": "constant", "value": initial} if initial else {"kind": "zeros"}
                table.states[name] = self.create(spec, sorted(table.parts), init, of=table)
            return table.states[name]


def _let_go(deadlines: Deadlines, orders: ThreadPoolExecutor) -> None:
    deadlines.stop()
    orders.shutdown(wait=False, cancel_futures=True)
