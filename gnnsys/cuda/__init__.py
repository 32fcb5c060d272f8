"""Training steps captured in CUDA graphs."""

from gnnsys.cuda.captured_step import CaptureCounts, CapturedStep, capture

__all__ = ["CaptureCounts", "CapturedStep", "capture"]
