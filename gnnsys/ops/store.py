"""What tables do natively: moving rows to their places, changing rows that others read, optimizer steps on rows.

`versions` (int32, one per 64 rows) guards rows that one process writes while others read them: a row is read whole or
read again. Without it nothing else may touch the rows meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import Expected, takes_outputs_only, tells_workspace

ROWS_PER_VERSION = 64


def num_versions(num_rows: int) -> int:
    """How many counters guard so many rows."""
    return -(-num_rows // ROWS_PER_VERSION)


def move_rows(
    src: Tensor,
    out: Tensor,
    *,
    index: Tensor | None = None,
    order: Tensor | None = None,
    columns: Tensor | None = None,
    versions: Tensor | None = None,
) -> Tensor:
    """`out[order[j]] = src[index[j]]`, cast to out's dtype between floating dtypes; returns `out`.

    Without `index` the rows of `src` are taken in turn, without `order` they fill `out` in turn. `order` names a row
    at most once. `columns` (int64) are taken of the flattened row, and rows of `out` then have as many.

    >>> move_rows(torch.tensor([[1, 2], [3, 4]]), torch.zeros(3, 2, dtype=torch.long), index=torch.tensor([1]),
    ...           order=torch.tensor([2]))
    tensor([[0, 0],
            [0, 0],
            [3, 4]])
    """
    if not native.move_rows(src, index, order, out, columns, versions):
        raise RuntimeError("a row stayed half written for 10 s: the process that owns the table died while writing it")
    return out


def gather_parts(
    parts: Mapping[int, Tensor], ids: Tensor, bounds: Tensor, out: Tensor, at: Tensor | None = None
) -> Tensor:
    """`out[i]` (or `out[at[i]]`) is row ids[i] of a table of which part p has rows bounds[p] to bounds[p + 1].

    `parts` are the rows of some parts; rows of the others are left alone. Cast to out's dtype between floating dtypes.
    As fast as a gather from one piece: rows are written in the order of the ids.

    >>> gather_parts({0: torch.tensor([7, 8]), 1: torch.tensor([9])}, torch.tensor([2, 0]), torch.tensor([0, 2, 3]),
    ...              torch.empty(2, dtype=torch.long))
    tensor([9, 7])
    """
    native.gather_parts(list(parts.values()), list(parts), ids, bounds, out, at)
    return out


def update_rows(dst: Tensor, index: Tensor, src: Tensor, *, add: bool = False, versions: Tensor | None = None) -> None:
    """`dst[index] = src`, or `+= src`, in order: the last write of a row wins, sums are formed as they stand."""
    native.update_rows(dst, versions, index.contiguous(), src.contiguous(), add)


def fill_uniform(rows: Tensor, first: int, low: float, high: float, key: int) -> None:
    """Fills `rows` with draws from [low, high] that depend on the key and on the row's number (from `first`) alone."""
    native.fill_uniform(rows, first, low, high, key)


def sparse_adam_step(
    rows: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ids: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    ranks: int,
    step_size: float,
    betas: tuple[float, float],
    eps: float,
    versions: Sequence[Tensor] = (),
) -> int:
    """Adam on the rows that `ids` names; one entry of `ids` and `grads` per rank, summed in that order over `ranks`.

    `step_size` is lr * sqrt(1 - beta2^t) / (1 - beta1^t). Returns how many rows were touched.
    """
    return native.sparse_adam_step(
        rows, exp_avg, exp_avg_sq, list(versions), list(ids), list(grads), ranks, step_size, *betas, eps
    )


def sparse_adagrad_step(
    rows: Tensor,
    sum: Tensor,
    ids: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    ranks: int,
    step_size: float,
    eps: float,
    versions: Sequence[Tensor] = (),
) -> int:
    """Adagrad on the rows that `ids` names, as `sparse_adam_step`; step_size is lr / (1 + (t - 1) * lr_decay)."""
    return native.sparse_adagrad_step(rows, sum, list(versions), list(ids), list(grads), ranks, step_size, eps)


def _stepping(expected: Expected, rows: Tensor, ids: Sequence[Tensor]) -> int:
    """Gradients grouped by the row they are for: a table of ids, then lists of groups and of members."""
    total = sum(each.numel() for each in ids)
    log2 = 10
    while 8 * total > 3 << log2:
        log2 += 1
    size = rows[0].numel() if rows.shape[0] else 0
    return 8 * (8 + (2 << log2)) + (2 * 8 + 8 + 8 + 8 + 8) * total + 4 * size * expected.num_threads


@tells_workspace("sparse_adam_step", "cpu")
def _(expected: Expected, rows: Tensor, exp_avg, exp_avg_sq, versions, ids, *others) -> int:
    return _stepping(expected, rows, ids)


@tells_workspace("sparse_adagrad_step", "cpu")
def _(expected: Expected, rows: Tensor, sum, versions, ids, *others) -> int:
    return _stepping(expected, rows, ids)


takes_outputs_only("gather_parts", "move_rows", "update_rows", "fill_uniform", device_types=["cpu"])
