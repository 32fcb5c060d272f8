"""What a job trains: variants (ways to train one model on one graph) in groups that take turns, at given link rates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

OURS, METIS, CHUNK, RANDOM = "ours", "metis", "chunk", "random"
PARTITIONERS = (RANDOM, CHUNK, METIS, OURS)
SEQUENTIAL, ONE_BIN, INTER, INTRA, FULL = "sequential", "sequential in one bin", "inter-layer", "intra-layer", "full"
REPLICATED = "replicated"
UNLIMITED, CALIBRATED = "unlimited", "calibrated"  # in place of a rate


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train. `num_bins` 0: the default of `HybridParallel`. `replicate`: every rank computes its closure."""

    name: str
    parts: str = OURS
    num_layers: int = 3
    num_features: int = 64
    intra_layer: bool = True
    inter_layer: bool = True
    order: str = "boundary"
    num_bins: int = 0
    replicate: bool = False


def ablation(full: Variant) -> list[Variant]:
    """The four variants of the paper (G3, 4.6.7), and before them sequential in one bin, which has the least to do.

    Inter-layer alone packs nodes by their ids; intra-layer alone waits for everything that a layer needs.
    """
    return [
        replace(full, name=ONE_BIN, intra_layer=False, inter_layer=False, num_bins=1),
        replace(full, name=SEQUENTIAL, intra_layer=False, inter_layer=False),
        replace(full, name=INTER, intra_layer=False, order="ids"),
        replace(full, name=INTRA, inter_layer=False),
        replace(full, name=FULL),
    ]


@dataclass(frozen=True, kw_only=True)
class VariantGroup:
    """Variants that take turns, epoch by epoch, first at one rate, then at the next.

    Their losses must agree. CALIBRATED must come after UNLIMITED: it is the rate at which the first variant takes twice
    as long as on unlimited links.
    """

    name: str
    variants: tuple[Variant, ...]
    rates: tuple[str, ...]
    epochs: int


@dataclass(frozen=True, kw_only=True)
class VariantJob:
    """The job of `gnnsys.bench.fullgraph.train`. `graph`: a saved graph. `parts`: files with the rank of every node."""

    graph: str
    parts: dict[str, str]
    hidden: int
    num_hosts: int
    cpu: float
    groups: tuple[VariantGroup, ...]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> VariantJob:
        value = json.loads((folder / "job.json").read_text())
        return cls(**{**value, "groups": tuple(_group(group) for group in value["groups"])})


def _group(value: dict[str, Any]) -> VariantGroup:
    variants: Sequence[dict[str, Any]] = value["variants"]
    return VariantGroup(**{**value, "variants": tuple(Variant(**v) for v in variants), "rates": tuple(value["rates"])})
