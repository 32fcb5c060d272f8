"""Pulling rows: from another process beside ZeroMQ and torch's RPC, from this one beside index_select, and variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Versus, milliseconds, of_peer, rate
from gnnsys.bench.store.bare_zeromq import BareLink
from gnnsys.bench.store.torch_rpc import RpcRows
from gnnsys.bench.two_machines import TwoMachines, two_machines
from gnnsys.bench.workload import Workload
from gnnsys.comm import CURVE
from gnnsys.graph import NODE
from gnnsys.store import Pull

X, Z = f"node/{NODE}/x", f"node/{NODE}/z"
NUM_ROWS = 100_000
FRAME_MB = (1, 2, 4, 16)
COPIED = "bare pyzmq and a copy"
RPC = "torch.distributed.rpc"
FEW, VERY_FEW = 1000, 100  # what takes time is the way there and back, not the rows
LARGE_ROWS = 125_000  # of 512 bytes: 64 MB, what a rank's batch of 1,024 seeds may ask of another machine
LANES = 4
SEALED_SHARE = 0.6  # of the speed of a large pull in the clear
CLEAR, BY_CURVE = "no key", "CURVE"


def remote_pull(work: Workload) -> Iterator[Case]:
    """One pull at a time, into a buffer that is used again."""
    count = num_rows(work)
    num_bytes = count * work.sizes.dim * 4
    bare = tuple(f"bare pyzmq, {size} MB frames" for size in FRAME_MB)

    def sides() -> dict[str, Side]:
        machines, ids = two_machines(work), there(work, count)
        found = {OURS: Side(pulling(machines, ids))}
        for name, size in zip(bare, FRAME_MB, strict=True):
            found[name] = of_peer(lambda size=size: partial(bare_link(work).pull, num_bytes, size << 20))  # type: ignore[misc]
        into = memoryview(bytearray(num_bytes))
        found[COPIED] = of_peer(lambda: partial(bare_link(work).pull, num_bytes, 2 << 20, into))
        return found | {RPC: of_peer(lambda: partial(rpc_rows(work).pull, ids))}

    versus = (Versus(bare, 0.6), Versus((COPIED,)), Versus((RPC,), 3.0))
    yield Case(f"pull/remote/{count} rows", rate("GB/s", 1e-9 * num_bytes), sides, versus)


def local_pull(work: Workload) -> Iterator[Case]:
    """Rows of this machine's own part, mapped from its file, beside a tensor of this process alone."""
    count = num_rows(work)

    def sides() -> dict[str, Side]:
        machines = two_machines(work)
        ids = work.ids(count, machines.first_there)
        private = machines.graph.parts.part(0).node_data[NODE]["x"].clone()
        out = torch.empty(count, work.sizes.dim)
        return {
            OURS: Side(pulling(machines, ids)),
            "index_select": of_peer(lambda: lambda: torch.index_select(private, 0, ids, out=out)),
        }

    unit = rate("GB/s", 1e-9 * count * work.sizes.dim * 4)
    yield Case(f"pull/local/{count} rows", unit, sides, (Versus(("index_select",), 0.9),), agree=0.0)


def pull_variants(work: Workload) -> Iterator[Case]:
    """What else a pull can be, beside the plain way to the same end; nothing is promised here."""
    count = num_rows(work)
    for name, make in VARIANTS.items():

        def sides(make: Variant = make) -> dict[str, Side]:
            variant, plain = make(two_machines(work), there(work, count))
            return {OURS: Side(variant), "the plain way": Side(plain)}

        yield Case(f"pull/remote/{name}", milliseconds(), sides, (Versus(("the plain way",)),))

    for name, most, target in (("few rows", FEW, None), ("very few rows", VERY_FEW, 0.5)):

        def few(most: int = most) -> dict[str, Side]:
            ids = there(work, min(most, count))
            num_bytes = ids.numel() * work.sizes.dim * 4
            bare = of_peer(lambda: partial(bare_link(work).pull, num_bytes, 1 << 20))
            return {OURS: Side(pulling(two_machines(work), ids)), "bare pyzmq": bare}

        yield Case(f"pull/remote/{name}", milliseconds(), few, (Versus(("bare pyzmq",), target),))


