"""A device while jobs run on it: how busy it is and how much of it is taken, by the driver; and a process that
holds memory of it (`ballast.py`), so that a large device is as small as the one that is compared with.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gnnsys.bench.child_process import Child

_SAMPLE_MILLISECONDS = 200


class DeviceSample(NamedTuple):
    """At a time of `time.time()`: the share of it in which a kernel ran, in percent, and bytes that are taken."""

    at: float
    busy: float
    used: int


class DeviceWatch:
    """Samples of `nvidia-smi`, as the paper took them (V-B.1), while the block runs. Without that program, none."""

    def __init__(self) -> None:
        self.samples: list[DeviceSample] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DeviceWatch:
        program = shutil.which("nvidia-smi")
        if program is not None and torch.cuda.is_available():
            what = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--id=0"]
            self._process = subprocess.Popen(
                [program, *what, f"--loop-ms={_SAMPLE_MILLISECONDS}"], stdout=subprocess.PIPE, text=True
            )
            self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # [N/A]
                busy, used = line.split(",")
                self.samples.append(DeviceSample(time.time(), float(busy), int(used) << 20))

    def busy(self, start: float, end: float) -> float | None:
        """In percent, on the mean."""
        found = [sample.busy for sample in self.samples if start <= sample.at <= end]
        return statistics.mean(found) if found else None

    def most_used(self, start: float, end: float) -> int | None:
        return max((sample.used for sample in self.samples if start <= sample.at <= end), default=None)


@contextmanager
def only_left(num_bytes: int | None) -> Iterator[int]:
    """Another process takes all of the device but so many bytes; those that it holds. None: nobody does."""
    if num_bytes is None:
        yield 0
        return
    with Child("gnnsys.bench.jobs.ballast", str(num_bytes)) as child:
        yield int(child.answer()["held"])
