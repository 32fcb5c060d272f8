"""Training steps captured in CUDA graphs."""

from gnnsys.cuda.capture import CaptureCounts, CapturedStep, capture

__all__ = ["CaptureCounts", "CapturedStep", "capture"]
