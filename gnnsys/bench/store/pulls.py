"""Pulling rows: from another process beside ZeroMQ and torch's RPC, from this one beside index_select, and variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Versus, milliseconds, rate
from gnnsys.bench.store.bare import BareLink
from gnnsys.bench.store.torch_rpc import RpcRows
from gnnsys.bench.two_machines import TwoMachines, two_machines
from gnnsys.bench.workload import Workload
from gnnsys.graph import NODE
from gnnsys.store import Pull

X, Z = f"node/{NODE}/x", f"node/{NODE}/z"
NUM_ROWS = 100_000
FRAME_MB = (1, 2, 4, 16)
COPIED = "bare pyzmq and a copy"
RPC = "torch.distributed.rpc"
SMALL = 1000


def remote_pull(work: Workload) -> Iterator[Case]:
    """One pull at a time, into a buffer that is used again."""
    count = num_rows(work)
    num_bytes = count * work.sizes.dim * 4
    bare = tuple(f"bare pyzmq, {size} MB frames" for size in FRAME_MB)

    def sides() -> dict[str, Side]:
        machines, ids = two_machines(work), there(work, count)
        link = work.once("bare link", lambda: work.enter(BareLink(num_bytes)))
        peer = work.once("rpc rows", lambda: work.enter(RpcRows(work.sizes.num_nodes, work.sizes.dim)))
        found = {OURS: Side(pulling(machines, ids))}
        for name, size in zip(bare, FRAME_MB):
            found[name] = Side(lambda size=size: link.pull(num_bytes, size << 20))  # type: ignore[misc]
        into = memoryview(bytearray(num_bytes))
        found[COPIED] = Side(lambda: link.pull(num_bytes, 2 << 20, into))
        return found | {RPC: Side(lambda: peer.pull(ids))}

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
            "index_select": Side(lambda: torch.index_select(private, 0, ids, out=out)),
        }

    unit = rate("GB/s", 1e-9 * count * work.sizes.dim * 4)
    yield Case(f"pull/local/{count} rows", unit, sides, (Versus(("index_select",), 0.9),), agree=0.0)


def pull_variants(work: Workload) -> Iterator[Case]:
    """What else a pull can be, beside the plain one; nothing is promised here."""
    count = num_rows(work)
    dim = work.sizes.dim
    columns = torch.arange(0, dim, max(1, dim // 16))

    def variants(machines: TwoMachines, ids: Tensor) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
        """By name: the variant, and the plain way to the same end."""
        whole, some, small = pulling(machines, ids), torch.empty(count, len(columns)), ids[:SMALL].clone()
        z = torch.empty(count, 16)
        store = machines.store
        outs = [torch.empty(count // 4 + 1, dim) for _ in range(4)]
        quarters = [quarter.clone() for quarter in ids.tensor_split(4)]

        def both() -> None:
            store.pull([Pull(X, ids, whole_out), Pull(Z, ids, z)]).result()

        def one_by_one() -> None:
            store.pull([Pull(X, ids, whole_out)]).result()
            store.pull([Pull(Z, ids, z)]).result()

        def in_flight() -> None:
            pending = [store.pull([Pull(X, q, o[: q.numel()])]) for q, o in zip(quarters, outs)]
            for pull in pending:
                pull.result()

        whole_out, small_out = torch.empty(count, dim), torch.empty(small.numel(), dim)
        return {
            "two tables in one": (both, one_by_one),
            f"{len(columns)} columns": (lambda: store.pull([Pull(X, ids, some, columns=columns)]).result(), whole),
            "bfloat16 on the wire": (
                lambda: store.pull([Pull(X, ids, whole_out, wire_dtype=torch.bfloat16)]).result(),
                whole,
            ),
            "four in flight": (in_flight, whole),
            f"{small.numel()} rows": (lambda: store.pull([Pull(X, small, small_out)]).result(), whole),
        }

    names = ("two tables in one", f"{len(columns)} columns", "bfloat16 on the wire", "four in flight")
    for name in (*names, f"{min(SMALL, count)} rows"):

        def sides(name: str = name) -> dict[str, Side]:
            variant, plain = variants(two_machines(work), there(work, count))[name]
            return {OURS: Side(variant), "the plain way": Side(plain)}

        yield Case(f"pull/remote/{name}", milliseconds(), sides, (Versus(("the plain way",)),))

    def with_key() -> dict[str, Side]:
        open_to_all, ids = two_machines(work), there(work, count)
        return {OURS: Side(pulling(two_machines(work, with_key=True), ids)), "no key": Side(pulling(open_to_all, ids))}

    yield Case("pull/remote/with a key", milliseconds(), with_key, (Versus(("no key",)),))


def num_rows(work: Workload) -> int:
    return min(NUM_ROWS, work.sizes.num_nodes // 4)


def there(work: Workload, count: int) -> Tensor:
    """Different ids whose rows the server has, in no order."""
    first = two_machines(work).first_there
    return first + work.ids(count, work.sizes.num_nodes - first)


def pulling(machines: TwoMachines, ids: Tensor) -> Callable[[], Tensor]:
    out = torch.empty(ids.numel(), *machines.graph.node_data[NODE]["x"].shape[1:])
    return lambda: machines.store.pull([Pull(X, ids, out)]).result()[0]
