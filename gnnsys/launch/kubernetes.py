"""Kubernetes: a manifest for Kubeflow, one pod per host: a PyTorchJob (kubeflow.org/v1, of the training operator) or a
TrainJob (trainer.kubeflow.org/v1alpha1, of Kubeflow Trainer 2.2 and later).

Pods start torchrun by themselves and meet at the first one (c10d). torchrun restarts the group, the operator restarts
pods. There is no launcher beside them: what a preflight looks at is the business of image and cluster.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnnsys.launch.programs import for_torchrun

PORT = 29400
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # pods and services have longer names than the job


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """One pod per host. `claim` is NAME:PATH, a volume claim with parts and checkpoints; `memory` and `shm` are sizes
    as Kubernetes has them (64Gi); `runtime` is what a TrainJob is to run by."""

    name: str
    image: str
    num_pods: int = 1
    num_ranks: int = 1
    gpus: int = 0
    memory: str | None = None
    shm: str = "8Gi"
    claim: str | None = None
    restarts: int = 0
    runtime: str = "torch-distributed"
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"--name must be lower-case letters, digits and '-', at most 52, got {self.name!r}")
        if not self.image:
            raise ValueError("--k8s needs --image IMAGE, one that has your script, torch and gnnsys (see docker/)")
        for what, value in (("--nodes", self.num_pods), ("--ranks", self.num_ranks)):
            if value < 1:
                raise ValueError(f"{what} must be at least 1 with --k8s, got {value}")
        for what, value in (("--gpus", self.gpus), ("--restarts", self.restarts)):
            if value < 0:
                raise ValueError(f"{what} must be at least 0, got {value}")
        if self.claim is not None and not re.fullmatch(r"[a-z0-9][-a-z0-9.]*:/.*", self.claim):
            raise ValueError(f"--claim must be NAME:/PATH, such as parts:/data, got {self.claim!r}")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", self.runtime):
            raise ValueError(f"--runtime must be the name of a training runtime of the cluster, got {self.runtime!r}")
        if wrong := [name for name in self.env if name.startswith("PET_")]:
            raise ValueError(f"--env must not set {wrong[0]} with --k8s: what begins with PET_ is the operator's")
        for what, size in (("--memory", self.memory), ("--shm", self.shm)):
            if size is not None and not re.fullmatch(r"\d+(\.\d+)?(k|[MGTP]|[KMGTP]i)?", size):
                raise ValueError(f"{what} must be a size as Kubernetes has them, such as 64Gi, got {size!r}")


def pytorch_job(command: Sequence[str], options: PodOptions) -> dict[str, Any]:
    """A PyTorchJob, as plain values: pods meet at the first, whose name the operator makes from the job's."""
    volumes, mounts = _volumes(options)
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for a container of this name
        "image": options.image,
        "command": [*_torchrun(options), f"--rdzv-endpoint={options.name}-worker-0:{PORT}", *_script(command)],
        "env": _env(options),
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "volumeMounts": mounts,
    }
    if resources := _resources(options):
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


def train_job(command: Sequence[str], options: PodOptions) -> dict[str, Any]:
    """A TrainJob, as plain values: all but image, command and volumes is the business of the runtime that it names.

    The runtime has a job `node` with a container `node`, and tells each pod by variables (PET_*) which node it is and
    where the first one is. That is the one that listens: a name that DNS does not know yet cannot decide it.
    """
    shell = f'exec {shlex.join(_torchrun(options))} --rdzv-endpoint="$PET_MASTER_ADDR:$PET_MASTER_PORT" '
    shell += '--rdzv-conf=is_host=$((PET_NODE_RANK == 0)) "$@"'
    volumes, mounts = _volumes(options)
    trainer: dict[str, Any] = {
        "image": options.image,
        "command": ["sh", "-c", escape(shell), "torchrun"],
        "args": _script(command),
        "env": _env(options),
        "numNodes": options.num_pods,
        "numProcPerNode": options.num_ranks,
    }
    if resources := _resources(options):
        trainer["resourcesPerNode"] = {"requests": resources, "limits": dict(resources)}
    pods = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    node = {"name": "node", "template": {"spec": {"template": {"spec": pods}}}}
    patch = {"manager": "gnnsys", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": options.name},
        "spec": {"runtimeRef": {"name": options.runtime}, "trainer": trainer, "runtimePatches": [patch]},
    }


def escape(text: str) -> str:
    """What the kubelet makes `text` of: it puts the values of variables in for $(NAME), and $ for $$."""
    return text.replace("$", "$$")


def _script(command: Sequence[str]) -> list[str]:
    return [escape(word) for word in for_torchrun(command)]


def _torchrun(options: PodOptions) -> list[str]:
    words = ["python", "-m", "torch.distributed.run", f"--nnodes={options.num_pods}"]
    words += [f"--nproc-per-node={options.num_ranks}", f"--max-restarts={options.restarts}"]
    return [*words, "--rdzv-backend=c10d", f"--rdzv-id={options.name}"]


def _env(options: PodOptions) -> list[dict[str, str]]:
    # Without the first a group that was restarted reads the keys of the one before it.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1", **options.env}
    return [{"name": name, "value": escape(value)} for name, value in env.items()]


def _resources(options: PodOptions) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if options.gpus:
        resources["nvidia.com/gpu"] = options.gpus
    if options.memory is not None:
        resources["memory"] = options.memory
    return resources


def _volumes(options: PodOptions) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if options.claim is not None:
        claim, path = options.claim.split(":", 1)
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "data", "mountPath": path})
    return volumes, mounts


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """YAML; JSON, which is YAML too, where PyYAML is not installed."""
    try:
        import yaml
    except ImportError:
        return json.dumps(manifest, indent=2) + "\n"
    return yaml.safe_dump(dict(manifest), sort_keys=False)
