"""Jobs of a queue as threads of one process, each with a stream of its own (the paper's IV-E), to compare.

Jobs start in their order, whatever memory they take. The interpreter is one for all of them, and so are generators: no
job has the losses that it has alone. A job that is out of memory has failed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gnnsys.bench.child_process import Child
from gnnsys.bench.jobs.device_watch import DeviceWatch
from gnnsys.bench.jobs.queue_runs import RUN_SECONDS, QueuedCall, QueueRun
from gnnsys.jobs import JobState, JobTimes


def run_streams(calls: Sequence[QueuedCall], warm_up: QueuedCall, workers: int, device: str) -> QueueRun:
    told = [{"target": call.target, "arguments": dict(call.arguments), "seed": call.seed} for call in [warm_up, *calls]]
    with tempfile.TemporaryDirectory(prefix="gnnsys-streams-") as name, DeviceWatch() as watch:
        (Path(name) / "calls.json").write_text(json.dumps(told))
        with Child("gnnsys.bench.jobs.stream_process", name, str(workers), device) as child:
            said = child.answer(RUN_SECONDS)
        times = [JobTimes(**{**each, "state": JobState(each["state"])}) for each in said["jobs"]]
        run = QueueRun(tuple(times))
        return QueueRun(run.times, watch.busy(run.start, run.end), watch.most_used(run.start, run.end))
