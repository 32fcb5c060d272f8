"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.assignment import Assignment
from gnnsys.partition.memory import (
    Estimate,
    MemoryPlan,
    estimate_in_memory,
    estimate_streaming,
    format_size,
    least_memory,
    parse_size,
    plan_memory,
)
from gnnsys.partition.streaming import StreamedParts, in_edge_weight, node_weight, stream_assignment

__all__ = [
    "Assignment",
    "Estimate",
    "MemoryPlan",
    "StreamedParts",
    "estimate_in_memory",
    "estimate_streaming",
    "format_size",
    "in_edge_weight",
    "least_memory",
    "node_weight",
    "parse_size",
    "plan_memory",
    "stream_assignment",
]
