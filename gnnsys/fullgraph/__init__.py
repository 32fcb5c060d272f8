"""Full-graph training (G3): every rank computes its own nodes, layer by layer, and sends what others need of them."""

from gnnsys.fullgraph.inference import infer
from gnnsys.fullgraph.keyed_dropout import Dropout
from gnnsys.fullgraph.modules import ByNodeType, EdgeArguments, JoinKept, Keep, Residual
from gnnsys.fullgraph.parallel import HybridParallel
from gnnsys.fullgraph.plan.bin_memory import peak_bytes
from gnnsys.fullgraph.plan.bin_schedule import BinSchedule
from gnnsys.fullgraph.plan.bins import Packing
from gnnsys.fullgraph.plan.full_graph_plan import FullGraphPlan
from gnnsys.fullgraph.plan.full_graph_way import FullGraphWay
from gnnsys.fullgraph.plan.halo import HaloPlan, make_plan
from gnnsys.fullgraph.plan.rank_share import RankShare, share_of
from gnnsys.fullgraph.run.approximate import BoundarySampling, Staleness
from gnnsys.fullgraph.run.call_layer import call

# Names of version 0.1, kept for one version more
Join, Schedule, Share, Told = JoinKept, BinSchedule, RankShare, EdgeArguments

__all__ = [
    "BinSchedule",
    "BoundarySampling",
    "ByNodeType",
    "Dropout",
    "EdgeArguments",
    "FullGraphPlan",
    "FullGraphWay",
    "HaloPlan",
    "HybridParallel",
    "Join",
    "JoinKept",
    "Keep",
    "Packing",
    "RankShare",
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
