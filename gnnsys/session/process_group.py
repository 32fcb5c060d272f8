"""torch's process group for a session: made where all ranks want one and none has, on the address that works."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from gnnsys.comm import DevicePlace, Group, interface_of, is_loopback
from gnnsys.session.rank_device import choose_backend

_log = logging.getLogger(__name__)


def make_process_group(
    group: Group, wanted: bool, backend: str | None, address: str, timeout: float, places: Sequence[DevicePlace]
) -> bool:
    """Makes torch's process group if `wanted`. Returns whether it did.

    Raises if ranks differ in what they want, as they would wait for each other. `places`: each rank's device.
    """
    makes = wanted and dist.is_available() and not dist.is_initialized()
    choices = group.gather("process group", [makes, backend if makes else None])
    others = [rank for rank, choice in enumerate(choices) if choice != choices[0]]
    if others:
        raise ValueError(
            f"rank 0 and ranks {', '.join(map(str, others))} differ: {_describe(*choices[0])} on rank 0, "
            f"{_describe(*choices[others[0]])} on rank {others[0]}; call gnnsys.init() with the same process_group "
            "and backend everywhere, and make a process group of your own on every rank or on none"
        )
    if not makes:
        return False
    if backend is None:
        backend, why = choose_backend(places, dist.is_nccl_available())
        if why is not None and group.rank == 0:
            _log.warning("%s", why)
    interface = None if is_loopback(address) else interface_of(address)
    if interface is not None:  # gloo asks what the host's own name means, which may be loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = group.process_group_store or dist.HashStore()
    names = {name.rpartition(":")[2] for name in backend.split(",")}
    wait = timedelta(seconds=timeout) if names <= {"gloo", "nccl"} else None  # others cannot be reset below
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.world_size, timeout=wait)
    if wait is not None:
        _reset_timeouts()
    return True


def _reset_timeouts() -> None:
    """The ranks have met within the session's deadline; collectives may take as long as torch lets them by default."""
    world = c10d._get_default_group()
    for device in world._device_types:
        backend = world._get_backend(device)
        backend._set_default_timeout(c10d._get_default_timeout(dist.Backend(backend.name())))


def _describe(makes: bool, backend: str | None) -> str:
    return f"init makes a process group (backend {backend or 'by default'})" if makes else "init makes no process group"
