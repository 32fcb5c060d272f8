"""Full-graph training (G3): every rank computes its own nodes, layer by layer, and sends what others need of them."""

from gnnsys.fullgraph.inference import infer
from gnnsys.fullgraph.keyed_dropout import Dropout
from gnnsys.fullgraph.parallel import HybridParallel
from gnnsys.fullgraph.plan.bin_memory import peak_bytes
from gnnsys.fullgraph.plan.bins import Packing
from gnnsys.fullgraph.plan.halo import HaloPlan, make_plan
from gnnsys.fullgraph.plan.rank_share import Share, share_of
from gnnsys.fullgraph.plan.stages import Join, Keep, Residual, Told
from gnnsys.fullgraph.plan.step_plan import Schedule
from gnnsys.fullgraph.run.approximate import BoundarySampling, Staleness
from gnnsys.fullgraph.run.call_layer import call

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
