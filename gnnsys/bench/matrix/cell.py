"""A cell of the matrix: one training job, and all that it depends on. Written down as JSON for the job's ranks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from gnnsys.bench.dist.phase import COMPUTE, KEEPING, MODES
from gnnsys.explain import Guide
from gnnsys.lab import parse_rate

MODELS = ("GraphSAGE", "GCN", "GAT", "GIN")
GUIDED: dict[str, dict[str, Any]] = {  # DGS, and its two halves: what counts before a cell's own `guide`
    "guided": {},
    "guided nodes": {"num_features": 1.0},
    "guided columns": {"nodes": False},
}
SAMPLERS = ("neighbor", "labor", "ladies", "fastgcn", *GUIDED)
PARTITIONS = ("two-level", "metis", "random", "chunk", "communication")
MINI_BATCH, FULL_GRAPH, REPLICATED = "mini-batch", "full-graph", "replicated"
TRAININGS = (MINI_BATCH, FULL_GRAPH, REPLICATED)
FULL_SCHEDULE = "full"
SCHEDULES = ("sequential", "inter-layer", "intra-layer", FULL_SCHEDULE)
READY, REPEAT = "suite-ready", "suite-repeat"  # lines of rank 0: limits may be set, a repeat begins or ends
FIGURES = "suite-figures"  # and a number: rank 0 prints a piece of what was measured
PRINTED = "-"  # in the place of a file: what was measured is printed
GO_FILE = "GNNSYS_BENCH_GO"  # in the environment: ranks that are ready wait until this file is there
SHARE_CORES = "GNNSYS_BENCH_SHARE_CORES"  # in the environment: trainers share the cores of their host
LOADING = tuple(mode for mode in MODES if mode != COMPUTE)
_OF_TRAINING = {
    "loading": MINI_BATCH, "batch_size": MINI_BATCH, "steps": MINI_BATCH, "guide": MINI_BATCH, "schedule": FULL_GRAPH,
    "bins": FULL_GRAPH,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """What a line of `options` may set.

    `training`: by mini-batches, on the whole graph, or on the whole graph where every trainer computes all that its
    nodes depend on ("replicated"). `loading`: how batches come (docs/suites.md). `steps`: an epoch ends after so many
    batches of every trainer; None: after all seeds. `guide`: of the guided sampler, as `gnnsys.explain.Guide` takes
    them. `schedule` and `bins`: of full-graph training; None: as many as `HybridParallel` makes by itself.
    `partition`: over hosts and their trainers ("two-level", or "communication" for the least rows that travel), over
    hosts ("metis"), in order of ids, or at random. `rate` and `cpu` are of hosts of the lab. `accuracy`: train until
    the validation nodes reach it, or `max_epochs`.
    """

    training: str = MINI_BATCH
    loading: str = KEEPING
    guide: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = FULL_SCHEDULE
    bins: int | None = None
    partition: str = "two-level"
    batch_size: int = 512
    hidden: int = 64
    learning_rate: float = 0.003
    steps: int | None = None
    encrypt: bool = True
    rate: str | None = None
    cpu: float | None = None
    device: str | None = None
    accuracy: float | None = None
    max_epochs: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("training", self.training, TRAININGS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("loading", self.loading, LOADING)
        _one_of("partition", self.partition, PARTITIONS)
        for name in ("batch_size", "hidden", "max_epochs", "steps", "bins"):
            value = getattr(self, name)
            if (value is not None or name not in ("steps", "bins")) and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if type(self.encrypt) is not bool:
            raise ValueError(f"encrypt must be true or false, got {self.encrypt!r}")
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError):
                raise ValueError(f"device must be one that torch knows, cpu or cuda, got {self.device!r}") from None
        if self.rate is not None:
            parse_rate(str(self.rate))
        _number("learning_rate", self.learning_rate, 0.0, None)
        if self.cpu is not None:
            _number("cpu", self.cpu, 0.05, None)
        if self.accuracy is not None:
            _number("accuracy", self.accuracy, 0.0, 1.0)
        check_guide(self.guide)

    @classmethod
    def from_dict(cls, own: dict[str, Any], defaults: dict[str, Any]) -> CellOptions:
        """Of a line of `options`. What it sets itself must be of its training; of `defaults` the rest is left out."""
        known = [f.name for f in fields(cls)]
        for name in (*defaults, *own):
            if name not in known:
                raise ValueError(f"there is no option {name!r}; choose from: {', '.join(known)}")
        training = own.get("training", defaults.get("training", MINI_BATCH))
        for name in own:
            if training in TRAININGS and _OF_TRAINING.get(name, training) != training:
                raise ValueError(f"{name} is of `training: {_OF_TRAINING[name]}`, and has no meaning with {training}")
        return cls(**{**defaults, **own})


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`sampler`: its kind and fanouts from the seeds outwards. `warmup` epochs are not measured, `repeats` are."""

    dataset: str
    model: str
    sampler: str
    fanouts: tuple[int, ...]
    trainers: int
    hosts: int
    option: str  # its name
    options: CellOptions
    warmup: int = 1
    repeats: int = 5
    deadline: float = 600.0
    parts: str = ""  # where the job finds them
    label: str = ""  # what the dataset is called in names

    @property
    def name(self) -> str:
        """dataset/model/sampler/hosts x trainers/option."""
        fanouts = ",".join(map(str, self.fanouts))
        sampler = fanouts if self.sampler == "neighbor" else f"{self.sampler} {fanouts}"
        return f"{self.label or self.dataset}/{self.model}/{sampler}/{self.hosts}x{self.trainers}/{self.option}"

    @property
    def file_name(self) -> str:
        """Of its results: readable, and different for every cell."""
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return re.sub(r"[^\w.=-]+", "_", self.name)[-100:].strip("_") + f"-{digest}.json"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """For another process, in a file or as an argument."""
        return json.dumps(self.to_json())

    @classmethod
    def from_text(cls, text: str) -> Cell:
        told = json.loads(text)
        told |= {"options": CellOptions(**told["options"]), "fanouts": tuple(told["fanouts"])}
        return cls(**told)


def check_guide(options: Any) -> None:
    """ValueError where it is no mapping of what a guide takes."""
    if not isinstance(options, Mapping):
        raise ValueError(f"guide must be a mapping of options of gnnsys.explain.Guide, got {options!r}")
    known = [f.name for f in fields(Guide) if f.init and f.name not in ("model", "arguments", "record", "replay")]
    for name in options:
        if name not in known:
            raise ValueError(f"a guide has no {name!r}; choose from: {', '.join(known)}")
    try:
        Guide(model="gnnsys.nn:GraphSAGE", **options)
    except TypeError as error:  # a text where a number should be
        raise ValueError(f"guide {dict(options)}: {error}") from None


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"there is no {name} {value!r}; choose one of: {', '.join(allowed)}")


def _number(name: str, value: Any, above: float, most: float | None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most:g}"
        raise ValueError(f"{name} must be a number above {above:g}{bound}, got {value!r}")
