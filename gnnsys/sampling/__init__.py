"""Samplers: from seeds to the structure of a batch."""

from gnnsys.sampling.sample import Block, Sample

__all__ = ["Block", "Sample"]
