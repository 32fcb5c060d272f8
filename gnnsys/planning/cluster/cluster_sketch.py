"""A cluster file that lacks what nobody has measured yet: `gnnsys plan --measure` fills it in.

    sketch = ClusterSketch.from_file("cluster.yaml")            # hosts: [h1, h2]
    sketch.missing("h1")                                        # cores, memory, gpus, rate_in, rate_out, speed
    sketch.filled({"h1": {"cores": 4, "rate_in": 31.25e6}})     # the file's values, and these where it had none

What a person has written stays, unless it is to be measured `again`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnsys.observe import format_rate
from gnnsys.planning.cluster.cluster import Cluster
from gnnsys.planning.cluster.cluster_file import LAUNCH_KEYS, checked_mapping, host_entries, host_values, load_file

COUNTED = ("cores", "memory", "gpus")  # what a host says of itself
MEASURED = ("rate_in", "rate_out", "speed")  # what takes a measurement
_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class ClusterSketch:
    """`value`: the file's, as it is written. `again`: rates and speeds are missing even where they are written."""

    value: Mapping[str, Any]
    again: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.value, list):
            object.__setattr__(self, "value", {"hosts": self.value})
        checked_mapping(self.value, "a cluster file", "hosts: [h1, h2]")
        anything = {"cores": 1, "rate_in": math.inf, "rate_out": math.inf}
        self._cluster(dict.fromkeys(self._entries(), anything))  # what is written is right, whatever is measured

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, again: bool = False) -> ClusterSketch:
        """ValueError of one line that names file, host and key."""
        value = load_file(path)
        try:
            return cls(value, again)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    @property
    def names(self) -> list[str]:
        return list(self._entries())

    def missing(self, name: str) -> list[str]:
        """Keys of a host that are to be filled in."""
        try:
            told = host_values(self._told(name))
        except ValueError as error:
            raise ValueError(f"host {name}: {error}") from None
        return [key for key in (*COUNTED, *MEASURED) if key not in told or (self.again and key in MEASURED)]

    def launch(self, name: str) -> dict[str, Any]:
        """What `gnnsys launch` reads of a host: address, user, ..."""
        return {key: value for key, value in self._told(name).items() if key in LAUNCH_KEYS}

    def filled(self, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The file's values with those of `measured`, by host and key, where they are missing. Rates are bytes per
        second. ValueError where a host still lacks what a cluster must say."""
        self._cluster(measured)
        return self._filled(measured)

    def save(self, path: str | os.PathLike[str], measured: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes `filled` in place of the file, at once: as YAML where its name says so, else as JSON."""
        file, value = Path(path), self.filled(measured)
        if file.suffix in _YAML:
            import yaml

            text = yaml.safe_dump(value, sort_keys=False, width=120, default_flow_style=None)
        else:
            text = json.dumps(value, indent=1) + "\n"
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, file)
        finally:
            unfinished.unlink(missing_ok=True)

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for name, told in host_entries(self.value.get("hosts")):
            if name in found:
                raise ValueError(f"host {name} is there twice: give each host its own name")
            found[name] = told
        if not found:
            raise ValueError("a cluster must have hosts: hosts: [h1, h2]")
        return found

    def _told(self, name: str) -> dict[str, Any]:
        defaults = checked_mapping(self.value.get("defaults"), "defaults", "{cores: 16, rate: 10gbit}")
        return {**defaults, **self._entries()[name]}

    def _filled(self, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        hosts = []
        for name, told in self._entries().items():
            found = measured.get(name, {})
            added = {key: found[key] for key in self.missing(name) if found.get(key)}
            kept = dict(told)
            if "rate" in kept and {"rate_in", "rate_out"} <= added.keys():
                del kept["rate"]
            hosts.append({"name": name, **kept, **{key: as_written(key, value) for key, value in added.items()}})
        return {**self.value, "hosts": hosts}

    def _cluster(self, measured: Mapping[str, Mapping[str, Any]]) -> Cluster:
        return Cluster.from_json(self._filled(measured))


def as_written(key: str, value: Any) -> Any:
    """A measured value as a file has it: three digits, which is more than a measurement is good for.

    >>> as_written("rate_in", 31_212_345.0), as_written("speed", 0.98765), as_written("cores", 2.0)
    ('250mbit', 0.988, 2)
    """
    if key in ("rate_in", "rate_out"):
        return format_rate(float(f"{8 * value:.3g}") / 8)
    if key == "memory":
        return f"{value >> 20}M"
    number = float(f"{value:.3g}")
    return int(number) if number.is_integer() else number
