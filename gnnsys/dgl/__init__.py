"""DGL's `NeighborSampler` and `DataLoader` on our kernels: batches are (input_nodes, output_nodes, blocks).

A DGL user changes the import and keeps graph, model and loop, or gives what `gnnsys.open` returns as the graph:

    from gnnsys.dgl import DataLoader, NeighborSampler

The sampler is a `dgl.dataloading.BlockSampler`, so DGL's own DataLoader and `as_edge_prediction_sampler` take it too;
with our DataLoader, sampling and prefetching run ahead in threads. docs/loaders.md lists what differs from DGL.
"""

try:
    import dgl  # noqa: F401
except ImportError as error:
    raise ImportError("gnnsys.dgl is the face for DGL users and needs it: pip install dgl") from error

from gnnsys.dgl.loader import DataLoader
from gnnsys.dgl.sampler import MultiLayerFullNeighborSampler, MultiLayerNeighborSampler, NeighborSampler

__all__ = ["DataLoader", "MultiLayerFullNeighborSampler", "MultiLayerNeighborSampler", "NeighborSampler"]
