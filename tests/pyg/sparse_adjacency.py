"""What PyG's GraphSAINT asks of torch-sparse, in plain torch: PyG's own loaders run without it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor


class PlainAdjacency:
    """Takes the place of `torch_sparse.SparseTensor` in `torch_geometric.loader.graph_saint`."""

    def __init__(self, row: Tensor, col: Tensor, value: Tensor, sparse_sizes: tuple[int, int]) -> None:
        order = torch.argsort(row * sparse_sizes[1] + col, stable=True)
        self._row, self._col, self._value, self._sizes = row[order], col[order], value[order], sparse_sizes
        self.storage = SimpleNamespace(
            row=lambda: self._row,
            value=lambda: self._value,
            rowcount=lambda: torch.bincount(self._row, minlength=sparse_sizes[0]),
            colcount=lambda: torch.bincount(self._col, minlength=sparse_sizes[1]),
        )

    def coo(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._row, self._col, self._value

    def saint_subgraph(self, nodes: Tensor) -> tuple[PlainAdjacency, Tensor]:
        place = torch.full((self._sizes[0],), -1).scatter_(0, nodes, torch.arange(nodes.numel()))
        row, col = place[self._row], place[self._col]
        inside = (row >= 0) & (col >= 0)
        size = nodes.numel()
        return PlainAdjacency(row[inside], col[inside], self._value[inside], (size, size)), inside.nonzero().view(-1)

    def random_walk(self, start: Tensor, length: int) -> Tensor:
        """A walk stays where it finds no edge."""
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), self.storage.rowcount().cumsum(0)])
        walks = [start]
        for _ in range(length):
            at = walks[-1]
            degree = indptr[at + 1] - indptr[at]
            chosen = indptr[at] + (torch.rand(at.numel()) * degree).long().clamp_(max=(degree - 1).clamp(min=0))
            walks.append(torch.where(degree > 0, self._col[chosen.clamp(max=self._col.numel() - 1)], at))
        return torch.stack(walks, dim=1)
