"""Manifests for Kubeflow: every field is one that a PyTorchJob or a TrainJob has, and of the right kind.

`FIELDS` is what of their APIs and of pods is used here, written down by hand. Where the published models are installed
(kubeflow-training, kubeflow-trainer-api), manifests are held against them too.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import pytest

from gnnsys.cli import main
from gnnsys.launch import PodOptions, manifest_text, pytorch_job, train_job
from tests.support.processes import HANGS_AFTER

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
PYTORCH_JOB = {
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
POD_PATCH = {"volumes": [VOLUME], "containers": [{"name": ("node",), "volumeMounts": CONTAINER["volumeMounts"]}]}
NODE_PATCH = {"name": ("node",), "template": {"spec": {"template": {"spec": POD_PATCH}}}}
TRAIN_JOB = {
    "apiVersion": ("trainer.kubeflow.org/v1alpha1",),
    "kind": ("TrainJob",),
    "metadata": {"name": str},
    "spec": {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": CONTAINER["env"],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"requests": dict, "limits": dict},
        },
        "runtimePatches": [
            {"manager": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [NODE_PATCH]}}}}
        ],
    },
}
FIELDS = {pytorch_job: PYTORCH_JOB, train_job: TRAIN_JOB}
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
@pytest.mark.parametrize("make", FIELDS)
def test_a_manifest_has_the_fields_of_its_kind(make, options):
    made = make(["train.py", "/data/parts"], PodOptions(name="train", image="me/train", **options))
    assert problems(made, FIELDS[make]) == []
    kind = made["kind"]
    assert problems({**made, "kind": "Job", "more": 1}, FIELDS[make]) == [
        ".more is unknown",
        f".kind is 'Job', not one of ({kind!r},)",
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


def test_a_trainjob_asks_its_runtime_for_what_was_asked_for():
    made = train_job(["train.py", "/data/parts"], PodOptions(name="train", image="me/train", **FULL))["spec"]
    trainer, (patch,) = made["trainer"], made["runtimePatches"]
    assert made["runtimeRef"] == {"name": "torch-distributed"}
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["args"]) == (2, 4, ["train.py", "/data/parts"])
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 4, "memory": "64Gi"}
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pods = node["template"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pods["volumes"]] == ["shm", "data"]
    assert pods["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_the_training_operators_models_know_every_field():
    models = pytest.importorskip("kubeflow.training.models", reason="pip install -r requirements/schemas.txt")
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


def test_the_trainers_models_know_every_field():
    """They drop what they do not know, so a field is known if it comes back."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -r requirements/schemas.txt")

    def lost(value: Any, kept: Any, where: str) -> list[str]:
        if isinstance(value, list):
            value, kept = dict(enumerate(value)), dict(enumerate(kept))
        if not isinstance(value, dict):
            return [] if kept == value else [where]
        gone = [f"{where}.{key}" for key in value if key not in kept]
        inner = [lost(value[key], kept[key], f"{where}.{key}") for key in value if key in kept]
        return gone + [each for found in inner for each in found]

    def unknown(made: dict[str, Any]) -> list[str]:
        return lost(made, json.loads(models.TrainerV1alpha1TrainJob.from_dict(made).to_json()), "")

    made = train_job(["train.py"], PodOptions(name="train", image="me/train", **FULL))
    assert unknown(made) == []
    made["spec"]["trainer"]["numGpus"] = 1
    del made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    made["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["replicas"] = 2
    where = ".spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.replicas"
    assert unknown(made) == [".spec.trainer.numGpus", where]
    made["spec"]["trainer"]["numProcPerNode"] = "auto"
    with pytest.raises(ValueError, match="numProcPerNode"):
        unknown(made)


def expand(text: str, env: dict[str, str]) -> str:
    """As the kubelet does, by its documentation: $(NAME) is a variable's value if there is one, $$ is $."""
    return re.sub(r"\$(\$|\((.*?)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), text)


DOLLARS = ["$(HOME)", "$$(HOME)", "$$", "a$b", "$", "$(NOBODY)", "cost: 5$", "$(", "'$@'"]


@pytest.mark.parametrize("make", FIELDS)
def test_words_and_variables_come_through_the_kubelet_as_they_were_written(make):
    made = make(DOLLARS, PodOptions(name="train", image="x", env={"COLOUR": "$(HOME)$$"}))
    if make is train_job:
        words, env = made["spec"]["trainer"]["args"], made["spec"]["trainer"]["env"]
    else:
        (pod,) = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        words, env = pod["command"][-len(DOLLARS) :], pod["env"]
    came = [expand(word, {"HOME": "/root"}) for word in words]
    assert [Template(word).safe_substitute(local_rank="0") for word in came] == DOLLARS  # as torchrun does
    assert expand(env[-1]["value"], {"HOME": "/root"}) == "$(HOME)$$" and "$$(HOME)" in words


TELLS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "COLOUR")
print(json.dumps([[os.environ[name] for name in names], sys.argv[1:]]), flush=True)
"""


@pytest.mark.long  # the same words: the tests above
@pytest.mark.parametrize("make", FIELDS)
def test_pods_that_run_what_the_manifest_says_become_one_group(make, tmp_path):
    """Two pods as processes of this machine, with the variables that Kubeflow would set, and what the kubelet does."""
    (tmp_path / "tells.py").write_text(TELLS)
    options = PodOptions(name="train", image="x", num_pods=2, num_ranks=2, env={"COLOUR": "$red"})
    made = make([str(tmp_path / "tells.py"), *DOLLARS], options)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pods = []
    for number in range(2):
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        if make is train_job:
            trainer = made["spec"]["trainer"]
            words, given = [*trainer["command"], *trainer["args"]], trainer["env"]
            own |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(number)}
            own |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        else:
            (pod,) = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
            words = [word.replace("train-worker-0:29400", f"127.0.0.1:{port}") for word in pod["command"]]
            given = pod["env"]
            own |= {"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:2", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}
        own |= {each["name"]: expand(each["value"], own) for each in given}
        command = [expand(word, own) for word in words]
        pods.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}))
    said = [json.loads(line) for pod in pods for line in pod.communicate(timeout=HANGS_AFTER)[0].splitlines()]
    assert [pod.returncode for pod in pods] == [0, 0]
    assert all(words == DOLLARS and colour == "$red" for (*_, colour), words in said)
    assert sorted(facts[:3] for facts, _ in said) == [[str(rank), "4", str(rank % 2)] for rank in range(4)]


def test_the_command_prints_it(capsys):
    options = ["--k8s", "--nodes", "2", "--gpus", "4", "--image", "me/train", "--claim", "graph:/data"]
    assert main(["launch", *options, "my_train.py", "/data/parts"]) == 0
    text = capsys.readouterr().out
    expected = PodOptions(name="my-train", image="me/train", num_pods=2, num_ranks=4, gpus=4, claim="graph:/data")
    assert text == manifest_text(pytorch_job(["my_train.py", "/data/parts"], expected))
    assert main(["launch", *options, "--kind", "trainjob", "--runtime", "mine", "my_train.py", "/data/parts"]) == 0
    other = capsys.readouterr().out
    assert other == manifest_text(train_job(["my_train.py", "/data/parts"], replace(expected, runtime="mine")))
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
        (["--image", "x", "--restarts", "-1"], "--restarts must be at least 0, got -1"),
        (["--image", "x", "--ranks", "1", "--gpus", "-1"], "--gpus must be at least 0, got -1"),
        (["--image", "x", "--claim", "graph"], "--claim must be NAME:/PATH, such as parts:/data, got 'graph'"),
        (["--image", "x", "--memory", "lots"], "--memory must be a size as Kubernetes has them"),
        (["--image", "x", "--runtime", "mine"], "--runtime is for --kind trainjob: a pytorchjob has none"),
        (["--image", "x", "--kind", "trainjob", "--runtime", "My"], "--runtime must be the name of a training runtime"),
        (["--image", "x", "--env", "PET_NNODES=3"], "--env must not set PET_NNODES with --k8s"),
    ],
)
def test_what_cannot_be_a_job_is_one_line(options, message, capsys):
    assert main(["launch", "--k8s", *options, "train.py"]) == 2
    assert message in capsys.readouterr().err
