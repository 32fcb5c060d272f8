"""A machine's tables: the rows of the parts it serves, and what others may ask of them. There is no network in here.

`handlers()` is what a server serves. A process that is alone calls the same handlers itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from gnnsys.comm import Kind, Reply, Request
from gnnsys.comm.request import Handler
from gnnsys.ops import BufferPool
from gnnsys.store.pushes import Pushes
from gnnsys.store.rounds import Contribution, Deadlines
from gnnsys.store.rows import PartRows
from gnnsys.store.saved import SavedPart, load_part, save_part
from gnnsys.store.serve import pull_chunks
from gnnsys.store.spec import TableSpec
from gnnsys.store.table import Table
from gnnsys.store.wire import PUSH_MODES, named_array, read_plan

_FREE_BUFFERS = 16


class Shard:
    """The tables of one machine. Thread-safe: handlers are called by several threads at once."""

    def __init__(self, machine: int = 0) -> None:
        self.machine = machine
        self._tables: dict[int, Table] = {}  # by number
        self._lock = threading.RLock()
        self._pushes = Pushes()
        self._deadlines = Deadlines()
        self._buffers = BufferPool(_FREE_BUFFERS)

    def add(self, spec: TableSpec, part: int, rows: Tensor) -> None:
        """Serves `rows`, which never change: a map of the part's files, say."""
        added = PartRows(spec, part, rows)
        with self._lock:
            table = self._tables.get(spec.number)
            if table is None:
                table = self._register(Table(spec, self._make_state))
            elif table.spec != spec or table.init is not None:
                raise ValueError(f"table {spec.name!r} exists and is another one: {table.spec}, not {spec}")
            table.parts[part] = added

    def create(self, spec: TableSpec, parts: Sequence[int], init: dict[str, Any]) -> Table:
        """Makes the rows of `parts`; again with the same arguments is nothing.

        `init` is {"kind": "zeros"}, {"kind": "constant", "value"} or {"kind": "uniform", "low", "high", "seed"}.
        """
        fill = _filler(init)
        if any(not 0 <= part < spec.num_parts for part in parts):
            raise ValueError(f"table {spec.name!r} has parts 0 to {spec.num_parts - 1}, got {list(parts)}")
        with self._lock:
            table = self._tables.get(spec.number)
            if table is not None:
                if (table.spec, table.init, sorted(table.parts)) != (spec, init, sorted(parts)):
                    raise ValueError(
                        f"table {spec.name!r} exists with {table.spec} and {table.init}, not {spec} and {init}: drop "
                        "it first, or choose another name"
                    )
                return table
            table = Table(spec, self._make_state)
            table.init = init
            for part in parts:
                table.parts[part] = PartRows.create(spec, part)
                fill(table.parts[part])
            return self._register(table)

    def load(self, spec: TableSpec | None, name: str, parts: Sequence[int], folder: str) -> tuple[Table, str]:
        """Makes, or fills again, a table from what `save` wrote; returns it and the name of the save."""
        saved = [load_part(folder, name, part) for part in parts]
        if not saved:
            raise ValueError(f"machine {self.machine} serves no part of table {name!r}")
        if any((s.spec, s.save, s.steps) != (saved[0].spec, saved[0].save, saved[0].steps) for s in saved):
            raise ValueError(f"{folder!r} mixes parts of table {name!r} that were saved at different times")
        if spec is not None and saved[0].spec != spec:
            raise ValueError(f"{folder!r} holds {saved[0].spec}, not {spec}")
        with self._lock:
            table = self._tables.get(saved[0].spec.number)
            if table is None:
                table = self.create(saved[0].spec, parts, {"kind": "zeros"})
            if table.spec != saved[0].spec or table.init is None or sorted(table.parts) != sorted(parts):
                raise ValueError(f"table {name!r} exists and is another one: {table.spec}, not {saved[0].spec}")
        with table.lock:
            for s in saved:
                table.part(s.part).fill(s.rows)
                for state, rows in s.states.items():
                    self._state(table, state).part(s.part).fill(rows)
            table.steps = saved[0].steps
        return table, saved[0].save

    def drop(self, name: str) -> bool:
        """Forgets a table that was created, and its states; False where there was none."""
        with self._lock:
            table = self.find(name)
            if table is None:
                return False
            if table.init is None:
                raise ValueError(f"table {name!r} belongs to the graph's files and cannot be dropped")
            for dropped in [table, *table.states.values()]:
                del self._tables[dropped.spec.number]
        for dropped in [table, *table.states.values()]:
            dropped.drop()
        return True

    def save(self, name: str, folder: str, save: str, *, overwrite: bool = False) -> list[int]:
        """Writes the parts of a table, each whole or not at all; returns which."""
        table = self.table(name)
        with table.lock:
            for part, rows in sorted(table.parts.items()):
                states = {state: t.part(part).rows for state, t in table.states.items()}
                save_part(SavedPart(table.spec, part, save, table.steps, rows.rows, states), folder, overwrite)
        return sorted(table.parts)

    def table(self, name: str) -> Table:
        """The table of that name; ValueError where there is none."""
        table = self.find(name)
        if table is None:
            raise ValueError(f"table {name!r} does not exist: it was dropped, or never created")
        return table

    def names(self) -> list[str]:
        with self._lock:
            return sorted(table.spec.name for table in self._tables.values())

    def close(self) -> None:
        """Drops what was created and ends the thread that watches deadlines."""
        self._deadlines.close()
        with self._lock:
            tables = list(self._tables.values())
            self._tables.clear()
        for table in tables:
            table.drop()

    def handlers(self) -> dict[int, Handler]:
        """What a server serves, by kind."""
        return {
            Kind.PULL: self._pull,
            Kind.PUSH: self._push,
            Kind.STEP: self._step,
            Kind.CREATE: self._create,
            Kind.DROP: lambda request: Reply(options={"dropped": self.drop(_name(request))}),
            Kind.SAVE: self._save,
            Kind.DESCRIBE: self._describe,
        }

    def _pull(self, request: Request) -> Iterator[Reply]:
        return pull_chunks(request.arrays, self._by_number, self._buffers)

    def _push(self, request: Request) -> Any:
        arrays = request.arrays

        def apply() -> Reply:
            items = read_plan(arrays, 5)
            work = [(self._by_number(i[0]), i[1], named_array(arrays, i[2]), named_array(arrays, i[3])) for i in items]
            for (table, part, ids, rows), item in zip(work, items):
                if not 0 <= item[4] < len(PUSH_MODES):
                    raise ValueError(f"malformed request: unknown mode {item[4]}")
                table.push(part, ids, rows, add=PUSH_MODES[item[4]] == "add")
            return Reply()

        return self._pushes.submit(request, apply)

    def _step(self, request: Request) -> Any:
        def apply() -> Any:
            table, items = self.table(_name(request)), read_plan(request.arrays, 3)
            arrays, options = request.arrays, request.options
            found = [(part, named_array(arrays, ids), named_array(arrays, grads)) for part, ids, grads in items]
            world_size = options.get("world_size")
            if not isinstance(world_size, int) or not isinstance(options.get("optimizer"), dict):
                raise ValueError("malformed request: a step has a world_size and an optimizer")
            new = Contribution(request.sender, world_size, options["optimizer"], found)
            remaining = request.remaining()
            table.step(new)
            if not new.answer.done():
                self._deadlines.add(remaining, lambda: table.withdraw(new, remaining))
            return new.answer

        return self._pushes.submit(request, apply)

    def _create(self, request: Request) -> Reply:
        options = request.options
        bounds = request.arrays[0].tolist() if request.arrays else None
        spec = TableSpec.from_json(options["spec"], bounds) if "spec" in options else None
        parts = [int(part) for part in options["parts"]]
        if "load" in options:
            table, save = self.load(spec, _name(request), parts, str(options["load"]))
            return Reply([table.spec.bounds_tensor], {"spec": _without_bounds(table.spec), "save": save})
        if spec is None:
            raise ValueError("malformed request: no table is described")
        self.create(spec, parts, options["init"])
        return Reply()

    def _save(self, request: Request) -> Reply:
        options = request.options
        parts = self.save(_name(request), str(options["folder"]), str(options["save"]), overwrite=options["overwrite"])
        return Reply(options={"parts": parts})

    def _describe(self, request: Request) -> Reply:
        """A table, with the addresses of rows in shared memory; without a name, how many tables there are."""
        if "name" not in request.options:
            return Reply(options={"machine": self.machine, "num_tables": len(self._tables)})
        table = self.table(_name(request))
        shared = {str(p): rows.shared.address() for p, rows in table.parts.items() if rows.shared and not rows.dropped}
        options = {"spec": _without_bounds(table.spec), "shared": shared, "steps": table.steps}
        return Reply([table.spec.bounds_tensor], options)

    def _register(self, table: Table) -> Table:
        known = self._tables.setdefault(table.spec.number, table)
        if known is not table:
            raise ValueError(f"table {table.spec.name!r} cannot be told apart from {known.spec.name!r}: rename one")
        return table

    def find(self, name: str) -> Table | None:
        return next((t for t in list(self._tables.values()) if t.spec.name == name), None)

    def _by_number(self, number: int) -> Table:
        table = self._tables.get(number)
        if table is None:
            raise ValueError(f"table number {number} does not exist: it was dropped, or never created")
        return table

    def _make_state(self, spec: TableSpec, parts: Sequence[int], initial: float) -> Table:
        return self.create(spec, parts, {"kind": "constant", "value": initial} if initial else {"kind": "zeros"})

    def _state(self, table: Table, name: str) -> Table:
        if name not in table.states:
            spec = table.spec.like(f"{table.spec.name}/{name}", table.spec.dtype)
            table.states[name] = self._make_state(spec, sorted(table.parts), 0.0)
        return table.states[name]


def _filler(init: dict[str, Any]) -> Callable[[PartRows], object]:
    try:
        if init["kind"] == "zeros":
            return lambda rows: None
        if init["kind"] == "constant":
            value = float(init["value"])
            return lambda rows: rows.rows.fill_(value)
        if init["kind"] == "uniform":
            low, high, seed = float(init["low"]), float(init["high"]), int(init["seed"])
            return lambda rows: rows.fill_uniform(low, high, seed)
    except (KeyError, TypeError) as error:
        raise ValueError(f"init is not one: {init}: {error!r}") from error
    raise ValueError(f"init must be zeros, constant or uniform, got {init['kind']!r}")


def _name(request: Request) -> str:
    name = request.options.get("name")
    if not isinstance(name, str):
        raise ValueError("malformed request: it names no table")
    return name


def _without_bounds(spec: TableSpec) -> dict[str, Any]:
    return {key: value for key, value in spec.to_json().items() if key != "bounds"}
