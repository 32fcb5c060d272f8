"""What the row kernels make of fixed rows, as hashes of its bits: `python -m tests.ops.row_digests` prints them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gnnsys.ops import (
    CSC,
    dropout_rows,
    edge_softmax,
    gat_aggregate,
    gather_rows,
    sddmm,
    sparse_adagrad_step,
    sparse_adam_step,
    spmm,
)
from tests.ops.graphs import random_csc

WIDTHS = [*range(1, 20), 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 112, 127, 128, 129, 160, 256, 260]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ODD = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-42, 3e38, 65519.0, 65520.0, 1.00390625, 5.9e-8])


def rows(num_rows: int, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(num_rows, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


@cache
def make_digests() -> dict[str, str]:
    """One hash per op, of all widths and dtypes."""
    short, long = random_csc(60, 40, 900), random_csc(50, 3, 2000)
    hashes: dict[str, hashlib._Hash] = {}

    def note(op: str, result: Tensor) -> None:
        found = hashes.setdefault(op, hashlib.sha256())
        found.update(result.detach().contiguous().view(torch.uint8).numpy().tobytes())

    for dtype in DTYPES:
        for width in WIDTHS:
            for csc in (short, long):
                _aggregate(csc, width, dtype, note)
            x, ids = rows(40, width, dtype=dtype, seed=4), torch.arange(40)
            note("dropout", dropout_rows(x, ids, 0.4, key=7))
            for other in DTYPES:
                odd = ODD.to(dtype).repeat(width // len(ODD) + 1)[:width]
                note("cast", gather_rows(torch.cat([x, odd[None]]), torch.arange(41), dtype=other))
    for width in WIDTHS:
        _step(width, note)
    return {op: found.hexdigest() for op, found in sorted(hashes.items())}


def _step(width: int, note: Callable[[str, Tensor], None]) -> None:
    """Two ranks with rows in common, three times."""
    ids = [torch.arange(20), torch.arange(10, 25)]
    grads = [rows(each.numel(), width, dtype=torch.float32, seed=7) for each in ids]
    grads[0][3] = ODD.repeat(width // len(ODD) + 1)[:width]
    x, first, second = rows(30, width, dtype=torch.float32, seed=8), torch.zeros(30, width), torch.zeros(30, width)
    for _ in range(3):
        sparse_adam_step(x, first, second, ids, grads, ranks=3, step_size=1e-3, betas=(0.9, 0.999), eps=1e-8)
        sparse_adagrad_step(x, second, ids, grads, ranks=2, step_size=1e-2, eps=1e-10)
        for result in (x, first, second):
            note("optimizer steps", result)


def _aggregate(csc: CSC, width: int, dtype: torch.dtype, note: Callable[[str, Tensor], None]) -> None:
    x = rows(csc.num_src, 2, width, dtype=dtype, seed=1)
    weight = rows(csc.num_edges, 2, dtype=dtype, seed=2)
    for reduce in ("sum", "mean", "max", "min"):
        note(reduce, spmm(csc, x, None, reduce))
        note(f"weighted {reduce}", spmm(csc, x, weight, reduce))
    note("dot products", sddmm(csc, rows(csc.num_dst, 2, width, dtype=dtype, seed=3), x))
    note("softmax", edge_softmax(csc, weight))
    leaves = [
        x.clone().requires_grad_(),
        rows(csc.num_src, 2, dtype=dtype, seed=5).requires_grad_(),
        rows(csc.num_dst, 2, dtype=dtype, seed=6).requires_grad_(),
    ]
    out = gat_aggregate(csc, *leaves)
    note("attention", out)
    for gradient in torch.autograd.grad(out, leaves, out.detach()):
        note("attention's gradients", gradient)


if __name__ == "__main__":
    print(json.dumps(make_digests()))
