"""A cluster as the simulator sees it: hosts numbered in the order of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gnnsys.planning.cluster.cluster import Cluster

if TYPE_CHECKING:
    from gnnsys.planning.simulation import ClusterMachines

_FASTEST = 1e12  # bytes per second of a link without a limit: memory is no faster
_ON_CORES = ("store", "sampler", "server", "serving", "owner", "ring", "barrier")


def machines_of(cluster: Cluster, *, computes_on: str = "cpu", server_threads: int | None = None) -> ClusterMachines:
    """`computes_on`: where trainers compute, as a job profile says: "cpu", or the kind of GPU that it was timed on. A
    host with GPUs then computes as fast as its slowest one. `server_threads`: of each host's graph server."""
    from gnnsys.planning.simulation import ClusterMachines

    names = list(cluster.uplinks)
    speed = np.array([host.speed for host in cluster])
    computing = speed if computes_on == "cpu" else np.array([_gpu_speed(cluster, host.name) for host in cluster])
    uplinks = [cluster.uplinks[name] for name in names]
    return ClusterMachines(
        rate_in=np.array([min(host.rate_in, _FASTEST) for host in cluster]),
        rate_out=np.array([min(host.rate_out, _FASTEST) for host in cluster]),
        cores=np.array([host.cores for host in cluster]),
        server_threads=None if server_threads is None else np.full(len(cluster), server_threads),
        speeds={**dict.fromkeys(_ON_CORES, speed), "worker": computing},
        uplink=np.array([-1 if h.uplink is None else names.index(h.uplink) for h in cluster]) if names else None,
        uplink_in=np.array([min(uplink.rate_in, _FASTEST) for uplink in uplinks]) if names else None,
        uplink_out=np.array([min(uplink.rate_out, _FASTEST) for uplink in uplinks]) if names else None,
        names=cluster.names,
    )


def _gpu_speed(cluster: Cluster, name: str) -> float:
    """Of the slowest kind that the host has; 1 where it has none: no trainer is placed there."""
    return min((cluster.gpu_speed(kind) for kind in cluster[name].gpus), default=1.0)
