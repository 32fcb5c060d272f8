"""The Python face of csrc/: typed functions, autograd and fake kernels over `torch.ops.gnnsys.*`."""

from gnnsys.ops.csc import CSC
from gnnsys.ops.structure import degrees

__all__ = ["CSC", "degrees"]
