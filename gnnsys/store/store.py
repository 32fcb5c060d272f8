"""Store: every table of a job, read and written by global row number from any process.

Rows that this process can reach by itself are read directly; others come from the shard that has them. All changes go
through the owner's shard, which applies them once and in order, so that a process reads what it wrote.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Client, Kind
from gnnsys.ops import BufferPool
from gnnsys.store.candidates import Candidate, Located, Policy, choose, locate, nearest
from gnnsys.store.checks import check_ids, checked_rows, init_json, out_for
from gnnsys.store.describe import spec_in
from gnnsys.store.dist_tensor import DistTensor
from gnnsys.store.lent_memory import Lender
from gnnsys.store.machines import ORDER_SECONDS, AllMachines, Machines, reply_of
from gnnsys.store.message_plan import PUSH_MODES, SMALL_ROWS, unknown_table
from gnnsys.store.outbox import Outbox
from gnnsys.store.part_rows import SHARD, Outdated, PartRows
from gnnsys.store.pull import MessageOptions, PendingPull, Pull, RenewedPull, Target, Wanted, begin
from gnnsys.store.push import PendingPush, push_messages, step_messages
from gnnsys.store.row_optimizers import check_optimizer, state_names
from gnnsys.store.shard import Shard
from gnnsys.store.shared_rows import SharedRows
from gnnsys.store.small_pull import SmallTable
from gnnsys.store.source import check_policy
from gnnsys.store.spec import TableSpec, check_new, even_bounds

_FREE_BUFFERS = 16


class Store:
    """`machine_of_part[p]` serves part p; this process is rank `rank` on `machine`.

    Alone, `local` is the shard itself; with others, `client` reaches the machines' servers. `policy` chooses which of
    the candidates for rows serves them; each read may say otherwise. Thread-safe.
    """

    def __init__(
        self,
        *,
        machine_of_part: Sequence[int],
        machine: int = 0,
        client: Client | None = None,
        local: Shard | None = None,
        rank: int = 0,
        world_size: int = 1,
        timeout: float = 60.0,
        policy: Policy | None = None,
    ) -> None:
        check_policy(policy)
        if client is None and local is None:
            raise ValueError("a store needs a client, to reach shards, or a local shard")
        self.machine_of_part = tuple(machine_of_part)
        self.machine, self.rank, self.world_size = machine, rank, world_size
        self._local = local
        self._machines = Machines(client, local, rank, secrets.randbits(62), timeout)
        self._all_machines = AllMachines(self._machines, self.machine_of_part)
        self.policy: Policy = nearest if policy is None else policy
        self._specs: dict[str, TableSpec] = {}
        self._rows: dict[str, dict[int, PartRows]] = {}  # what this process reads by itself
        self._replicas: dict[str, dict[int, list[int]]] = {}  # machines beside `machine_of_part`, by table and part
        self._candidates: dict[str, list[tuple[Candidate, ...]]] = {}
        self._small_tables: dict[str, SmallTable] = {}
        self._outbox = Outbox(self._machines, self._refused)
        self._lock = threading.RLock()
        self._is_closed = False
        self._buffers = BufferPool(_FREE_BUFFERS)
        self._lender = Lender()

    @property
    def num_parts(self) -> int:
        return len(self.machine_of_part)

    # Tables

    def register(self, spec: TableSpec) -> None:
        """Registers a table. This process may hold none of its rows. Registering the same spec twice is a no-op."""
        if spec.num_parts != self.num_parts:
            raise ValueError(f"table {spec.name!r} has {spec.num_parts} parts, the store has {self.num_parts}")
        with self._lock:
            known = self._specs.setdefault(spec.name, spec)
        if known != spec:
            raise ValueError(f"table {spec.name!r} exists and is another one: {known}, not {spec}")

    def add_local(self, spec: TableSpec, part: int, rows: Tensor) -> None:
        """Adds rows that this process reads by itself, a map of the part's files for example. They never change."""
        self.register(spec)
        with self._lock:
            self._rows.setdefault(spec.name, {})[part] = PartRows(spec, part, rows)
            self._candidates.pop(spec.name, None)

    def add_replica(self, name: str, part: int, machine: int) -> None:
        """Another machine that has the rows of a part: a candidate behind the one that serves it.

        Only for rows that never change, since changes go to `machine_of_part` alone.
        """
        if self.spec(name).mutable:
            raise ValueError(
                f"table {name!r} changes, and its changes go to machine {self.machine_of_part[part]} alone"
            )
        if not self._machines.reaches(machine):
            raise ValueError(f"table {name!r}: machine {machine} cannot be reached from here")
        with self._lock:
            self._replicas.setdefault(name, {}).setdefault(part, []).append(machine)
            self._candidates.pop(name, None)

    def create(
        self,
        name: str,
        num_rows: int | None = None,
        row_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        *,
        bounds: Sequence[int] | None = None,
        init: str | float | tuple[str, float, float, int] = "zeros",
        mutable: bool = True,
    ) -> DistTensor:
        """Makes a table on every machine. One rank or all may call it: the same arguments a second time are a no-op.

        Rows are cut evenly, or at `bounds` (num_parts + 1 entries; those of a book keep rows on the machine of their
        nodes). `init` is "zeros", a number, or ("uniform", low, high, seed). Uniform values depend on the row's number
        alone, so they are the same on any number of parts. mutable=False promises that rows do not change once read.
        """
        if (num_rows is None) == (bounds is None):
            raise ValueError("pass either num_rows or bounds")
        cut = even_bounds(num_rows, self.num_parts) if num_rows is not None else tuple(int(b) for b in bounds or ())
        spec = TableSpec(name, tuple(row_shape), dtype, cut, mutable)
        check_new(spec)
        if spec.num_parts != self.num_parts:
            raise ValueError(f"bounds must have {self.num_parts + 1} entries, one more than parts, got {len(cut)}")
        options = {"spec": {**spec.to_json(), "bounds": None}, "init": init_json(init, spec)}
        self._make(name, [spec.bounds_tensor], options)
        return DistTensor(self, name)

    def load(self, name: str, folder: str) -> DistTensor:
        """Makes a table, or fills one that exists, from what `save` wrote, the optimizer's state included.

        Every rank that pushes to the table calls this, and none pushes meanwhile. Where a push was lost before, pushes
        work again afterwards.
        """
        broken = self._outbox.broken_stream
        if broken is None:
            self._outbox.settle(name)
        options = {"name": name, "load": str(folder), "ends": broken}
        received = self._make(name, (), options)
        if len({(r.options or {})["save"] for r in received}) != 1:
            raise ValueError(f"{folder!r} holds parts of table {name!r} from different saves on different machines")
        self._outbox.recover(name)
        return DistTensor(self, name)

    def save(self, name: str, folder: str, *, overwrite: bool = False) -> None:
        """Writes a table, each part on the machine that serves it. One rank calls this, while none pushes."""
        self._outbox.wait(name)
        options = {"name": name, "folder": str(folder), "save": secrets.token_hex(8), "overwrite": overwrite}
        self._all_machines.ask(Kind.SAVE, (), options)

    def snapshot(self, name: str, machine: int, folder: str, token: str, *, copy: bool = True) -> dict[str, Any]:
        """Has a machine copy its rows of a table, while no rank pushes; they are written to `folder` in the background.

        Returns steps and optimizer states of the table; `token` names the snapshot to `written`. Without `copy`, and
        where the copy would not fit into memory ("copied" is False then), pushes wait until the rows are written.
        """
        self._outbox.wait(name)
        options = {"name": name, "folder": str(folder), "save": token, "snapshot": True, "copy": copy}
        return dict(self._all_machines.ask(Kind.SAVE, (), options, machines=[machine])[0].options)

    def written(self, machine: int, token: str, timeout: float = ORDER_SECONDS) -> dict[str, Any]:
        """Waits until a machine has written a snapshot; its files, by path in the folder: bytes and CRC-32."""
        deadline = time.monotonic() + timeout
        while True:
            seconds = min(ORDER_SECONDS, max(1.0, deadline - time.monotonic()))
            try:
                answer = self._machines.ask(machine, Kind.SAVE, (), {"written": token}, timeout=seconds)
                return dict(reply_of(answer).options["files"])
            except TimeoutError:  # one request waits no longer; the shard writes on
                if time.monotonic() >= deadline:
                    raise

    def begin_restore(self, name: str, steps: int, states: Sequence[str]) -> None:
        """Prepares a table, and its optimizer's `states` ("NAME/STATE"), to be filled from a checkpoint by pushes.

        Every rank calls this, and none pushes meanwhile. Where a push was lost before, pushes work again afterwards.
        """
        broken = self._outbox.broken_stream
        if broken is None:
            self._outbox.settle(name)
        self._all_machines.ask(
            Kind.CREATE, (), {"name": name, "restore": steps, "states": list(states), "ends": broken}
        )
        self._forget(name)
        self._outbox.recover(name)

    def drop(self, name: str) -> None:
        """Deletes a table that was created, with its optimizer's state. One rank calls this."""
        self._outbox.settle(name)
        received = self._all_machines.ask(Kind.DROP, (), {"name": name})
        self._forget(name)
        self._outbox.recover(name)
        if not any((r.options or {}).get("dropped") for r in received):
            raise ValueError(f"table {name!r} does not exist: it was dropped, or never created")

    def tensor(self, name: str) -> DistTensor:
        """A table as a tensor; ValueError where there is none of that name."""
        self.spec(name)
        return DistTensor(self, name)

    def spec(self, name: str) -> TableSpec:
        """What a table is; asked of a shard where it was made by another rank."""
        spec = self._specs.get(name)
        if spec is None:
            self._check_open(name)
            answer = reply_of(self._machines.ask(self._all_machines.numbers[0], Kind.DESCRIBE, (), {"name": name}))
            self.register(spec_in(answer.options or {}, answer.arrays))
            spec = self._specs[name]
        return spec

    # Reading

    def candidates(self, name: str) -> list[tuple[Candidate, ...]]:
        """For every part of a table, where its rows may be had, nearest first."""
        candidates = self._candidates.get(name)
        if candidates is None:
            spec = self.spec(name)
            at_hand = self._at_hand(spec)
            candidates = [self._candidates_of(spec, part, at_hand.get(part)) for part in range(spec.num_parts)]
            with self._lock:
                self._candidates[name] = candidates
        return candidates

    places = candidates  # the name of the version before this one

    def is_remote(self, name: str, policy: Policy | None = None) -> bool:
        """Whether some rows of a table come from another process, where `policy` or the store's own chooses."""
        return any(one.is_remote for one in choose(policy or self.policy, self.candidates(name)))

    def locate(self, name: str, ids: Tensor, policy: Policy | None = None) -> list[Located]:
        """The ids grouped by part, with the candidates for their rows and the one that serves them."""
        spec, candidates = self._known(name)
        return locate(ids, spec, candidates, choose(policy or self.policy, candidates))

    def pull(
        self, pulls: Sequence[Pull], *, priority: int | None = None, path: int | None = None, batch: int = -1,
        layer: int = -1, timeout: float | None = None,
    ) -> PendingPull:  # fmt: skip
        """Starts reading rows: one message per machine for all `pulls`, own rows meanwhile; `.result()` has them.

        Pulls with the same `ids` object, of tables that are cut alike, are looked up and sent once. A table that was
        dropped and made anew since this process looked at it is looked at again. What messages say of `priority`,
        `path` and `batch` is as in `Client.request`: left out, it is the current `RequestContext`'s.
        """
        of_messages = timeout, priority, path, batch, layer
        start = partial(self._pull, pulls, of_messages)
        try:
            small = self._small_pull(pulls[0], of_messages, start) if len(pulls) == 1 else None
            return RenewedPull(start(), start) if small is None else small
        except Outdated:
            return start()

    def _pull(self, pulls: Sequence[Pull], of_messages: MessageOptions) -> PendingPull:
        found: dict[tuple[int, tuple[int, ...]], list[Located]] = {}
        held: dict[int, Tensor] = {}  # the ids as they are looked up
        wanted = []
        for pull in pulls:
            self._outbox.wait(pull.table)
            spec, candidates = self._known(pull.table)
            check_ids(pull.ids, spec)
            ids = held.setdefault(id(pull.ids), pull.ids.detach().cpu().contiguous())
            target = Target(pull, spec, out_for(pull, spec, self._buffers))
            serving = choose(pull.policy or self.policy, candidates)
            if target.takes_all(serving):
                wanted.append(Wanted(target, ids, ()))
                continue
            key = (id(pull.ids), spec.bounds)
            runs = found.get(key)
            if runs is None:
                runs = found[key] = locate(ids, spec, candidates, serving)
            runs = [run.elsewhere(candidates[run.part], serving[run.part]) for run in runs]
            wanted.append(Wanted(target, ids, runs))
        try:
            return begin(wanted, self._machines, of_messages, self._refused)
        except Outdated:
            raise
        except ValueError as error:
            raise self._refused(error, [target.spec for target, _, _ in wanted]) from error

    def _small_pull(
        self, pull: Pull, of_messages: MessageOptions, start: Callable[[], PendingPull]
    ) -> PendingPull | None:
        """A pull of few whole rows, begun; None where the ordinary way is to do it."""
        name, ids, out = pull.table, pull.ids, pull.out
        table = self._small_tables.get(name)
        if table is None or table.candidates is not self._candidates.get(name):
            if ids.numel() > SMALL_ROWS:
                return None
            self._outbox.wait(name)
            table = self._small_tables[name] = SmallTable(*self._known(name), self._machines, self._refused)
        if (
            ids.numel() > table.max_rows
            or not (pull.columns is pull.wire_dtype is pull.at is pull.policy is None)
            or self.policy is not nearest
            or (table.at_hand and any([rows.outdated for rows in table.at_hand]))
        ):
            return None
        self._outbox.wait(name)
        if out is None:
            out = torch.empty((ids.numel(), *table.spec.row_shape), dtype=table.spec.dtype, device="cpu")
        if not table.fits(ids, out):
            return None
        return table.begin(ids, out, of_messages, start)

    # Writing

    def push(self, name: str, ids: Tensor, rows: Tensor, mode: str = "write") -> PendingPush:
        """Writes rows, or adds to them (mode="add"), in order; `.result()` when it is done.

        Applied exactly once, after everything this process pushed before. Where an id is named twice the last row wins.
        """
        if mode not in PUSH_MODES:
            raise ValueError(f"mode must be one of {list(PUSH_MODES)}, got {mode!r}")
        spec, candidates = self._known(name)
        ids, rows = checked_rows(spec, ids, rows)
        runs = locate(ids, spec, candidates)
        messages = push_messages(spec, runs, rows, mode, self.machine_of_part, self._buffers)
        return self._outbox.send(spec, Kind.PUSH, messages)

    def step(
        self, name: str, ids: Tensor, grads: Tensor, optimizer: Mapping[str, Any], *, timeout: float | None = None,
        is_gradient: bool = True, skip: bool = False, problem: str | None = None,
    ) -> PendingPush:  # fmt: skip
        """Brings this rank's gradients to a step of an optimizer; `.result()` when the step was applied.

        Every rank calls this once per step, perhaps with no ids. A row's gradients are summed in rank order and divided
        by the number of ranks. `optimizer` is what `SparseAdam` and its like describe themselves as.

        A step that is no gradient on any rank (`is_gradient`) does not count. One that some rank asks to `skip` changes
        nothing (`.is_skipped`); one that some rank has a `problem` with neither, and is that ValueError on all of them.
        """
        check_optimizer(optimizer)
        spec, candidates = self._known(name)
        ids, grads = checked_rows(spec, ids, grads)
        options = {"table": spec.number, "world_size": self.world_size, "optimizer": dict(optimizer)}
        options |= {"is_gradient": is_gradient, "skip": skip, "problem": problem}
        self._look_up_steps(spec)
        runs = locate(ids, spec, candidates)
        lenders = {self.machine: self._lender} if self._lender.is_read else {}
        messages = step_messages(spec, runs, grads, self.machine_of_part, self._buffers, lenders)
        return self._outbox.send(spec, Kind.STEP, messages, options, timeout)

    def flush(self) -> None:
        """Waits until everything this process pushed was applied."""
        self._outbox.wait_for_all()

    def close(self) -> None:
        """Ends the tables that this process has created, and unmaps those of other processes.

        Rows of the graph's files can still be read.
        """
        with self._lock:
            self._is_closed = True
            for name in [name for name in self._specs if name not in self._rows]:
                self._forget(name)
            self._candidates.clear()
            self._small_tables.clear()
        self._lender.close()
        if self._local is not None:
            self._local.close()

    # Inside

    def _look_up_steps(self, spec: TableSpec) -> None:
        """Asks the machines once which step of a table is next; from then on this process counts.

        The server of this machine says also whether it reads gradients in this process's memory.
        """
        steps = self._outbox.steps
        missing = [machine for machine in self._all_machines.numbers if (spec.number, machine) not in steps]
        if not missing:
            return
        asks = self.machine in missing and not self._machines.holds(self.machine)
        with self._lender.probe(asks) as asked:
            named = {machine: {"name": spec.name, **(asked if machine == self.machine else {})} for machine in missing}
            answers = [self._machines.ask(machine, Kind.DESCRIBE, (), options) for machine, options in named.items()]
            told = [reply_of(answer).options for answer in answers]
        for machine, described in zip(missing, told, strict=True):
            if machine == self.machine:
                self._lender.is_read = bool(described.get("reads_memory"))
            if described["generation"] != spec.generation:
                raise self._refused(ValueError(unknown_table(spec.number)), [spec])
            steps.setdefault((spec.number, machine), described["step"])

    def _make(self, name: str, arrays: Sequence[Tensor], options: dict[str, Any]) -> list[Any]:
        self._check_open(name)
        received = self._all_machines.make(name, arrays, options)
        self._forget(name)
        self.register(spec_in(received[0].options, received[0].arrays))
        return received

    def _refused(self, error: Exception, specs: Sequence[TableSpec]) -> ValueError:
        """A shard's error, with names where it has numbers; what it does not have is looked up anew next time."""
        text, outdated = str(error), False
        self._lender.note_refusal(text)
        for spec in specs:
            number = f"table number {spec.number}"
            if number in text:
                self._forget(spec.name)
                outdated = True
            text = text.replace(number, f"table {spec.name!r}")
        return Outdated(text) if outdated else ValueError(text)

    def _check_open(self, name: str) -> None:
        if self._is_closed:
            raise ValueError(f"table {name!r} went with the session it was made in, which is closed: begin another one")

    def _forget(self, name: str) -> None:
        """Makes the next use look up a created table, and its optimizer's states, again."""
        with self._lock:
            for known in (name, *state_names(name)):
                self._candidates.pop(known, None)
                self._small_tables.pop(known, None)
                if known not in self._rows:  # rows that this process was given stay: nobody drops them
                    spec = self._specs.pop(known, None)
                    if spec is not None:
                        self._outbox.forget_steps(spec.number)

    def _known(self, name: str) -> tuple[TableSpec, list[tuple[Candidate, ...]]]:
        """A table and its candidates, of one generation."""
        candidates = self._live_candidates(name)
        return self.spec(name), candidates

    def _live_candidates(self, name: str) -> list[tuple[Candidate, ...]]:
        """The candidates of a table, looked up again where the rows at hand were dropped or their owner has ended."""
        candidates = self.candidates(name)
        if any(c[0].rows is not None and c[0].rows.outdated for c in candidates):
            self._forget(name)
            candidates = self.candidates(name)
        return candidates

    def _candidates_of(self, spec: TableSpec, part: int, rows: PartRows | None) -> tuple[Candidate, ...]:
        owner = self.machine_of_part[part]
        near = () if rows is None else (Candidate(rows.kind, self.machine, rows),)
        machines = [owner] if self._machines.reaches(owner) or not near else []
        machines += self._replicas.get(spec.name, {}).get(part, [])
        return (*near, *(Candidate(SHARD, machine) for machine in machines))

    def _at_hand(self, spec: TableSpec) -> dict[int, PartRows]:
        """What this process reads by itself: its own shard's rows, files it mapped, shared memory of its machine."""
        if self._local is not None and self._machines.holds(self.machine):
            table = self._local.find(spec.name)
            if table is not None:
                return {**table.parts, **self._rows.get(spec.name, {})}
        found = dict(self._rows.get(spec.name, {}))
        mine = [part for part, machine in enumerate(self.machine_of_part) if machine == self.machine]
        if found or not mine or not self._machines.reaches(self.machine):
            return found
        described = reply_of(self._machines.ask(self.machine, Kind.DESCRIBE, (), {"name": spec.name}))
        if described.options["generation"] != spec.generation:
            raise self._refused(ValueError(unknown_table(spec.number)), [spec])
        for part, address in described.options["shared"].items():
            shared = SharedRows.open(address, spec.part_shape(int(part)), spec.dtype)
            if shared is not None:
                found[int(part)] = PartRows(spec, int(part), shared.rows, shared)
        return found
