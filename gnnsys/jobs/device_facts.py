"""What a device has: its memory, and its kind, by whose profile jobs are estimated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gnnsys
from gnnsys.observe import format_size

_CONTEXT_BYTES = 640 << 20  # of a process on a GPU, beside torch's allocator
_CONTEXTS_SHARE = 0.05
_PROBE_SECONDS = 120.0
_STAND_IN = "h200"  # the kind that a profile is shipped of


@dataclass(frozen=True)
class DeviceFacts:
    """`device` as torch says it, "cpu" or "cuda:0"; `name` of a GPU as its driver says it."""

    device: str
    num_bytes: int
    name: str = ""

    @property
    def model(self) -> str:
        """What is alike in all devices of which one measures for the other: "cpu", or the name of the GPU."""
        return self.name or self.device

    @classmethod
    def ask(cls, device: str) -> DeviceFacts:
        """A process of its own asks the driver, which would stay in this one, and leaves torch out."""
        if device == "cpu":
            return cls(device, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        index = device.partition(":")[2] or "0"
        if not index.isdigit():
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}")
        code = (
            "import json; from gnnsys.jobs.cuda_memory import device_bytes, device_name; "
            f"print(json.dumps([device_bytes({int(index)}), device_name({int(index)})]))"
        )
        package = str(Path(gnnsys.__file__).resolve().parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            told = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
            said = (told.stderr.strip().splitlines() or ["it said nothing"])[-1] if told.returncode else ""
        except subprocess.TimeoutExpired:
            said = f"its driver does not answer within {_PROBE_SECONDS:g} s"
        if said:
            raise ValueError(
                f"device {device} cannot be used ({said}): gnnsys jobs serve --device cpu runs on the host"
            )
        num_bytes, name = json.loads(told.stdout)
        return cls(device, int(num_bytes), str(name))

    @classmethod
    def ask_default(cls) -> DeviceFacts:
        """The first GPU where there is one that torch was built for, else the host."""
        import torch

        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return cls.ask("cpu")
        try:
            return cls.ask("cuda:0")
        except ValueError:
            return cls.ask("cpu")

    def choose_capacity(self, wanted: int | None, workers: int) -> int:
        """What jobs may take together. ValueError for more than the device has."""
        if wanted is None:
            return int(0.8 * self.num_bytes) if self.device == "cpu" else self.num_bytes - workers * _CONTEXT_BYTES
        if wanted < 1 or wanted > self.num_bytes:
            raise ValueError(
                f"the capacity must be at most the {format_size(self.num_bytes)} that {self.device} has, got "
                f"{format_size(max(wanted, 0))}: give --capacity {max(self.num_bytes >> 30, 1)}G or less"
            )
        return wanted

    def choose_workers(self, num_cores: int) -> int:
        """How many jobs run at a time where nobody says: four on a GPU, if each has two cores and their contexts take
        little of its memory; never less than two."""
        most = 2 if self.device == "cpu" else 4
        return max(2, min(most, num_cores // 2, int(_CONTEXTS_SHARE * self.num_bytes) // _CONTEXT_BYTES))

    def kind(self) -> tuple[str, str]:
        """By whose profile jobs are estimated, and what is to be said of that, if anything."""
        if self.device == "cpu":
            return "cpu", ""
        from gnnsys.planning import device_kind_of, known_kinds

        kind = device_kind_of(self.name)
        if kind in known_kinds():
            return kind, ""
        return _STAND_IN, (
            f"nobody has measured a {self.name} here: jobs are estimated as on an H200. `gnnsys estimate --calibrate` "
            "measures it in a minute; the next service knows it"
        )
