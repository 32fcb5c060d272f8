"""DistEmbedding: trainable rows that live in the shards, looked up in the forward pass and trained where they are.

A forward pass pulls each row once; the backward pass leaves its gradient here; an optimizer's `step()` sends gradients
to the shards, which sum them over all ranks and update the rows. No rank holds the table, and DDP never sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnnsys.graph import NodeType, did_you_mean, some
from gnnsys.ops import compact
from gnnsys.store.gradients import Gradients
from gnnsys.store.pull import Pull
from gnnsys.store.store import Store


class HasStore(Protocol):
    """A graph that was opened, say. With a `book`, it knows which part each node is on."""

    @property
    def store(self) -> Store: ...


class DistEmbedding(nn.Module):
    """Rows of `dim` values, float32, looked up by row number. Every rank makes it with the same arguments.

    `where` is a Store, or anything that has one (`gnnsys.open(...)`). With `node_type` there is a row for each node of
    the type, on the machine that has the node, and row numbers are global ids (`batch["author"].n_id`). Such rows
    follow their nodes where a checkpoint is restored on other parts. Any other table has `num_rows` rows, cut evenly,
    whatever its name, or is cut at `bounds`.

    First values are drawn by row number, from [-bound, bound] with bound = 1 / sqrt(dim) unless `init` says otherwise
    (see `Store.create`).

    >>> embedding = DistEmbedding(graph, dim=64, node_type="author")  # doctest: +SKIP
    >>> optimizer = SparseAdam([embedding], lr=0.01)  # doctest: +SKIP
    >>> loss = model(embedding(batch["author"].n_id)).sum(); loss.backward(); optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        where: Store | HasStore,
        num_rows: int | None = None,
        dim: int = 0,
        name: str | None = None,
        *,
        node_type: NodeType | None = None,
        bounds: Sequence[int] | None = None,
        init: str | float | tuple[str, float, float, int] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        if not isinstance(where, Store) and not hasattr(where, "store"):
            raise ValueError(
                "a DistEmbedding lives in the shards of parts: pass what gnnsys.open() returns, or a store. With a "
                "graph in memory use torch.nn.Embedding"
            )
        self.store = where if isinstance(where, Store) else where.store
        name, num_rows, bounds = _placed(where, node_type, name, num_rows, bounds)
        self.dim, self.name = dim, name
        first = ("uniform", -(dim**-0.5), dim**-0.5, 0) if init is None else init
        self.table = self.store.create(name, num_rows, (dim,), torch.float32, bounds=bounds, init=first)
        self.requires_grad = True
        self.gradients = Gradients(dim)
        self._forwards = itertools.count()
        # Has autograd pass by where rows were looked up.
        self._anchor = torch.empty(0, device="cpu", requires_grad=True)

    @property
    def num_rows(self) -> int:
        return self.table.shape[0]

    def forward(self, ids: Tensor, batch: int = -1) -> Tensor:
        """The rows of `ids` (int64 or int32, any shape), as they are now: [*ids.shape, dim], on the device of `ids`.

        `batch` is the number of the batch that the ids are of: the messages that ask for rows then name it.
        """
        flat = ids.detach().reshape(-1).contiguous()
        (unique,), (place,) = compact([flat[:0]], [flat], [0])  # where the ids are: a GPU sends each once
        unique = unique.cpu()
        rows = self._rows(unique, ids.device, batch)
        is_as_asked = ids.dim() == 1 and unique.numel() == flat.numel()  # each id once, and in their order
        if torch.is_grad_enabled() and self.requires_grad:
            rows = _Watched.apply(self._anchor, rows, self._keep(unique, is_copied=is_as_asked))
        return rows if is_as_asked else nn.functional.embedding(place.view(ids.shape), rows)

    def requires_grad_(self, requires_grad: bool = True) -> DistEmbedding:
        """Whether rows are trained. A model's own `requires_grad_` goes by its parameters, and leaves embeddings be."""
        self.requires_grad = requires_grad
        return self

    def take_gradients(self) -> tuple[Tensor, Tensor]:
        """Row numbers and their gradients since the last call, in the order of the forward passes; an id may repeat."""
        return self.gradients.take()

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, name={self.name!r}"

    def _rows(self, ids: Tensor, device: torch.device, batch: int) -> Tensor:
        """Rows on `device`; those for a GPU arrive in page-locked memory, from which it copies by itself."""
        pull = Pull(self.name, ids)
        if device.type == "cuda":
            landing = torch.empty(ids.numel(), self.dim, dtype=torch.float32, device="cpu", pin_memory=True)
            pull = Pull(self.name, ids, out=landing)
        (rows,) = self.store.pull([pull], batch=batch).result()
        return rows.to(device, non_blocking=True)

    def _keep(self, ids: Tensor, *, is_copied: bool) -> Callable[[Tensor], None]:
        """Takes the gradient of a forward pass's rows. A step changes it in place: what others may have is copied."""
        number = next(self._forwards)

        def keep(grad: Tensor) -> None:
            grad = grad.detach()
            own = grad.clone(memory_format=torch.contiguous_format) if is_copied else grad
            self.gradients.add(number, ids, own)

        return keep

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(
            f"embedding {self.name!r} lives in the shards: save it with embedding.store.save(name, folder)"
        )


class _Watched(torch.autograd.Function):
    """Rows as they are; the backward pass shows their gradient to `keep`, and ends there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        ctx.mark_dirty(rows)  # nobody else has them: not a view, so that users may change them in place
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.keep(grad)
        return None, None, None


def _placed(
    where: Store | HasStore,
    node_type: NodeType | None,
    name: str | None,
    num_rows: int | None,
    bounds: Sequence[int] | None,
) -> tuple[str, int | None, Sequence[int] | None]:
    """Name, number of rows or bounds of a table: the book's bounds where its rows are of nodes."""
    book, types = getattr(where, "book", None), getattr(where, "node_types", [])
    if node_type is None:
        if name is None:
            raise ValueError("pass node_type=, for rows of the nodes of an opened graph, or name= and num_rows=")
        return name, num_rows, bounds
    if num_rows is not None and book is not None and node_type in types and num_rows != book.num_ids(node_type):
        raise ValueError(
            f"there are {book.num_ids(node_type)} nodes of {node_type!r}, not {num_rows}: leave num_rows out"
        )
    if bounds is not None:
        raise ValueError(f"rows of {node_type!r} are cut where their nodes are: leave bounds out")
    if book is None:
        raise ValueError(f"node_type={node_type!r} needs a graph that knows where its nodes are: pass gnnsys.open(...)")
    if node_type not in types:
        there = f"{some(types, near=node_type)}{did_you_mean(node_type, types)}"
        raise ValueError(f"there are no nodes of {node_type!r}, only of {there}")
    prefix = f"node/{node_type}/"
    name = f"{prefix}embedding" if name is None else name if name.startswith(prefix) else prefix + name
    return name, None, (0, *book.ranges(node_type)[:, 1].tolist())
