"""What a job really takes: the events of torch's own CPU allocator, which knows nothing of a trace."""

from __future__ import annotations

import gc

from torch.profiler import ProfilerActivity, profile

from gnnsys.planning import TrainingJob, run_steps


def allocated_peak(job: TrainingJob, num_steps: int = 2) -> int:
    """The most bytes that are allocated at a time during the steps, over what was there before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_steps(job, num_steps)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert changes, "torch's profiler saw no memory"
    live = most = 0
    for _, num_bytes in changes:
        live += num_bytes
        most = max(most, live)
    return most
