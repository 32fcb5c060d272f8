"""Kubernetes: a manifest for Kubeflow's training operator (PyTorchJob, kubeflow.org/v1), one pod per host.

Pods start torchrun by themselves and meet at the first one (c10d). torchrun restarts the group, the operator restarts
pods. There is no launcher beside them: what a preflight looks at is the business of image and cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PORT = 29400
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # pods and services have longer names than the job


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """One pod per host. `claim` is NAME:PATH, a volume claim with parts and checkpoints; `memory` and `shm` are sizes
    as Kubernetes has them (64Gi)."""

    name: str
    image: str
    num_pods: int = 1
    num_ranks: int = 1
    gpus: int = 0
    memory: str | None = None
    shm: str = "8Gi"
    claim: str | None = None
    restarts: int = 0
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"--name must be lower-case letters, digits and '-', at most 52, got {self.name!r}")
        if not self.image:
            raise ValueError("--k8s needs --image IMAGE, one that has your script, torch and gnnsys (see docker/)")
        for what, value in (("--nodes", self.num_pods), ("--ranks", self.num_ranks)):
            if value < 1:
                raise ValueError(f"{what} must be at least 1 with --k8s, got {value}")
        if self.claim is not None and not re.fullmatch(r"[a-z0-9][-a-z0-9.]*:/.*", self.claim):
            raise ValueError(f"--claim must be NAME:/PATH, such as parts:/data, got {self.claim!r}")
        for what, size in (("--memory", self.memory), ("--shm", self.shm)):
            if size is not None and not re.fullmatch(r"\d+(\.\d+)?([KMGT]i?)?", size):
                raise ValueError(f"{what} must be a size as Kubernetes has them, such as 64Gi, got {size!r}")


def pytorch_job(command: Sequence[str], options: PodOptions) -> dict[str, Any]:
    """The manifest, as plain values."""
    torchrun = ["python", "-m", "torch.distributed.run", f"--nnodes={options.num_pods}"]
    torchrun += [f"--nproc-per-node={options.num_ranks}", "--rdzv-backend=c10d", f"--rdzv-id={options.name}"]
    torchrun += [f"--rdzv-endpoint={options.name}-worker-0:{PORT}", f"--max-restarts={options.restarts}", *command]
    # Without the first a group that was restarted reads the keys of the one before it.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1", **options.env}
    resources: dict[str, Any] = {}
    if options.gpus:
        resources["nvidia.com/gpu"] = options.gpus
    if options.memory is not None:
        resources["memory"] = options.memory
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if options.claim is not None:
        claim, path = options.claim.split(":", 1)
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "data", "mountPath": path})
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for a container of this name
        "image": options.image,
        "command": torchrun,
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "volumeMounts": mounts,
    }
    if resources:
        container["resources"] = {"limits": resources}
    elastic = {
        "rdzvBackend": "c10d",
        "minReplicas": options.num_pods,
        "maxReplicas": options.num_pods,
        "maxRestarts": options.restarts,
    }
    worker = {
        "replicas": options.num_pods,
        "restartPolicy": "OnFailure",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": options.name},
        "spec": {
            "nprocPerNode": str(options.num_ranks),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": options.restarts},
            "elasticPolicy": elastic,
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """YAML; JSON, which is YAML too, where PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        return json.dumps(manifest, indent=2) + "\n"
    return yaml.safe_dump(dict(manifest), sort_keys=False)
