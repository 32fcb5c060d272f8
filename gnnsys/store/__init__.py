"""Tables: rows of nodes, edges or anything, sharded over machines, pulled and pushed from anywhere."""

from gnnsys.store.cache_plan import OWN_COST, ExpectedReads, expected_reads, remote_rows, rows_to_cache
from gnnsys.store.candidates import Candidate, Located, Policy, nearest
from gnnsys.store.capacity import free_device_memory, free_memory
from gnnsys.store.columns import ColumnChoice, ColumnSource, NarrowReading, NarrowRows, begin_narrowed
from gnnsys.store.copied_rows import CopiedRows, has_short_rows, is_short, short_rows_on
from gnnsys.store.device_cache import CacheCounters, DeviceCache
from gnnsys.store.device_table import DeviceTable, TablePiece, copied_pieces, runs_of
from gnnsys.store.device_window import DeviceWindow
from gnnsys.store.dist_tensor import DistTensor
from gnnsys.store.embedding import DistEmbedding
from gnnsys.store.in_flight import InFlightWindow, SharedInFlight
from gnnsys.store.incarnation import Life
from gnnsys.store.memory_budget import MemoryBudget, MemoryPromise, MemoryUse, capped, limited, shared_by_ranks
from gnnsys.store.message_plan import CHUNK_BYTES
from gnnsys.store.optim import RowWiseAdagrad, SparseAdagrad, SparseAdam, SparseOptimizer, SparseSGD
from gnnsys.store.pull import PendingPull, Pull
from gnnsys.store.pull_serving import pull_chunks
from gnnsys.store.push import PendingPush
from gnnsys.store.registered_files import RegisteredFiles
from gnnsys.store.saved import load_part, part_folder
from gnnsys.store.shard import Shard
from gnnsys.store.shared_ranges import is_shared_memory, note_shared_memory
from gnnsys.store.snapshots import sync_folders
from gnnsys.store.source import (
    FeatureSource,
    PendingRead,
    ReadContext,
    RowBuffers,
    Source,
    TensorSource,
    as_source,
    check_policy,
    put_rows,
    read_rows,
)
from gnnsys.store.spec import TableSpec, edge_table, node_table
from gnnsys.store.store import Store
from gnnsys.store.visit_counts import VisitCounts, Visits

# Names of the version before this one.
Place, Run = Candidate, Located

__all__ = [
    "CHUNK_BYTES",
    "OWN_COST",
    "CacheCounters",
    "Candidate",
    "ColumnChoice",
    "ColumnSource",
    "CopiedRows",
    "DeviceCache",
    "DeviceTable",
    "DeviceWindow",
    "DistEmbedding",
    "DistTensor",
    "ExpectedReads",
    "FeatureSource",
    "InFlightWindow",
    "Life",
    "Located",
    "MemoryBudget",
    "MemoryPromise",
    "MemoryUse",
    "NarrowReading",
    "NarrowRows",
    "PendingPull",
    "PendingPush",
    "PendingRead",
    "Place",
    "Policy",
    "Pull",
    "ReadContext",
    "RegisteredFiles",
    "RowBuffers",
    "RowWiseAdagrad",
    "Run",
    "Shard",
    "SharedInFlight",
    "Source",
    "SparseAdagrad",
    "SparseAdam",
    "SparseOptimizer",
    "SparseSGD",
    "Store",
    "TablePiece",
    "TableSpec",
    "TensorSource",
    "VisitCounts",
    "Visits",
    "as_source",
    "begin_narrowed",
    "capped",
    "check_policy",
    "copied_pieces",
    "edge_table",
    "expected_reads",
    "free_device_memory",
    "free_memory",
    "has_short_rows",
    "is_shared_memory",
    "is_short",
    "limited",
    "load_part",
    "nearest",
    "node_table",
    "note_shared_memory",
    "part_folder",
    "pull_chunks",
    "put_rows",
    "read_rows",
    "remote_rows",
    "rows_to_cache",
    "runs_of",
    "shared_by_ranks",
    "short_rows_on",
    "sync_folders",
]
