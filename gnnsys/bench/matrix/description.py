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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnsys.bench.matrix.cell import MODELS, SAMPLERS, Cell, CellOptions
from gnnsys.graph import MANIFEST, available_datasets, is_generated

PLACES = ("local", "lab")
_WITH_LABELS = ("sbm-", "planted-")  # generated graphs that a classifier can be trained on
KEYS = (
    "name", "where", "launcher", "datasets", "models", "samplers", "trainers", "hosts", "options", "defaults",
    "warmup", "repeats", "deadline",
)  # fmt: skip
SUITES_FOLDER = Path(__file__).resolve().parents[1] / "suites"


@dataclass(frozen=True)
class Description:
    """`where` cells run: on this machine, or on hosts of the lab; or by the words of `launcher`, on a cluster."""

    name: str
    where: str
    cells: tuple[Cell, ...]
    told: dict[str, Any] = field(repr=False)
    launcher: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The same for the same cells, however the file is laid out."""
        return hashlib.sha256(json.dumps(self.told, sort_keys=True).encode()).hexdigest()[:16]


def read_description(path: Path) -> Description:
    """Of a file, or of the name of a suite that comes with gnnsys; ValueError in one line for what is wrong."""
    if not path.exists():
        shipped = {each.stem: each for each in sorted(SUITES_FOLDER.glob("*.json"))}
        if str(path) not in shipped:
            raise ValueError(f"{path} is not there, and no suite of gnnsys is called so: {', '.join(shipped)}")
        path = shipped[str(path)]
    told = _parse(path)
    if not isinstance(told, dict):
        raise ValueError(f"{path}: a suite is a mapping with the keys {', '.join(KEYS)}")
    try:
        return make_description(told, path.resolve().parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{path}: YAML needs PyYAML: pip install 'gnnsys[bench]', or write JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None


def make_description(told: Mapping[str, Any], folder: Path) -> Description:
    """`folder`: where paths of parts begin."""
    for key in told:
        if key not in KEYS:
            raise ValueError(f"there is no key {key!r}; choose from: {', '.join(KEYS)}")
    name = told.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a text, got {name!r}")
    where = told.get("where", "local")
    if where not in PLACES:
        raise ValueError(f"there is no place {where!r}; choose one of: {', '.join(PLACES)}")
    launcher = told.get("launcher", [])
    if not isinstance(launcher, list) or not all(isinstance(word, str) for word in launcher):
        raise ValueError(f"launcher must be a list of words, got {launcher!r}")
    hosts = _counts(told, "hosts")
    if where == "local" and not launcher and hosts != [1]:
        raise ValueError(f"hosts {hosts}: one machine is one host; write `where: lab`, or a launcher of a cluster")
    cells = tuple(_cells(told, hosts, folder))
    for options in {cell.options for cell in cells}:
        if where != "lab" and (options.rate is not None or options.cpu is not None):
            raise ValueError("rate and cpu are of hosts of the lab: write `where: lab`")
    names = [cell.name for cell in cells]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ValueError(f"twice the same cell: {twice[0]}")
    return Description(name, where, cells, dict(told), tuple(launcher))


def _cells(told: Mapping[str, Any], hosts: list[int], folder: Path) -> list[Cell]:
    defaults = told.get("defaults") or {}
    options = told.get("options") or {"default": {}}
    for key, value in (("defaults", defaults), ("options", options), *(options.items() if _is_map(options) else ())):
        if not _is_map(value) and value is not None:
            raise ValueError(f"{key} must be a mapping of names, got {value!r}")
    deadline = told.get("deadline", 600)
    if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not deadline > 0:
        raise ValueError(f"deadline must be a positive number of seconds, got {deadline!r}")
    warmup, repeats = _count("warmup", told.get("warmup", 1), 0), _count("repeats", told.get("repeats", 5), 1)
    product = itertools.product(
        _datasets(told, folder),
        [_model(each) for each in _axis(told, "models", ["GraphSAGE"])],
        [_sampler(each) for each in _axis(told, "samplers", ["15,10"])],
        hosts,
        _counts(told, "trainers"),
        options.items(),
    )
    return [
        Cell(
            dataset=dataset, label=label, model=model, sampler=sampler, fanouts=fanouts, trainers=trainers,
            hosts=num_hosts, option=str(name), options=CellOptions.from_dict({**defaults, **(more or {})}),
            warmup=warmup, repeats=repeats, deadline=float(deadline), parts=parts,
        )
        for (label, dataset, parts), model, (sampler, fanouts), num_hosts, trainers, (name, more) in product
    ]  # fmt: skip


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


def _datasets(told: Mapping[str, Any], folder: Path) -> list[tuple[str, str, str]]:
    """Label, name and parts of each. A mapping gives labels to long names."""
    labels = told.get("datasets")
    if isinstance(labels, dict) and labels:
        return [(str(label), *_dataset(each, folder)) for label, each in labels.items()]
    return [("", *_dataset(each, folder)) for each in _axis(told, "datasets")]


def _dataset(told: Any, folder: Path) -> tuple[str, str]:
    """Its name, and where its parts are where it has been partitioned already."""
    name = str(told)
    if (is_generated(name) and name.lower().startswith(_WITH_LABELS)) or name in available_datasets():
        return name, ""
    parts = folder / name
    if (parts / MANIFEST).exists():
        return parts.name, str(parts)
    known = ", ".join(["sbm-20k", "planted-20k", *available_datasets()])
    raise ValueError(f"there is no dataset {name!r}; choose one such as {known}, or a folder of `gnnsys partition`")


def _model(told: Any) -> str:
    if told not in MODELS:
        raise ValueError(f"there is no model {told!r}; choose from: {', '.join(MODELS)}")
    return told


def _sampler(told: Any) -> tuple[str, tuple[int, ...]]:
    kind, _, numbers = str(told).rpartition(" ")
    kind = kind or "neighbor"
    if kind not in SAMPLERS:
        raise ValueError(f"there is no sampler {kind!r}; choose from: {', '.join(SAMPLERS)}")
    try:
        fanouts = tuple(int(number) for number in numbers.split(","))
    except ValueError:
        raise ValueError(f'a sampler is written "15,10" or "labor 15,10", got {told!r}') from None
    if any(number < 1 and number != -1 for number in fanouts):
        raise ValueError(f"fanouts must be >= 1, or -1 for all, got {told!r}")
    return kind, fanouts
