"""What is trained across hosts, written down once so that every side does the same work."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """GraphSAGE (mean) on a block model: `graph` are the arguments of `gnnsys.graph.generate.sbm`.

    `fanouts` are listed from the seeds outwards. An epoch ends after `max_steps` batches per trainer, where given.
    """

    graph: dict[str, Any] = field(default_factory=dict)
    num_hosts: int = 2
    trainers_per_host: int = 2
    batch_size: int = 1000
    fanouts: tuple[int, ...] = (15, 10, 5)
    hidden: int = 256
    learning_rate: float = 0.003
    num_epochs: int = 3
    max_steps: int | None = None
    encrypt: bool = True  # what travels between hosts

    @property
    def num_trainers(self) -> int:
        return self.num_hosts * self.trainers_per_host

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Task:
        value = json.loads((folder / "task.json").read_text())
        return cls(**{**value, "fanouts": tuple(value["fanouts"])})
