"""Changing rows: pushes and optimizer steps, in rows per second, beside reading as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Versus, rate
from gnnsys.bench.two_machines import two_machines
from gnnsys.bench.workload import SEED, Workload
from gnnsys.store import Pull, Store

PULL = "pull"
ADAM = {"kind": "adam", "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
ADAGRAD = {"kind": "adagrad", "lr": 1e-2, "lr_decay": 0.0, "initial": 0.0, "eps": 1e-10}


def changes(work: Workload) -> Iterator[Case]:
    count = min(10_000, work.sizes.num_nodes // 4)
    ways: dict[str, Callable[[Store, str, Tensor, Tensor], object]] = {
        "push/write": lambda store, name, ids, rows: store.push(name, ids, rows).result(),
        "push/add": lambda store, name, ids, rows: store.push(name, ids, rows, mode="add").result(),
        "step/adam": lambda store, name, ids, rows: store.step(name, ids, rows, ADAM).result(),
        "step/adagrad": lambda store, name, ids, rows: store.step(name, ids, rows, ADAGRAD).result(),
    }
    for name, way in ways.items():

        def sides(name: str = name, way: Callable[[Store, str, Tensor, Tensor], object] = way) -> dict[str, Side]:
            store = two_machines(work).tables
            dim = work.sizes.dim
            store.create(name, work.sizes.num_nodes, (dim,), init=("uniform", -1.0, 1.0, SEED))
            ids, rows, out = work.ids(count, work.sizes.num_nodes), work.rows(count, dim), torch.empty(count, dim)
            return {
                OURS: Side(lambda: way(store, name, ids, rows)),
                PULL: Side(lambda: store.pull([Pull(name, ids, out)]).result()),
            }

        yield Case(f"{name}/{count} rows", rate("rows/s", count), sides, (Versus((PULL,)),))
