"""From a graph to parts on disk: METIS, balancing, refinement, relabelling, format, verification."""

from gnnsys.partition.assignment import Assignment
from gnnsys.partition.book import PartitionBook
from gnnsys.partition.part import Part
from gnnsys.partition.parts import Parts, open_parts
from gnnsys.partition.verify import VerifyReport, verify_parts
from gnnsys.partition.write import write_parts

__all__ = ["Assignment", "Part", "PartitionBook", "Parts", "VerifyReport", "open_parts", "verify_parts", "write_parts"]
