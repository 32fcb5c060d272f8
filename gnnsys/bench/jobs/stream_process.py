"""The process of `stream_runs`: a queue's jobs in threads. It ends when its input closes, whatever runs then."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gnnsys.bench.child_process import answer, wait_for_end
from gnnsys.jobs import GraphHolder, run_alone


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
    folder, workers, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    calls = json.loads((folder / "calls.json").read_text())
    said = os.dup(1)
    os.dup2(2, 1)  # what jobs print is no answer
    holder = GraphHolder(str(folder), device="cuda:0" if device != "cpu" else "cpu")

    def end() -> None:
        wait_for_end()
        holder.close()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    os.environ.update(holder.environment())
    run_in_threads(calls[:1] * workers, workers, device)  # kernels are loaded, cuBLAS has its handles
    answer({"jobs": run_in_threads(calls[1:], workers, device)}, said)
    threading.Event().wait()  # for the end


if __name__ == "__main__":
    main()
