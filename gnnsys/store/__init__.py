"""Tables: rows of nodes, edges or anything, sharded over machines, pulled and pushed from anywhere."""

from gnnsys.store.candidates import Place, Run
from gnnsys.store.capacity import free_device_memory, free_memory
from gnnsys.store.device_cache import CacheCounters, DeviceCache
from gnnsys.store.embedding import DistEmbedding
from gnnsys.store.incarnation import Life
from gnnsys.store.memory_budget import MemoryBudget, MemoryPromise, MemoryUse
from gnnsys.store.optim import SparseAdagrad, SparseAdam, SparseOptimizer
from gnnsys.store.pull import PendingPull, Pull
from gnnsys.store.push import PendingPush
from gnnsys.store.read import is_table, read_rows
from gnnsys.store.saved import load_part, part_folder
from gnnsys.store.serve import pull_chunks
from gnnsys.store.shard import Shard
from gnnsys.store.snapshots import sync_folders
from gnnsys.store.source import FeatureSource, PendingRead, put_rows
from gnnsys.store.spec import TableSpec, edge_table, node_table
from gnnsys.store.store import Store
from gnnsys.store.tensor import DistTensor
from gnnsys.store.wire import CHUNK_BYTES

__all__ = [
    "CHUNK_BYTES",
    "CacheCounters",
    "DeviceCache",
    "DistEmbedding",
    "DistTensor",
    "FeatureSource",
    "Life",
    "MemoryBudget",
    "MemoryPromise",
    "MemoryUse",
    "PendingPull",
    "PendingPush",
    "PendingRead",
    "Place",
    "Pull",
    "Run",
    "Shard",
    "SparseAdagrad",
    "SparseAdam",
    "SparseOptimizer",
    "Store",
    "TableSpec",
    "edge_table",
    "free_device_memory",
    "free_memory",
    "is_table",
    "load_part",
    "node_table",
    "part_folder",
    "pull_chunks",
    "put_rows",
    "read_rows",
    "sync_folders",
]
