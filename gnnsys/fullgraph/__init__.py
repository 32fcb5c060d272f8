"""Full-graph training (G3): every rank computes its own nodes, layer by layer, and sends what others need of them."""

from gnnsys.fullgraph.approximate import BoundarySampling, Staleness
from gnnsys.fullgraph.bins import Packing
from gnnsys.fullgraph.calling import call
from gnnsys.fullgraph.halo import HaloPlan, make_plan
from gnnsys.fullgraph.inference import infer
from gnnsys.fullgraph.keyed import Dropout
from gnnsys.fullgraph.layers import Join, Keep, Residual, Told
from gnnsys.fullgraph.memory import peak_bytes
from gnnsys.fullgraph.parallel import HybridParallel
from gnnsys.fullgraph.share import Share, share_of
from gnnsys.fullgraph.steps import Schedule

__all__ = [
    "BoundarySampling",
    "Dropout",
    "HaloPlan",
    "HybridParallel",
    "Join",
    "Keep",
    "Packing",
    "Residual",
    "Schedule",
    "Share",
    "Staleness",
    "Told",
    "call",
    "infer",
    "make_plan",
    "peak_bytes",
    "share_of",
]
