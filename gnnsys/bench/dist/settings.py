"""The sizes of `gnnsys bench dist`: those of the issue-sized run, and of a quick one that shows that it works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gnnsys.bench.communities import CommunitySettings
from gnnsys.bench.dist.task import Task
from gnnsys.lab import parse_rate


@dataclass(frozen=True, kw_only=True)
class DistSettings(CommunitySettings):
    """What is trained, on what, and how long. `rate` is the one of the ablation, `peer_rate` the one beside DistDGL.

    An epoch is `steps` steps of every trainer.
    """

    suite = "dist"

    num_nodes: int = 1_000_000
    num_classes: int = 32
    avg_degree: float = 20.0
    homophily: float = 0.9
    num_features: int = 128
    hosts: int = 4
    trainers: int = 2
    cpu: float = 0.45
    batch_size: int = 1000
    fanouts: tuple[int, ...] = (15, 10, 5)
    hidden: int = 256
    steps: int = 3
    rates: tuple[str, ...] = ("1gbit", "200mbit", "50mbit")
    rate: str = "50mbit"
    peer_rate: str = "1gbit"
    samplers: tuple[int, ...] = (0, 1)

    def __post_init__(self) -> None:
        for rate in (*self.rates, self.rate, self.peer_rate):
            parse_rate(rate)
        if self.hosts < 2 or self.trainers < 1 or self.steps < 1:
            raise ValueError(
                f"hosts must be at least 2, trainers and steps at least 1, got {self.hosts}, {self.trainers}, "
                f"{self.steps}"
            )

    @property
    def graph(self) -> dict[str, Any]:
        """A tenth of its nodes is trained on, or as many as are used."""
        needed = 1.3 * self.steps * self.batch_size * self.hosts * self.trainers / self.num_nodes
        return super().graph | {"train": min(0.9, max(0.1, round(needed, 2)))}

    def task(self, num_hosts: int) -> Task:
        return Task(
            graph=self.graph,
            num_hosts=num_hosts,
            trainers_per_host=self.trainers,
            batch_size=self.batch_size,
            fanouts=self.fanouts,
            hidden=self.hidden,
            max_steps=self.steps,
        )


QUICK = {
    "num_nodes": 20_000,
    "num_classes": 8,
    "num_features": 32,
    "hosts": 2,
    "trainers": 1,
    "cpu": 0.9,
    "batch_size": 100,
    "hidden": 32,
    "steps": 4,
    "rates": ("100mbit",),
    "rate": "20mbit",
    "peer_rate": "100mbit",
    "samplers": (0,),
}
