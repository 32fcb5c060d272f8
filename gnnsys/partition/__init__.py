"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.assign import Assigned, Options, assign_parts
from gnnsys.partition.assignment import Assignment
from gnnsys.partition.book import PartitionBook
from gnnsys.partition.part import Part
from gnnsys.partition.partition import Partitioned, partition_graph
from gnnsys.partition.parts import Parts, open_parts
from gnnsys.partition.verify import VerifyReport, verify_parts
from gnnsys.partition.write import write_parts

__all__ = [
    "Assigned",
    "Assignment",
    "Options",
    "Part",
    "PartitionBook",
    "Partitioned",
    "Parts",
    "VerifyReport",
    "assign_parts",
    "open_parts",
    "partition_graph",
    "verify_parts",
    "write_parts",
]
