"""Which GPU a process has, in words that all ranks of a job can compare: NCCL refuses two ranks on one."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

import torch


class DevicePlace(NamedTuple):
    """A device as all ranks of the job can compare it."""

    machine: str
    device: str  # of a GPU what no other on the machine is called; "cpu"


def place_of(device: torch.device, is_alone: bool = False) -> DevicePlace:
    """A GPU by its UUID: processes that see different GPUs (CUDA_VISIBLE_DEVICES) give each of them number 0."""
    name = str(device)
    if device.type == "cuda" and not is_alone:  # asking for it would start CUDA
        name = str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
    return DevicePlace(_machine(), name)


def _machine() -> str:
    """What NCCL takes for one machine, whatever network namespaces it has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    found = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    return os.environ.get("NCCL_HOSTID") or found
