"""Which device a rank computes on, and which backend the ranks' process group needs for that. Pure functions of what
is there, but for those that look: `agree_on_devices` and `find_device`.

NCCL refuses two ranks on one GPU with a message that names neither; gloo takes CUDA tensors, through the host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gnnsys.comm import DevicePlace, Group, place_of
from gnnsys.ops import ASK_DOCTOR

NCCL = "cpu:gloo,cuda:nccl"
GLOO = "gloo"


class BackendChoice(NamedTuple):
    """`why` is one line where ranks with GPUs do without NCCL."""

    backend: str
    why: str | None = None


class RankDevices(NamedTuple):
    """The device of this rank, and where the devices of all ranks are, in rank order."""

    own: torch.device
    places: list[DevicePlace]

    def num_sharing(self, rank: int) -> int:
        """How many ranks compute on the GPU of `rank`, itself among them."""
        return sum(self.places[rank].is_same(place) for place in self.places)


def agree_on_devices(group: Group, wanted: torch.device | str | None) -> RankDevices:
    """Each rank's device, told to all; where one rank's does not exist, the same ValueError on all of them."""
    is_launched = group.world_size > 1 or "LOCAL_RANK" in os.environ
    device, problem = torch.device("cpu"), None
    try:
        device = find_device(wanted, group.local_rank if is_launched else None)
    except (ValueError, RuntimeError) as error:  # torch's own where a GPU is there and cannot be used
        line = str(error).splitlines()[0]
        problem = line if group.world_size == 1 else f"rank {group.rank}: {line}"
    group.agree("device", problem)
    place = place_of(device, is_alone=group.world_size == 1)
    return RankDevices(device, [DevicePlace(*told) for told in group.gather("places of devices", place)])


def find_device(wanted: torch.device | str | None, local_rank: int | None) -> torch.device:
    """The device of this process, which is torch's current one from here on if it is a GPU.

    `local_rank` is None where nothing launched this process: then the GPU that torch uses stays that. Whoever wants the
    CPU gets it without a look at GPUs: that would start CUDA's driver, after which a process must not be forked.
    """
    if wanted is not None and str(wanted).split(":")[0] == "cpu":
        return choose_device(wanted, 0, 0)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    current = torch.cuda.current_device() if num_gpus and torch.cuda.is_initialized() else 0
    device = choose_device(wanted, current if local_rank is None else local_rank, num_gpus)
    if device.type == "cuda" and (wanted is not None or local_rank is not None):
        torch.cuda.set_device(device)
    return device


def choose_device(wanted: torch.device | str | None, local_rank: int, num_gpus: int) -> torch.device:
    """`wanted`, or the GPU that a local rank's turn comes to; the CPU where there is none. ValueError where `wanted`
    does not exist."""
    there = "torch finds no GPU, only 'cpu'" if num_gpus == 0 else f"torch finds cuda:0 to cuda:{num_gpus - 1}"
    there = "torch finds cuda:0" if num_gpus == 1 else there
    by_turn = torch.device("cuda", local_rank % num_gpus) if num_gpus else None
    if wanted is None:
        return by_turn or torch.device("cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or one such as 'cuda:1', got {str(wanted)!r}: {there}")
    if device.type == "cpu":
        return torch.device("cpu")
    if by_turn is None or (device.index is not None and device.index >= num_gpus):
        raise ValueError(f"device={str(wanted)!r} does not exist here: {there}{'' if num_gpus else f'. {ASK_DOCTOR}'}")
    return by_turn if device.index is None else device


def choose_backend(places: Sequence[DevicePlace], has_nccl: bool) -> BackendChoice:
    """For ranks with these places: NCCL, beside gloo for tensors of the CPU, where each has a GPU of its own."""
    on_cpu = [rank for rank, place in enumerate(places) if place.device == "cpu"]
    if len(on_cpu) == len(places):
        return BackendChoice(GLOO)
    if on_cpu:
        return BackendChoice(GLOO, f"rank {on_cpu[0]} computes on the CPU and others on GPUs: {_THROUGH_HOST}")
    for rank, place in enumerate(places):
        first = next(other for other, at in enumerate(places) if at.is_same(place))
        if first != rank:
            shared = f"ranks {first} and {rank} share one GPU, which NCCL does not take"
            return BackendChoice(GLOO, f"{shared}: {_THROUGH_HOST}")
    return BackendChoice(NCCL) if has_nccl else BackendChoice(GLOO, f"this torch has no NCCL: {_THROUGH_HOST}")


_THROUGH_HOST = "the process group is gloo, and what ranks exchange goes through host memory"
