"""The device a job is estimated for: its kind, and what it has and holds before any tensor is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gnnsys.planning.memory.device_profile import DeviceProfile, device_kind_of, known_kinds, load_device_profile

GIB = 1 << 30


@dataclass(frozen=True)
class TrainingDevice:
    """`capacity` in bytes, None where it is not known. `profile` is what was measured of such devices; without one
    nothing but tensors and native operators' workspaces is counted."""

    name: str
    device_type: str
    capacity: int | None = None
    profile: DeviceProfile | None = None


DEVICES = {
    "cpu": TrainingDevice("cpu", "cpu"),
    # As torch shows it: 139.8 GiB of 141 GB.
    "h200": TrainingDevice("h200", "cuda", capacity=int(139.8 * GIB)),
}


def training_device(device: str | TrainingDevice) -> TrainingDevice:
    """By name: cpu, or a kind of device that has a profile, of the package or measured here by `--calibrate`; "cuda" is
    the kind of the GPU that is here."""
    if isinstance(device, TrainingDevice):
        return device
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' is the GPU of this machine, and torch finds none: name one, such as 'h200'")
        device = device_kind_of(torch.cuda.get_device_name())
    profile = None if device == "cpu" else load_device_profile(device)
    if device not in DEVICES and profile is None:
        known = sorted({*DEVICES, *known_kinds()})
        raise ValueError(
            f"device must be one of {', '.join(known)}, got {device!r}: to add the GPU of a machine, run "
            "`gnnsys estimate --calibrate` there"
        )
    if profile is None:
        return DEVICES[device]
    known_device = DEVICES.get(device, TrainingDevice(device, "cuda", capacity=profile.capacity))
    return replace(known_device, profile=profile, capacity=profile.capacity or known_device.capacity)
