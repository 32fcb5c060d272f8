"""Training by replication, the way of data-parallel systems: every rank computes all that its own nodes depend on.

Nothing travels but gradients of parameters. Layer l is computed for the nodes within num_layers - 1 - l hops alone, and
each node once per rank: replication with no work that it could do without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnsys.nn import hop_prefixes
from gnnsys.ops import CSC, compact, in_subgraph


@dataclass(frozen=True, eq=False)
class Closure:
    """`nodes`: own ones, then by hops those they depend on; `blocks` the structure of each layer, over `nodes`."""

    nodes: Tensor
    blocks: list[CSC]

    def num_computed(self) -> int:
        """Rows that are computed in an epoch, over all layers."""
        return sum(block.num_dst for block in self.blocks)


def make_closure(csc: CSC, own: Tensor, num_layers: int) -> Closure:
    """What `num_layers` layers need to compute the rows of `own`, ids of the nodes of `csc`."""
    nodes, counts = own.to(csc.indices.dtype), [own.numel()]
    indptr, indices = [torch.zeros(1, dtype=torch.int64)], []
    for _ in range(num_layers):
        last = in_subgraph(csc, nodes[nodes.numel() - counts[-1] :])
        before = nodes.numel()
        (nodes,), (local,) = compact([nodes], [last.indices], [0])
        indptr.append(last.indptr[1:] + indptr[-1][-1])
        indices.append(local)
        counts.append(nodes.numel() - before)
    whole = CSC(torch.cat(indptr), torch.cat(indices).to(csc.indices.dtype), nodes.numel())
    return Closure(nodes.long(), hop_prefixes(whole, counts, num_layers))
