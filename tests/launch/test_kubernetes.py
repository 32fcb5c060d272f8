"""Manifests for Kubeflow's training operator: every field is one that a PyTorchJob has, and of the right kind.

`FIELDS` is what of the operator's API (kubeflow.org/v1) and of pods is used here, written down by hand. Where the
operator's Python SDK (kubeflow-training) is installed, manifests are held against its models too.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gnnsys.cli import main
from gnnsys.launch import PodOptions, manifest_text, pytorch_job

CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "env": [{"name": str, "value": str}],
    "ports": [{"name": str, "containerPort": int}],
    "volumeMounts": [{"name": str, "mountPath": str}],
    "resources": {"limits": dict},
}
VOLUME = {"name": str, "emptyDir": {"medium": str, "sizeLimit": str}, "persistentVolumeClaim": {"claimName": str}}
WORKER = {
    "replicas": int,
    "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
    "template": {"spec": {"containers": [CONTAINER], "volumes": [VOLUME]}},
}
FIELDS = {
    "apiVersion": ("kubeflow.org/v1",),
    "kind": ("PyTorchJob",),
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,  # "auto", "cpu", "gpu" or a number, as text
        "runPolicy": {"cleanPodPolicy": ("None", "Running", "All"), "backoffLimit": int},
        "elasticPolicy": {
            "rdzvBackend": ("c10d", "etcd", "etcd-v2"),
            "minReplicas": int,
            "maxReplicas": int,
            "maxRestarts": int,
        },
        "pytorchReplicaSpecs": {"Worker": WORKER},
    },
}
FULL = {
    "num_pods": 2,
    "num_ranks": 4,
    "gpus": 4,
    "memory": "64Gi",
    "claim": "graph:/data",
    "restarts": 3,
    "env": {"COLOUR": "red"},
}


def problems(value: Any, fields: Any, where: str = "") -> list[str]:
    """What in a manifest is not as `fields` have it."""
    if isinstance(fields, type):
        return [] if type(value) is fields else [f"{where} is {value!r}"]
    if isinstance(fields, tuple):
        return [] if value in fields else [f"{where} is {value!r}, not one of {fields}"]
    if isinstance(fields, list):
        return [found for n, each in enumerate(value) for found in problems(each, fields[0], f"{where}[{n}]")]
    unknown = [f"{where}.{key} is unknown" for key in value if key not in fields]
    known = [key for key in value if key in fields]
    return unknown + [found for key in known for found in problems(value[key], fields[key], f"{where}.{key}")]


@pytest.mark.parametrize("options", [{}, FULL])
def test_a_manifest_has_the_fields_of_a_pytorchjob(options):
    made = pytorch_job(["train.py", "/data/parts"], PodOptions(name="train", image="me/train", **options))
    assert problems(made, FIELDS) == []
    assert problems({**made, "kind": "Job", "more": 1}, FIELDS) == [
        ".more is unknown",
        ".kind is 'Job', not one of ('PyTorchJob',)",
    ]


def test_pods_meet_at_the_first_and_have_what_was_asked_for():
    made = pytorch_job(["train.py", "/data/parts"], PodOptions(name="train", image="me/train", **FULL))
    worker = made["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert worker["replicas"] == 2 and container["name"] == "pytorch"
    assert container["command"][-2:] == ["train.py", "/data/parts"]
    for option in ("--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=train-worker-0:29400", "--max-restarts=3"):
        assert option in container["command"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}}
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "shm": "/dev/shm",
        "data": "/data",
    }
    assert {"name": "COLOUR", "value": "red"} in container["env"]


def test_the_operators_own_models_know_every_field():
    models = pytest.importorskip("kubeflow.training.models", reason="pip install kubeflow-training")
    import kubernetes.client

    def check(value: Any, kind: str, where: str) -> None:
        inner = re.fullmatch(r"(?:dict\(str, |list\[)(.*)[\])]", kind)
        if inner is not None:
            each = value.items() if kind.startswith("dict") else enumerate(value)
            for key, element in each:
                check(element, inner[1], f"{where}.{key}")
            return
        model = getattr(models, kind, None) or getattr(kubernetes.client, kind, None)
        if model is None:
            assert kind in ("str", "int", "object", "bool"), (where, kind)
            assert kind == "object" or type(value).__name__ == kind or kind == "str", (where, value)
            return
        names = {json_name: name for name, json_name in model.attribute_map.items()}
        for key, element in value.items():
            assert key in names, f"{where}.{key} is unknown to {kind}"
            check(element, model.openapi_types[names[key]], f"{where}.{key}")

    made = pytorch_job(["train.py"], PodOptions(name="train", image="me/train", **FULL))
    check(made, "KubeflowOrgV1PyTorchJob", "")
    made["spec"]["elasticPolicy"]["rdzvEnd"] = "x"
    with pytest.raises(AssertionError, match="rdzvEnd is unknown to KubeflowOrgV1ElasticPolicy"):
        check(made, "KubeflowOrgV1PyTorchJob", "")


def test_the_command_prints_it(capsys):
    options = ["--k8s", "--nodes", "2", "--gpus", "4", "--image", "me/train", "--claim", "graph:/data"]
    assert main(["launch", *options, "my_train.py", "/data/parts"]) == 0
    text = capsys.readouterr().out
    expected = PodOptions(name="my-train", image="me/train", num_pods=2, num_ranks=4, gpus=4, claim="graph:/data")
    assert text == manifest_text(pytorch_job(["my_train.py", "/data/parts"], expected))
    try:
        import yaml
    except ImportError:
        assert json.loads(text)["metadata"]["name"] == "my-train"
    else:
        assert yaml.safe_load(text)["metadata"]["name"] == "my-train"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--k8s needs --image IMAGE"),
        (["--image", "x", "--name", "My Job"], "--name must be lower-case letters, digits and '-'"),
        (["--image", "x", "--nodes", "0"], "--nodes must be at least 1 with --k8s, got 0"),
        (["--image", "x", "--claim", "graph"], "--claim must be NAME:/PATH, such as parts:/data, got 'graph'"),
        (["--image", "x", "--memory", "lots"], "--memory must be a size as Kubernetes has them"),
    ],
)
def test_what_cannot_be_a_job_is_one_line(options, message, capsys):
    assert main(["launch", "--k8s", *options, "train.py"]) == 2
    assert message in capsys.readouterr().err
