"""The peak memory of a training job, known before it runs (CoGNN, IV-C).

`estimate_memory(function, arguments, device)` traces the job that a function returns; docs/estimate.md says how.
"""

from gnnsys.planning.memory.calibrate_device import calibrate_device
from gnnsys.planning.memory.device_events import (
    AllocationDifference,
    DeviceComparison,
    DeviceRun,
    compare_on_device,
    run_on_device,
)
from gnnsys.planning.memory.device_profile import (
    DeviceProfile,
    ScratchCurve,
    device_kind_of,
    known_kinds,
    load_device_profile,
    save_device_profile,
)
from gnnsys.planning.memory.estimate import JobMemory, MemoryShare, estimate_memory, format_bytes, watched_peak
from gnnsys.planning.memory.fit import FIT_STEPS, ArgumentFit, fit_argument
from gnnsys.planning.memory.ledger import MemoryKind
from gnnsys.planning.memory.probe import probe_memory, stated_memory
from gnnsys.planning.memory.trace_ends import TraceEnds
from gnnsys.planning.memory.training_device import DEVICES, TrainingDevice, training_device
from gnnsys.planning.memory.training_job import NoSuchJob, TrainingJob, WholeGraph, find_job, make_job, run_steps

__all__ = [
    "DEVICES",
    "FIT_STEPS",
    "AllocationDifference",
    "ArgumentFit",
    "DeviceComparison",
    "DeviceProfile",
    "DeviceRun",
    "JobMemory",
    "MemoryKind",
    "MemoryShare",
    "NoSuchJob",
    "ScratchCurve",
    "TraceEnds",
    "TrainingDevice",
    "TrainingJob",
    "WholeGraph",
    "calibrate_device",
    "compare_on_device",
    "device_kind_of",
    "estimate_memory",
    "find_job",
    "fit_argument",
    "format_bytes",
    "known_kinds",
    "load_device_profile",
    "make_job",
    "probe_memory",
    "run_on_device",
    "run_steps",
    "save_device_profile",
    "stated_memory",
    "training_device",
    "watched_peak",
]
