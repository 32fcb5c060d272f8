"""Samplers: from seeds to the structure of a batch."""

from gnnsys.sampling.neighbor import NeighborSampler, SampleKey, check_fanouts
from gnnsys.sampling.sample import Block, Sample

__all__ = ["Block", "NeighborSampler", "Sample", "SampleKey", "check_fanouts"]
