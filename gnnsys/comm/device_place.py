"""Which GPU a process has, in words that all ranks of a job can compare.

NCCL refuses two ranks on one, and ranks that share one share its memory. Numbers do not tell: where every process sees
its own GPU alone (CUDA_VISIBLE_DEVICES, Slurm, Kubernetes), each calls it cuda:0.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

import torch

_UUID = "GPU-"


class DevicePlace(NamedTuple):
    """A device as all ranks of the job can compare it."""

    machine: str
    device: str  # of a GPU what no other on the machine is called; "cpu"

    def is_same(self, other: DevicePlace) -> bool:
        """Whether it is one GPU. Containers of one machine may call the machine by different names, and share a GPU."""
        is_known = self.device.startswith(_UUID)
        return self.device == other.device != "cpu" and (is_known or self.machine == other.machine)


def place_of(device: torch.device, is_alone: bool = False) -> DevicePlace:
    """A GPU by its UUID; where torch does not know that, by its entry in CUDA_VISIBLE_DEVICES or its number."""
    if device.type != "cuda" or is_alone:  # asking for more would start CUDA
        return DevicePlace(_machine(), str(device))
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return DevicePlace(_machine(), _name_seen(device.index) if uuid is None else f"{_UUID}{uuid}")


def _name_seen(index: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls the GPU with this number here."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return names[index].strip() or str(index) if index < len(names) else str(index)


def _machine() -> str:
    """What NCCL takes for one machine, whatever network namespaces it has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    found = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    return os.environ.get("NCCL_HOSTID") or found
