"""Stages and the loop that drives them: threads, bounds, order, state."""

from gnnsys.pipeline.pipeline import Pipeline, Source
from gnnsys.pipeline.stage import Stage, StageCounters

__all__ = ["Pipeline", "Source", "Stage", "StageCounters"]
