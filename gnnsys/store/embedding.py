"""DistEmbedding: trainable rows that live in the shards, looked up in the forward pass and trained where they are.

A forward pass pulls each row once; the backward pass leaves its gradient here; an optimizer's `step()` sends gradients
to the shards, which sum them over all ranks and update the rows. No rank holds the table, and DDP never sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnnsys.ops import compact
from gnnsys.store.gradients import Gradients
from gnnsys.store.pull import Pull
from gnnsys.store.store import Store


class HasStore(Protocol):
    """A graph that was opened, say."""

    @property
    def store(self) -> Store: ...


class DistEmbedding(nn.Module):
    """`num_rows` rows of `dim` values, float32. Every rank makes it with the same arguments.

    `where` is a Store, or anything that has one (`gnnsys.open(...)`). Rows are cut evenly over the parts, or at
    `bounds`, for rows of nodes at the book's, so that they lie where their nodes do. First values are drawn by row
    number, from [-bound, bound] with bound = 1 / sqrt(dim) unless `init` says otherwise (see `Store.create`).

    >>> embedding = DistEmbedding(graph, graph.num_nodes(), 64, "node/paper/embedding")  # doctest: +SKIP
    >>> optimizer = SparseAdam([embedding], lr=0.01)  # doctest: +SKIP
    >>> loss = model(embedding(batch.n_id), batch.edge_index).sum(); loss.backward(); optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        where: Store | HasStore,
        num_rows: int | None,
        dim: int,
        name: str,
        *,
        bounds: Sequence[int] | None = None,
        init: str | float | tuple[str, float, float, int] | None = None,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.store = where if isinstance(where, Store) else where.store
        self.dim, self.name = dim, name
        first = ("uniform", -(dim**-0.5), dim**-0.5, 0) if init is None else init
        self.table = self.store.create(name, num_rows, (dim,), torch.float32, bounds=bounds, init=first)
        self.requires_grad = True
        self.gradients = Gradients(dim)
        self._forwards = itertools.count()

    @property
    def num_rows(self) -> int:
        return self.table.shape[0]

    def forward(self, ids: Tensor, batch: int = -1) -> Tensor:
        """The rows of `ids` (int64 or int32, any shape), as they are now: [*ids.shape, dim], on the device of `ids`.

        `batch` is the number of the batch that the ids are of: the messages that ask for rows then name it.
        """
        flat = ids.detach().reshape(-1).cpu().contiguous()
        (unique,), (place,) = compact([flat[:0]], [flat], [0])
        (rows,) = self.store.pull([Pull(self.name, unique)], batch=batch).result()
        rows = rows.to(ids.device)
        if torch.is_grad_enabled() and self.requires_grad:
            rows.requires_grad_()
            self._collect(unique, rows)
        return nn.functional.embedding(place.view(ids.shape).to(ids.device), rows)

    def requires_grad_(self, requires_grad: bool = True) -> DistEmbedding:
        """Whether rows are trained. A model's own `requires_grad_` goes by its parameters, and leaves embeddings be."""
        self.requires_grad = requires_grad
        return self

    def take_gradients(self) -> tuple[Tensor, Tensor]:
        """Row numbers and their gradients since the last call, in the order of the forward passes; an id may repeat."""
        return self.gradients.take()

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, name={self.name!r}"

    def _collect(self, ids: Tensor, rows: Tensor) -> None:
        number = next(self._forwards)

        def keep(leaf: Tensor) -> None:
            assert leaf.grad is not None
            self.gradients.add(number, ids, leaf.grad.detach())
            leaf.grad = None

        rows.register_post_accumulate_grad_hook(keep)

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(
            f"embedding {self.name!r} lives in the shards: save it with embedding.store.save(name, folder)"
        )
