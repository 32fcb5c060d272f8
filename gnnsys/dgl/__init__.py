"""DGL's samplers and its `DataLoader` on our kernels: batches are (input_nodes, output_nodes, blocks), or subgraphs.

A DGL user changes the import and keeps graph, model and loop, or gives what `gnnsys.open` returns as the graph:

    from gnnsys.dgl import DataLoader, NeighborSampler

The samplers are of DGL's kinds (`dgl.dataloading.BlockSampler`, `Sampler`): DGL's own DataLoader takes them too, and
`as_edge_prediction_sampler` those of blocks. With our DataLoader, sampling and prefetching run ahead in threads.
docs/loaders.md lists what differs from DGL.
"""

try:
    import dgl  # noqa: F401
except ImportError as error:
    raise ImportError("gnnsys.dgl is the face for DGL users and needs it: pip install dgl") from error

from gnnsys.dgl.labor import LaborSampler
from gnnsys.dgl.loader import DataLoader
from gnnsys.dgl.pinsage import PinSAGESampler, RandomWalkNeighborSampler
from gnnsys.dgl.sampler import MultiLayerFullNeighborSampler, MultiLayerNeighborSampler, NeighborSampler
from gnnsys.dgl.subgraphs import ClusterGCNSampler, SAINTSampler, ShaDowKHopSampler

__all__ = [
    "ClusterGCNSampler",
    "DataLoader",
    "LaborSampler",
    "MultiLayerFullNeighborSampler",
    "MultiLayerNeighborSampler",
    "NeighborSampler",
    "PinSAGESampler",
    "RandomWalkNeighborSampler",
    "SAINTSampler",
    "ShaDowKHopSampler",
]
