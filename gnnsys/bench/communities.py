"""What suites in the lab train on: a graph of communities, in the folder of the run, made once and found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gnnsys.bench.parse_settings import from_texts
from gnnsys.graph import MANIFEST, save, sbm

S = TypeVar("S", bound="CommunitySettings")


@dataclass(frozen=True, kw_only=True)
class CommunitySettings:
    """The graph, and the hosts of the lab. A suite adds its own settings, and what is usual in it.

    `cpu` is the quota of a host: hosts x cpu should be a little less than the cores of this machine, or figures of
    scaling mean nothing.
    """

    suite = ""  # whose settings they are

    num_nodes: int
    num_classes: int
    avg_degree: float
    homophily: float
    num_features: int
    hosts: int
    cpu: float

    @classmethod
    def from_texts(cls: type[S], texts: Mapping[str, str], base: Mapping[str, Any]) -> S:
        """`base` with what a person wrote on top: {"num_nodes": "10000", "cpu": "0.9"}."""
        return from_texts(cls, texts, base)

    @property
    def graph(self) -> dict[str, Any]:
        """The arguments of `gnnsys.graph.generate.sbm`."""
        names = ("num_nodes", "num_classes", "avg_degree", "homophily", "num_features")
        return {name: getattr(self, name) for name in names}


def task_folder(folder: Path, settings: CommunitySettings) -> Path:
    """Named after the graph, so that another graph never meets these parts."""
    digest = hashlib.sha256(json.dumps(settings.graph, sort_keys=True).encode()).hexdigest()[:12]
    made = folder / f"{settings.suite}-{settings.num_nodes}-{digest}"
    made.mkdir(parents=True, exist_ok=True)
    return made


def make_graph(folder: Path, settings: CommunitySettings) -> Path:
    """Where the graph is saved."""
    path = task_folder(folder, settings) / "graph"
    if not (path / MANIFEST).exists():
        save(sbm(**settings.graph), path)
    return path
