"""The same structure in the peers' own shapes, with what they would cache made beforehand."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from gnnsys.bench import peers
from gnnsys.ops import CSC


def dgl_graph(csc: CSC, idtype: torch.dtype = torch.int32, formats: str | None = None) -> Any:
    """A DGL graph with all its formats made (its backward needs CSR too).

    Its aggregation is fastest with int32 ids. Blocks need int64: in DGL 1.1.3 `to_block` with int32 ids loses source
    nodes from the second call on, and the backward pass of such a block crashes. Edges are numbered explicitly: on
    x86-64 its sums of edge values read the numbers without asking whether there are any.
    """
    dgl = peers.find("dgl")
    assert not isinstance(dgl, str), dgl
    indptr, indices = csc.indptr.to(idtype), csc.indices.to(idtype)
    numbers = torch.arange(csc.num_edges, dtype=idtype)
    if csc.num_src == csc.num_dst:
        graph = dgl.graph(("csc", (indptr, indices, numbers)), num_nodes=csc.num_dst, idtype=idtype)
    else:
        sizes = {"src": csc.num_src, "dst": csc.num_dst}
        graph = dgl.heterograph({("src", "to", "dst"): ("csc", (indptr, indices, numbers))}, sizes, idtype=idtype)
    graph = graph if formats is None else graph.formats(formats)
    graph.create_formats_()
    return graph


def torch_csr(csc: CSC, idtype: torch.dtype, reduce: str) -> Tensor:
    """Destinations as rows of a torch CSR matrix; for the mean its values carry 1 / in-degree."""
    values = torch.ones(csc.num_edges)
    if reduce == "mean":
        values = (1.0 / csc.in_degrees().clamp(min=1))[csc.dst()].float()
    indptr, indices = csc.indptr.to(idtype), csc.indices.to(idtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR a beta
        return torch.sparse_csr_tensor(indptr, indices, values, (csc.num_dst, csc.num_src), check_invariants=False)
