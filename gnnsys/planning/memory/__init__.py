"""The peak memory of a training job, known before it runs (CoGNN, IV-C).

`estimate_memory(function, arguments, device)` traces the job that a function returns; docs/estimate.md says how.
"""

from gnnsys.planning.memory.estimate import JobMemory, MemoryShare, estimate_memory, format_bytes, watched_peak
from gnnsys.planning.memory.fit import ArgumentFit, fit_argument
from gnnsys.planning.memory.ledger import MemoryKind
from gnnsys.planning.memory.training_device import DEVICES, TrainingDevice, training_device
from gnnsys.planning.memory.training_job import TrainingJob, WholeGraph, find_job, make_job, run_steps

__all__ = [
    "DEVICES",
    "ArgumentFit",
    "JobMemory",
    "MemoryKind",
    "MemoryShare",
    "TrainingDevice",
    "TrainingJob",
    "WholeGraph",
    "estimate_memory",
    "find_job",
    "fit_argument",
    "format_bytes",
    "make_job",
    "run_steps",
    "training_device",
    "watched_peak",
]
