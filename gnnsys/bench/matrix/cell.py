"""A cell of the matrix: one training job, and all that it depends on. Written down as JSON for the job's ranks."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gnnsys.bench.dist.phase import COMPUTE, KEEPING, MODES
from gnnsys.lab import parse_rate

MODELS = ("GraphSAGE", "GCN", "GAT", "GIN")
SAMPLERS = ("neighbor", "labor")
PARTITIONS = ("two-level", "metis", "random")
READY, REPEAT = "suite-ready", "suite-repeat"  # lines of rank 0: limits may be set, a repeat begins or ends
LOADING = tuple(mode for mode in MODES if mode != COMPUTE)


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """What a line of `options` may set.

    `loading`: how batches come (docs/suites.md). `partition`: METIS over hosts and their trainers ("two-level"), over
    hosts, or at random. `steps`: an epoch ends after so many batches of every trainer; None: after all seeds.
    `rate` and `cpu` are of hosts of the lab. `accuracy`: train until the validation nodes reach it, or `max_epochs`.
    """

    loading: str = KEEPING
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
        _one_of("loading", self.loading, LOADING)
        _one_of("partition", self.partition, PARTITIONS)
        for name in ("batch_size", "hidden", "max_epochs", "steps"):
            value = getattr(self, name)
            if (value is not None or name != "steps") and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if type(self.encrypt) is not bool:
            raise ValueError(f"encrypt must be true or false, got {self.encrypt!r}")
        if self.rate is not None:
            parse_rate(str(self.rate))
        _number("learning_rate", self.learning_rate, 0.0, None)
        if self.cpu is not None:
            _number("cpu", self.cpu, 0.05, None)
        if self.accuracy is not None:
            _number("accuracy", self.accuracy, 0.0, 1.0)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> CellOptions:
        known = [f.name for f in fields(cls)]
        for name in told:
            if name not in known:
                raise ValueError(f"there is no option {name!r}; choose from: {', '.join(known)}")
        return cls(**told)


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

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: Path) -> Cell:
        told = json.loads(path.read_text())
        told |= {"options": CellOptions(**told["options"]), "fanouts": tuple(told["fanouts"])}
        return cls(**told)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"there is no {name} {value!r}; choose one of: {', '.join(allowed)}")


def _number(name: str, value: Any, above: float, most: float | None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most:g}"
        raise ValueError(f"{name} must be a number above {above:g}{bound}, got {value!r}")
