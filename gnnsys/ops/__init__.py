"""The Python face of csrc/: typed functions, autograd and fake kernels over `torch.ops.gnnsys.*`."""

from gnnsys.ops.csc import CSC
from gnnsys.ops.structure import bfs_order, degrees, in_subgraph, induced_subgraph

__all__ = ["CSC", "bfs_order", "degrees", "in_subgraph", "induced_subgraph"]
