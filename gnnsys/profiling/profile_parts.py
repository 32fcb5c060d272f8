"""`profile_parts`: the job profile of a directory of parts, without a cluster and without a run."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from gnnsys.comm import sealing_seconds
from gnnsys.graph import MANIFEST, NodeType, in_words
from gnnsys.observe import num_usable_cores
from gnnsys.partition import Parts, open_parts
from gnnsys.planning import ByteWork, JobGradients, JobProfile, MachineProfile
from gnnsys.profiling.dry_run import DryJob, count_shares
from gnnsys.profiling.step_times import StepModel, StepTimes, TypedStepModel


def profile_parts(
    path: str | os.PathLike[str],
    job: DryJob,
    *,
    model: str = "sage",
    hidden: int = 256,
    trainers: int | None = None,
    num_batches: int = 50,
    encrypt: bool = True,
    machine: MachineProfile | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> JobProfile:
    """What training on these parts asks for. `trainers`: how many shares of the seeds are looked at; a profile can be
    used for other numbers of trainers too. `machine`: whose costs give the seconds of a step, with its GPU; without
    one they are timed here, on the processor. `encrypt`: links will be, as they are by default.
    """
    folder = Path(path)
    parts = open_parts(folder, verify=False)
    if num_batches < 1:
        raise ValueError(f"num_batches must be at least 1, got {num_batches}")
    load = os.getloadavg()[0]
    steps = StepTimes(step_model(parts, model, hidden, len(job.fanouts), job.what), machine=machine)
    counted = count_shares(folder, job, trainers=trainers, num_batches=num_batches, steps=steps, progress=progress)
    about: dict[str, Any] = {
        "fanouts": list(job.fanouts), "model": model, "hidden": hidden, "encrypt": encrypt, "seed": job.seed,
        "features": _plain(steps.model.features), "classes": steps.model.classes, "load": round(load, 2),
        "cores": num_usable_cores(),
    }  # fmt: skip
    return JobProfile(
        parts_digest=zlib.crc32((folder / MANIFEST).read_bytes()),
        num_parts=parts.num_parts,
        trainers_per_part=parts.trainers_per_part,
        subpart_seeds=counted.subpart_seeds,
        batch_size=job.batch_size,
        shares=counted.shares,
        gradients=JobGradients(dense=float(steps.model.gradient_bytes)),
        part_bytes=tuple(sum(parts.stored_bytes(part).values()) for part in range(parts.num_parts)),
        byte_work=ByteWork(seal=sealing_seconds() if encrypt else 0.0, carry=counted.carry),
        ahead=counted.ahead,
        in_flight=counted.in_flight,
        computes_on=steps.computes_on,
        about=about,
    )


def step_model(
    parts: Parts, kind: str, hidden: int, num_layers: int, what: str = "train"
) -> StepModel | TypedStepModel:
    """A model for these parts: as wide as their features `x`, with as many classes as they say."""
    schema = parts.schema
    classes = int(parts.graph_info.get("num_classes") or 50)
    if len(schema.node_types) != 1 or len(schema.edge_types) != 1:
        return TypedStepModel(
            kind=kind, hidden=hidden, num_layers=num_layers, classes=classes, features=_widths(parts),
            edge_types=tuple(schema.edge_types), target=_trained_type(parts, what),
        )  # fmt: skip
    data = schema.node_data[schema.node_types[0]]
    if "x" not in data:
        raise ValueError(f"{parts.path} has no features 'x': it has {in_words(sorted(data))}")
    width = prod(data["x"].row_shape)
    return StepModel(kind=kind, hidden=hidden, num_layers=num_layers, features=width, classes=classes)


def _widths(parts: Parts) -> dict[NodeType, int]:
    """Of the features of every node type. A type without any has rows that train: a run knows how many are pushed."""
    schema = parts.schema
    if bare := [node_type for node_type in schema.node_types if "x" not in schema.node_data[node_type]]:
        raise ValueError(
            f"{parts.path} has no features 'x' of {in_words(bare)}, whose rows would be trained: profile a run of "
            f"it, by --trace FILE"
        )
    return {node_type: prod(schema.node_data[node_type]["x"].row_shape) for node_type in schema.node_types}


def _trained_type(parts: Parts, what: str) -> NodeType:
    """The node type that has the mask, as `gnnsys.split` finds it."""
    found = [t for t, data in parts.schema.node_data.items() if {what, f"{what}_mask"} & set(data)]
    if len(found) != 1:
        raise ValueError(f"{parts.path}: {in_words(found)} have '{what}_mask' or '{what}': one node type must have it")
    return found[0]


def _plain(features: int | Mapping[NodeType, int]) -> int | dict[str, int]:
    return dict(features) if isinstance(features, Mapping) else features
