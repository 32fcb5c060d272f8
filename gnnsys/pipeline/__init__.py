"""Stages and the loop that drives them: threads, bounds, order, state.

Users write a `Stage`; loaders build a `Pipeline` from stages and a `Source`.
"""

from gnnsys.pipeline.pipeline import Pipeline, Source
from gnnsys.pipeline.stage import BatchGroup, OfThisProcess, Stage, StageCounters
from gnnsys.pipeline.workers import Observer, Scope

__all__ = ["BatchGroup", "Observer", "OfThisProcess", "Pipeline", "Scope", "Source", "Stage", "StageCounters"]