def keyed_pull(work: Workload) -> Iterator[Case]:
    """What a key costs: rows sealed frame by frame, beside CURVE, which was the only way before, and beside no key."""
    for name, most, of_clear, of_curve in (("with a key", NUM_ROWS, SEALED_SHARE, None),
                                           ("very few rows with a key", VERY_FEW, None, 1.0)):  # fmt: skip

        def sides(most: int = most) -> dict[str, Side]:
            ids = there(work, min(most, num_rows(work)))
            ways: dict[str, bool | str] = {OURS: True, CLEAR: False, BY_CURVE: CURVE}
            return {name: Side(pulling(two_machines(work, encrypts=way), ids)) for name, way in ways.items()}

        versus = (Versus((CLEAR,), of_clear), Versus((BY_CURVE,), of_curve))
        yield Case(f"pull/remote/{name}", milliseconds(), sides, versus, agree=0.0)


def lanes(work: Workload) -> Iterator[Case]:
    """One large pull over several connections, which are encrypted side by side where there are cores for it."""
    count = min(LARGE_ROWS, work.sizes.num_nodes // 4)
    num_bytes = count * work.sizes.dim * 4
    for how, with_key in (("with a key", True), ("no key", False)):

        def sides(with_key: bool = with_key) -> dict[str, Side]:
            ids = there(work, count)
            found = {}
            for name, number in ((OURS, LANES), ("one lane", 1)):
                found[name] = Side(pulling(two_machines(work, encrypts=with_key, lanes=number), ids))
            return found

        unit = rate("GB/s", 1e-9 * num_bytes)
        yield Case(f"pull/remote/{count} rows, {how}, {LANES} lanes", unit, sides, (Versus(("one lane",)),), agree=0.0)


def two_tables(machines: TwoMachines, ids: Tensor) -> Pair:
    """In one round trip, beside one after the other."""
    pulls = [Pull(table, ids, empty(machines, table, ids)) for table in (X, Z)]
    pull = machines.store.pull
    return lambda: pull(pulls).result(), lambda: [pull([one]).result() for one in pulls]


def some_columns(machines: TwoMachines, ids: Tensor) -> Pair:
    dim = machines.store.spec(X).row_size
    columns = torch.arange(0, dim, max(1, dim // 16))
    pull = Pull(X, ids, torch.empty(ids.numel(), columns.numel()), columns=columns)
    return lambda: machines.store.pull([pull]).result(), pulling(machines, ids)


def narrow(machines: TwoMachines, ids: Tensor) -> Pair:
    pull = Pull(X, ids, empty(machines, X, ids), wire_dtype=torch.bfloat16)
    return lambda: machines.store.pull([pull]).result(), pulling(machines, ids)


def in_flight(machines: TwoMachines, ids: Tensor) -> Pair:
    """The same rows in four pulls at once."""
    pulls = [Pull(X, piece.clone(), empty(machines, X, piece)) for piece in ids.tensor_split(4)]

    def call() -> None:
        for pending in [machines.store.pull([pull]) for pull in pulls]:
            pending.result()

    return call, pulling(machines, ids)


Pair: TypeAlias = "tuple[Callable[[], Any], Callable[[], Any]]"
Variant: TypeAlias = Callable[[TwoMachines, Tensor], Pair]
VARIANTS: dict[str, Variant] = {
    "two tables in one": two_tables,
    "16 columns": some_columns,
    "bfloat16 on the wire": narrow,
    "four in flight": in_flight,
}


def num_rows(work: Workload) -> int:
    return min(NUM_ROWS, work.sizes.num_nodes // 4)


def there(work: Workload, count: int) -> Tensor:
    """Different ids whose rows the server has, in no order."""
    first = two_machines(work).first_there
    return first + work.ids(count, work.sizes.num_nodes - first)


def pulling(machines: TwoMachines, ids: Tensor) -> Callable[[], Tensor]:
    pull = Pull(X, ids, empty(machines, X, ids))
    return lambda: machines.store.pull([pull]).result()[0]


def empty(machines: TwoMachines, table: str, ids: Tensor) -> Tensor:
    """A buffer to pull into, again and again."""
    spec = machines.store.spec(table)
    return torch.empty(ids.numel(), *spec.row_shape, dtype=spec.dtype)


def rpc_rows(work: Workload) -> RpcRows:
    return work.once("rpc rows", lambda: work.enter(RpcRows(work.sizes.num_nodes, work.sizes.dim)))


def bare_link(work: Workload) -> BareLink:
    return work.once("bare link", lambda: work.enter(BareLink(num_rows(work) * work.sizes.dim * 4)))
