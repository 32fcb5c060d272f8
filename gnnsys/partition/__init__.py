"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.assign import Assigned, Options, assign_parts
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.book import PartitionBook
from gnnsys.partition.communication import (
    CommunicationResult,
    CommunicationVolume,
    communication_volume,
    refine_communication,
)
from gnnsys.partition.inspect import Inspection, inspect_parts
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
from gnnsys.partition.part import Part
from gnnsys.partition.partition import Partitioned, partition_graph
from gnnsys.partition.parts import Parts, open_parts
from gnnsys.partition.placement import Placement, place_parts
from gnnsys.partition.plot import write_plot
from gnnsys.partition.remote import Remote, expected_remote
from gnnsys.partition.streaming import StreamedParts, stream_assignment
from gnnsys.partition.verify import VerifyReport, verify_parts
from gnnsys.partition.write import write_parts

__all__ = [
    "Assigned",
    "Assignment",
    "CommunicationResult",
    "CommunicationVolume",
    "Estimate",
    "Inspection",
    "MemoryPlan",
    "Options",
    "Part",
    "PartitionBook",
    "Partitioned",
    "Parts",
    "Placement",
    "Remote",
    "StreamedParts",
    "VerifyReport",
    "assign_parts",
    "communication_volume",
    "estimate_in_memory",
    "estimate_streaming",
    "expected_remote",
    "format_size",
    "inspect_parts",
    "least_memory",
    "open_parts",
    "parse_size",
    "partition_graph",
    "place_parts",
    "plan_memory",
    "refine_communication",
    "stream_assignment",
    "verify_parts",
    "write_parts",
    "write_plot",
]
