"""The sizes of `gnnsys bench fullgraph`: those of the issue-sized run, and of a quick one that shows that it works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gnnsys.bench.communities import CommunitySettings
from gnnsys.lab import parse_rate


@dataclass(frozen=True, kw_only=True)
class FullGraphSettings(CommunitySettings):
    """GraphSAGE on a graph of communities, one rank per host of the lab; degree and widths are those of ogbn-products.

    Without a `rate` links get the one at which communication is half of a sequential epoch. `bins` are those of every
    variant that says nothing else; `sweep`, `depths` and `widths` are what bins, layers and features are varied over.
    Replication is compared on `replication_hosts`, whose quotas add up to the same: the more hosts, the more of a graph
    each repeats. Beside it there are as many bins as `HybridParallel` makes by itself.
    """

    suite = "fullgraph"

    num_nodes: int = 40_000
    num_classes: int = 40
    avg_degree: float = 50.0
    homophily: float = 0.99
    num_features: int = 100
    hidden: int = 256
    layers: int = 3
    hosts: int = 4
    cpu: float = 0.4
    replication_hosts: int = 8
    rate: str = ""
    epochs: int = 5
    bins: int = 6
    sweep: tuple[int, ...] = (1, 4, 6, 8, 16)
    depths: tuple[int, ...] = (2, 3, 4)
    widths: tuple[int, ...] = (16, 32, 64, 128, 256)

    def __post_init__(self) -> None:
        if self.rate:
            parse_rate(self.rate)
        if min(self.hosts, self.replication_hosts) < 2 or self.epochs < 1 or self.layers < 2 or self.bins < 1:
            raise ValueError(
                f"hosts and layers must be at least 2, epochs and bins at least 1, got {self.hosts} and "
                f"{self.replication_hosts}, {self.layers}, {self.epochs}, {self.bins}"
            )
        if min(self.depths) < 2 or min(self.sweep) < 1 or min(self.widths) < 1:
            raise ValueError(
                f"depths must be at least 2, sweep and widths at least 1, got {self.depths}, {self.sweep} and "
                f"{self.widths}"
            )

    @property
    def graph(self) -> dict[str, Any]:
        """With the features of the widest variant, of which others take the first columns."""
        return super().graph | {"num_features": max(self.num_features, *self.widths)}


QUICK = {
    "num_nodes": 6_000,
    "num_classes": 12,
    "hosts": 2,
    "replication_hosts": 2,
    "cpu": 0.9,
    "num_features": 16,
    "hidden": 16,
    "epochs": 2,
    "bins": 4,
    "sweep": (1, 4),
    "depths": (2, 3),
    "widths": (16, 32),
}
