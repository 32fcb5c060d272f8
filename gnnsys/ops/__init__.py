"""The Python face of csrc/: typed functions, autograd and fake kernels over `torch.ops.gnnsys.*`."""

from gnnsys.ops.csc import CSC
from gnnsys.ops.rows import gather_rows, scatter_rows

__all__ = ["CSC", "gather_rows", "scatter_rows"]
