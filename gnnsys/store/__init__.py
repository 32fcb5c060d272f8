"""Tables: rows of nodes, edges or anything, sharded over machines, pulled and pushed from anywhere."""

from gnnsys.store.candidates import Place, Run
from gnnsys.store.device_cache import CacheCounters, DeviceCache
from gnnsys.store.embedding import DistEmbedding
from gnnsys.store.incarnation import Life
from gnnsys.store.optim import SparseAdagrad, SparseAdam
from gnnsys.store.pull import PendingPull, Pull
from gnnsys.store.push import PendingPush
from gnnsys.store.shard import Shard
from gnnsys.store.source import FeatureSource, PendingRead
from gnnsys.store.spec import TableSpec, edge_table, node_table
from gnnsys.store.store import Store
from gnnsys.store.tensor import DistTensor

__all__ = [
    "CacheCounters",
    "DeviceCache",
    "DistEmbedding",
    "DistTensor",
    "FeatureSource",
    "Life",
    "PendingPull",
    "PendingPush",
    "PendingRead",
    "Place",
    "Pull",
    "Run",
    "Shard",
    "SparseAdagrad",
    "SparseAdam",
    "Store",
    "TableSpec",
    "edge_table",
    "node_table",
]
