"""The description of a suite: axes whose product are the cells, in YAML or JSON.

name: one-machine
datasets: [sbm-20k]
models: [GraphSAGE, GAT]
samplers: ["15,10", "labor 15,10"]
trainers: [1, 2]
options:
  synchronous: {loading: synchronous}
  default: {}
defaults: {steps: 20}
repeats: 5
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from gnnsys.bench.matrix.cell import GUIDED, MINI_BATCH, MODELS, SAMPLERS, Cell, CellOptions, check_guide
from gnnsys.bench.matrix.cluster import CLUSTER_KEYS, ClusterOptions
from gnnsys.graph import MANIFEST, available_datasets, is_generated

LOCAL, LAB, CLUSTER = PLACES = ("local", "lab", "cluster")
_WITH_LABELS = ("sbm-", "planted-")  # generated graphs that a classifier can be trained on
KEYS = (
    "name", "where", *CLUSTER_KEYS, "launcher", "datasets", "models", "samplers", "trainers", "hosts", "options",
    "defaults", "warmup", "repeats", "deadline",
)  # fmt: skip
SUITES_FOLDER = Path(__file__).resolve().parents[1] / "suites"
ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Description:
    """`where` cells run: on this machine (or by the words of `launcher`), on hosts of the lab, or on a `cluster`.

    `notes`: what of the file does not hold where it was asked to run.
    """

    name: str
    where: str
    cells: tuple[Cell, ...]
    told: dict[str, Any] = field(repr=False)
    launcher: tuple[str, ...] = ()
    cluster: ClusterOptions | None = None
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The same for the same cells at the same kind of place, however the file is laid out."""
        told = {key: value for key, value in self.told.items() if key not in CLUSTER_KEYS} | {"where": self.where}
        if self.where == LOCAL and "where" not in self.told:
            del told["where"]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def shipped_suites() -> dict[str, Path]:
    """Those that come with gnnsys, by name."""
    return {file.stem: file for file in sorted(SUITES_FOLDER.iterdir()) if file.suffix in ENDINGS}


