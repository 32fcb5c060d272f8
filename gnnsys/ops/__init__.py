"""The Python face of csrc/: typed functions, autograd and fake kernels over `torch.ops.gnnsys.*`."""

from gnnsys.ops.aggregate import sddmm, spmm
from gnnsys.ops.attention import edge_softmax, gat_aggregate
from gnnsys.ops.csc import CSC
from gnnsys.ops.relabel import IdTable, compact, compact_scratch
from gnnsys.ops.rows import gather_rows, scatter_rows
from gnnsys.ops.sampling import Neighbors, find_edges, sample_neighbors, stream_key
from gnnsys.ops.structure import degrees

__all__ = [
    "CSC",
    "IdTable",
    "Neighbors",
    "compact",
    "compact_scratch",
    "degrees",
    "edge_softmax",
    "find_edges",
    "gat_aggregate",
    "gather_rows",
    "sample_neighbors",
    "scatter_rows",
    "sddmm",
    "spmm",
    "stream_key",
]
