"""PyG's loaders on our kernels: `from gnnsys.pyg import NeighborLoader` is the one import a PyG user changes.

Same signatures, same batches, no pyg-lib and no torch-sparse; workers are threads. docs/loaders.md says, argument by
argument, what is done and where we differ on purpose.
"""

try:
    import torch_geometric  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gnnsys.pyg is the face for PyG users and needs torch-geometric: pip install torch-geometric "
        "(gnnsys.NeighborLoader needs nothing but torch)"
    ) from error

from gnnsys.pyg.clusters import ClusterData, ClusterLoader
from gnnsys.pyg.loaders import LinkNeighborLoader, NeighborLoader
from gnnsys.pyg.saint import GraphSAINTEdgeSampler, GraphSAINTNodeSampler, GraphSAINTRandomWalkSampler
from gnnsys.pyg.sampler import NeighborSampler
from gnnsys.pyg.shadow import ShaDowKHopSampler
from gnnsys.pyg.stores import PartEdgeAttr, PartsFeatureStore, PartsGraphStore, stores

__all__ = [
    "ClusterData",
    "ClusterLoader",
    "GraphSAINTEdgeSampler",
    "GraphSAINTNodeSampler",
    "GraphSAINTRandomWalkSampler",
    "LinkNeighborLoader",
    "NeighborLoader",
    "NeighborSampler",
    "PartEdgeAttr",
    "PartsFeatureStore",
    "PartsGraphStore",
    "ShaDowKHopSampler",
    "stores",
]