def read_description(path: Path, cluster: Mapping[str, Any] | None = None) -> Description:
    """Of a file, or of the name of a suite that comes with gnnsys; ValueError in one line for what is wrong.

    `cluster`: keys of a cluster, which count before those of the file.
    """
    if not path.exists():
        shipped = shipped_suites()
        if str(path) not in shipped:
            raise ValueError(f"{path} is not there, and no suite of gnnsys is called so: {', '.join(shipped)}")
        path = shipped[str(path)]
    told = _parse(path)
    if not isinstance(told, dict):
        raise ValueError(f"{path}: a suite is a mapping with the keys {', '.join(KEYS)}")
    try:
        return make_description(told, path.resolve().parent, cluster)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    try:
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique)
        return yaml.load(text, _UniqueLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from None


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    keys = [str(key) for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} is there twice")
    return dict(pairs)


class _UniqueLoader(yaml.SafeLoader):
    """YAML in which a key stands once: PyYAML takes the last of several."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _unique([(self.construct_object(key), None) for key, _ in node.value])
        return super().construct_mapping(node, deep)


def make_description(told: Mapping[str, Any], folder: Path, cluster: Mapping[str, Any] | None = None) -> Description:
    """`folder`: where paths of parts and of a hosts file begin. `cluster`: as for `read_description`."""
    for key in told:
        if key not in KEYS:
            raise ValueError(f"there is no key {key!r}; choose from: {', '.join(KEYS)}")
    name = told.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+ -]*", name):
        raise ValueError(f"name must be a text that a folder can be called by, got {name!r}")
    asked = dict(cluster or {})
    is_moved = "hosts_file" in asked or "slurm" in asked
    where = CLUSTER if is_moved else told.get("where", LOCAL)
    if where not in PLACES:
        raise ValueError(f"there is no place {where!r}; choose one of: {', '.join(PLACES)}")
    replaced = ("hosts_file", "slurm", "ssh") if is_moved else ()
    of_cluster = {key: told[key] for key in CLUSTER_KEYS if key in told and key not in replaced} | asked
    if where != CLUSTER and of_cluster:
        raise ValueError(f"{next(iter(of_cluster))} is of a cluster: write `where: cluster`, or give --hosts FILE")
    options = ClusterOptions.from_dict(of_cluster, folder) if where == CLUSTER else None
    launcher = () if is_moved else _launcher(told, where)
    hosts = _counts(told, "hosts")
    if where == LOCAL and not launcher and hosts != [1]:
        raise ValueError(f"hosts {hosts}: one machine is one host; write `where: lab` or `where: cluster`")
    cells = tuple(_cells(told, hosts, folder, may_be_elsewhere=options is not None and not options.push))
    notes = []
    if where != LAB and any(cell.options.rate is not None or cell.options.cpu is not None for cell in cells):
        if not is_moved:
            raise ValueError("rate and cpu are of hosts of the lab: write `where: lab`")
        notes.append("rate and cpu of this suite are of hosts of the lab: these hosts run as they are")
        cells = tuple(replace(cell, options=replace(cell.options, rate=None, cpu=None)) for cell in cells)
    names = [cell.name for cell in cells]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ValueError(f"twice the same cell: {twice[0]}")
    return Description(name, where, cells, dict(told), launcher, options, tuple(notes))


def _launcher(told: Mapping[str, Any], where: str) -> tuple[str, ...]:
    launcher = told.get("launcher", [])
    if not isinstance(launcher, list) or not all(isinstance(word, str) for word in launcher):
        raise ValueError(f"launcher must be a list of words, got {launcher!r}")
    if launcher and where != LOCAL:
        raise ValueError(f"launcher stands in the place of torchrun on this machine: leave it or `where: {where}` away")
    return tuple(launcher)


def _cells(told: Mapping[str, Any], hosts: list[int], folder: Path, *, may_be_elsewhere: bool) -> list[Cell]:
    defaults = told.get("defaults") or {}
    options = told.get("options") or {"default": {}}
    for key, value in (("defaults", defaults), ("options", options), *(options.items() if _is_map(options) else ())):
        if not _is_map(value) and value is not None:
            raise ValueError(f"{key} must be a mapping of names, got {value!r}")
    deadline = told.get("deadline", 600)
    if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not deadline > 0:
        raise ValueError(f"deadline must be a positive number of seconds, got {deadline!r}")
    warmup, repeats = _count("warmup", told.get("warmup", 1), 0), _count("repeats", told.get("repeats", 5), 1)
    made = {str(name): CellOptions.from_dict(more or {}, defaults) for name, more in options.items()}
    samplers = [_sampler(each) for each in _axis(told, "samplers", ["15,10"])]
    _check_samplers([kind for kind, _ in samplers], made)
    product = itertools.product(
        _datasets(told, folder, may_be_elsewhere),
        [_model(each) for each in _axis(told, "models", ["GraphSAGE"])],
        samplers,
        hosts,
        _counts(told, "trainers"),
        made.items(),
    )
    return [
        Cell(
            dataset=dataset, label=label, model=model, sampler=sampler, fanouts=fanouts, trainers=trainers,
            hosts=num_hosts, option=name, options=own, warmup=warmup, repeats=repeats, deadline=float(deadline),
            parts=parts,
        )
        for (label, dataset, parts), model, (sampler, fanouts), num_hosts, trainers, (name, own) in product
    ]  # fmt: skip


def _check_samplers(kinds: list[str], options: Mapping[str, CellOptions]) -> None:
    if any(each.guide for each in options.values()) and not set(kinds) & set(GUIDED):
        raise ValueError('guide is of a guided sampler: write "guided 15,10" among the samplers')
    for name, each in options.items():
        for kind in set(kinds) & set(GUIDED):
            check_guide({**each.guide, **GUIDED[kind]})
        if each.training != MINI_BATCH and (drawn := [kind for kind in kinds if kind != "neighbor"]):
            raise ValueError(
                f"option {name!r} trains on the whole graph and takes of a sampler its layers alone: "
                f'write "15,10" for two, not {drawn[0]!r}'
            )


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _axis(told: Mapping[str, Any], key: str, default: list[Any] | None = None) -> list[Any]:
    values = told.get(key, default)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{key} must be a list with at least one entry, got {values!r}")
    return values


def _counts(told: Mapping[str, Any], key: str) -> list[int]:
    return [_count(key, value, 1) for value in _axis(told, key, [1])]


def _count(key: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be whole numbers >= {least}, got {value!r}")
    return value


def _datasets(told: Mapping[str, Any], folder: Path, may_be_elsewhere: bool) -> list[tuple[str, str, str]]:
    """Label, name and parts of each. A mapping gives labels to long names."""
    labels = told.get("datasets")
    if isinstance(labels, dict) and labels:
        return [(str(label), *_dataset(each, folder, may_be_elsewhere)) for label, each in labels.items()]
    return [("", *_dataset(each, folder, may_be_elsewhere)) for each in _axis(told, "datasets")]


def _dataset(told: Any, folder: Path, may_be_elsewhere: bool) -> tuple[str, str]:
    """Its name, and where its parts are where it has been partitioned already: on the hosts, if not here."""
    name = str(told)
    if (is_generated(name) and name.lower().startswith(_WITH_LABELS)) or name in available_datasets():
        return name, ""
    parts = folder / name
    if (parts / MANIFEST).exists() or (may_be_elsewhere and Path(name).is_absolute()):
        return parts.name, str(parts)
    known = ", ".join(["sbm-20k", "planted-20k", *available_datasets()])
    raise ValueError(f"there is no dataset {name!r}; choose one such as {known}, or a folder of `gnnsys partition`")


def _model(told: Any) -> str:
    if told not in MODELS:
        raise ValueError(f"there is no model {told!r}; choose from: {', '.join(MODELS)}")
    return told


def _sampler(told: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(told, str):
        raise ValueError(f'a sampler is a text, "15,10" with quotation marks for two layers, got {told!r}')
    kind, _, numbers = told.rpartition(" ")
    kind = kind or "neighbor"
    if kind not in SAMPLERS:
        raise ValueError(f"there is no sampler {kind!r}; choose from: {', '.join(SAMPLERS)}")
    least = 1 if kind in ("ladies", "fastgcn") else -1
    try:
        fanouts = tuple(int(number) for number in numbers.split(","))
    except ValueError:
        raise ValueError(f'a sampler is written "15,10" or "labor 15,10", got {told!r}') from None
    if any(number < 1 and number != least for number in fanouts):
        raise ValueError(f"fanouts must be >= 1{', or -1 for all' if least < 0 else ''}, got {told!r}")
    return kind, fanouts
