"""A job profile made without a cluster: every part behind a server of its own in this process, real messages counted,
and short timings of the work (`profile_parts`)."""

from gnnsys.profiling.dry_run import DryJob, count_shares
from gnnsys.profiling.profile_parts import profile_parts
from gnnsys.profiling.run_profile import profile_of_traces
from gnnsys.profiling.step_times import StepModel, StepTimes

__all__ = ["DryJob", "StepModel", "StepTimes", "count_shares", "profile_of_traces", "profile_parts"]
