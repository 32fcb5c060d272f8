"""Jobs of a queue as threads of one process, each with a stream of its own (the paper's IV-E), to compare.

`stream_runs.run_streams` starts the process, this module itself, and reads what it says. Jobs start in their order,
whatever memory they take. The interpreter is one for all of them, and so are generators: no job has the losses that it
has alone. A job that is out of memory has failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gnnsys.bench.child_process import Child, answer, wait_for_end
from gnnsys.bench.jobs.device_watch import DeviceWatch
from gnnsys.bench.jobs.queue_runs import RUN_SECONDS, QueuedCall, QueueRun
from gnnsys.jobs import GraphHolder, JobState, JobTimes, run_alone


def run_streams(calls: Sequence[QueuedCall], warm_up: QueuedCall, workers: int, device: str) -> QueueRun:
    told = [{"target": call.target, "arguments": dict(call.arguments), "seed": call.seed} for call in [warm_up, *calls]]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, DeviceWatch() as watch:
        json.dump(told, file)
        file.flush()
        with Child("gnnsys.bench.jobs.stream_runs", file.name, str(workers), device) as child:
            said = child.answer(RUN_SECONDS)
        times = [JobTimes(**{**each, "state": JobState(each["state"])}) for each in said["jobs"]]
        run = QueueRun(tuple(times))
        return QueueRun(run.times, watch.busy(run.start, run.end), watch.most_used(run.start, run.end))


def run_in_threads(calls: Sequence[dict[str, Any]], workers: int, device: str) -> list[dict[str, Any]]:
    """What became of each job, as `JobTimes` has it."""
    submitted = time.time()

    def run(number: int) -> dict[str, Any]:
        call, first = calls[number], list[float]()
        told: dict[str, Any] = {"state": "done", "error": "", "result": {}, "started": time.time()}

        def on_step(steps: int) -> None:
            if not first:
                first.append(time.time())

        try:
            with nullcontext() if device == "cpu" else torch.cuda.stream(torch.cuda.Stream()):
                told["result"] = run_alone(
                    call["target"], call["arguments"], seed=call["seed"], device=device, on_step=on_step
                )
        except Exception as error:
            told |= {"state": "failed", "error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        told |= {"first_step": first[0] if first else None, "ended": time.time(), "submitted": submitted}
        return {**told, "number": number + 1, "memory": None, "measured": None, "attempts": 1}

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(len(calls))))


def main() -> None:
    calls, workers, device = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory(prefix="gnnsys-streams-") as name:
        holder = GraphHolder(name, device="cuda:0" if device != "cpu" else "cpu")
        os.environ.update(holder.environment())
        run_in_threads(calls[:1] * workers, workers, device)  # kernels are loaded, cuBLAS has its handles
        answer({"jobs": run_in_threads(calls[1:], workers, device)})
        wait_for_end()
        holder.close()


if __name__ == "__main__":
    main()
