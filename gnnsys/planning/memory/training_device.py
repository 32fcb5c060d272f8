"""The device a job is estimated for: its kind, and what it has and holds before any tensor is made."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class TrainingDevice:
    """`capacity` in bytes, None where it is not known. `matmul_workspace` is what torch allocates for cuBLAS at
    the first product of a thread and keeps: 32 MiB on devices of compute capability 9."""

    name: str
    device_type: str
    capacity: int | None = None
    matmul_workspace: int = 0


DEVICES = {
    "cpu": TrainingDevice("cpu", "cpu"),
    # As torch shows it: 139.8 GiB of 141 GB.
    "h200": TrainingDevice("h200", "cuda", capacity=int(139.8 * GIB), matmul_workspace=32 << 20),
}


def training_device(device: str | TrainingDevice) -> TrainingDevice:
    if isinstance(device, TrainingDevice):
        return device
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    return DEVICES[device]
