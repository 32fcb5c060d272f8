"""Graphs by name: real ones from a folder of `.npz` files and saved graphs, made-up ones from a specification.

The folder is $GNNSYS_DATA, or `shared/data` beside the checkout. A specification is a generator and its number of
nodes, such as "sbm-100k", "rmat-1m", "typed-50k" or "planted-20k", with arguments after a colon:
"sbm-20k:num_classes=4,seed=1".
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

from gnnsys.graph.files import PICKLED, load
from gnnsys.graph.generate import planted_noise, rmat, sbm, typed_graph
from gnnsys.graph.graph import Graph
from gnnsys.graph.tables import FILE_ENDINGS

_GENERATORS: dict[str, Callable[..., Graph]] = {
    "planted": planted_noise,
    "rmat": rmat,
    "sbm": sbm,
    "typed": typed_graph,
}
_FILE_ENDINGS = (*FILE_ENDINGS, *PICKLED)  # of what is a file that is not there, not a dataset
_SCALE = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
_SPEC = re.compile(r"(planted|rmat|sbm|typed)-(\d+(?:\.\d+)?)([kmb]?)(?::(.*))?", re.IGNORECASE)
_RMAT_DEGREE = 20


def dataset(name: str, *, row_normalize: bool = False) -> Graph:
    """The graph called `name`; `row_normalize` makes each row of `x` sum to one, the usual protocol for word counts.

    >>> dataset("sbm-1k:num_classes=4").num_nodes()
    1000
    """
    graph = _generated(name) or load(find_dataset(name))
    if row_normalize:
        for node_type in graph.node_types:
            if "x" in graph.node_data[node_type]:
                x = graph.node_data[node_type]["x"]
                total = x.sum(1, keepdim=True)
                graph.set_node_data("x", x / total.masked_fill_(total == 0, 1), node_type)
    return graph


def folder() -> Path | None:
    """Where real graphs are looked for: $GNNSYS_DATA, then `shared/data` beside the checkout; None without either."""
    if given := os.environ.get("GNNSYS_DATA"):
        return Path(given)
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return beside if beside.is_dir() else None


def available_datasets() -> list[str]:
    """Names of the real graphs that are there."""
    place = folder()
    if place is None or not place.is_dir():
        return []
    graphs = [path for path in place.iterdir() if path.suffix == ".npz" or (path / "manifest.json").is_file()]
    return sorted(path.stem if path.is_file() else path.name for path in graphs)


def find_dataset(name: str) -> Path:
    """The file or directory of a real graph; ValueError that says what there is and where it was looked for."""
    place = folder()
    if place is not None and Path(name).name == name:
        for path in (place / f"{name}.npz", place / name):
            if path.exists():
                return path
    if Path(name).name != name or Path(name).suffix.lower() in _FILE_ENDINGS:
        inside = "" if Path(name).is_absolute() else f" in {os.getcwd()}"
        raise ValueError(f"there is no file {name}{inside}: give the path of one, or a dataset's name")
    where = f"in {str(place)!r}" if place else "and GNNSYS_DATA is not set"
    raise ValueError(
        f"dataset {name!r} is not there ({where}: {', '.join(available_datasets()) or 'nothing'}); "
        'names like "sbm-100k", "rmat-1m" and "typed-50k" are generated'
    )


def is_generated(name: str) -> bool:
    """Whether the name is a specification, such as "sbm-100k"."""
    return _SPEC.fullmatch(name) is not None


def _generated(name: str) -> Graph | None:
    match = _SPEC.fullmatch(name)
    if match is None:
        return None
    kind, count = match[1].lower(), round(float(match[2]) * _SCALE[match[3].lower()])
    make = _GENERATORS[kind]
    arguments = _arguments(make, match[4] or "", name)
    if kind == "rmat":
        arguments.setdefault("num_edges", count * _RMAT_DEGREE)
    return make(count, **arguments)


def _arguments(make: Callable[..., Graph], text: str, name: str) -> dict[str, int | float]:
    """ "num_classes=4,seed=1" as keyword arguments of a generator, numbers all of them."""
    allowed = list(inspect.signature(make).parameters)[1:]
    arguments: dict[str, int | float] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in allowed:
            raise ValueError(f"dataset {name!r}: {key!r} is not an argument of {make.__name__}, which has {allowed}")
        try:
            arguments[key] = float(value) if re.search(r"[.e]", value, re.IGNORECASE) else int(value)
        except ValueError:
            raise ValueError(f"dataset {name!r}: {key} must be a number, got {value!r}") from None
    return arguments
