"""Samplers: from seeds to the structure of a batch."""

from gnnsys.sampling.neighbor import NeighborSampler, SampleKey
from gnnsys.sampling.sample import Block, Sample
from gnnsys.sampling.sources import check_fanouts

__all__ = ["Block", "NeighborSampler", "Sample", "SampleKey", "check_fanouts"]
