"""A cluster: hosts by name with what each has, and the uplinks that several of them share.

    cluster = Cluster.from_file("cluster.yaml")
    cluster.with_settings(["h3.rate=10gbit"])["h3"].rate_in     # bytes per second

Simulator and placement read it; `cluster_file` says how it is written. Rates are bytes per second, memory is bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gnnsys.graph import did_you_mean, in_words
from gnnsys.observe import format_rate
from gnnsys.planning.cluster.cluster_file import (
    checked_mapping,
    host_entries,
    host_values,
    load_file,
    read_value,
    split_setting,
    uplink_values,
)

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class ClusterHost:
    """One machine.

    `cores` may be a fraction: a quota. `speed`: how fast one of its cores is; the profile's machine has 1. `gpus`:
    how many of each kind. `rate_in` and `rate_out`: of its link, in bytes per second. `parts`: those that lie on its
    disk; None: all of them, or wherever the planner likes. `uplink`: the one that it shares. `queue`: seconds that a
    packet waits in front of its link, in either direction, where the buffer there is full. `launch`: what
    `gnnsys launch` alone reads (address, user, ...), kept as it is written.
    """

    name: str
    cores: float
    memory: int | None = None
    gpus: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    rate_in: float = math.inf
    rate_out: float = math.inf
    speed: float = 1.0
    parts: tuple[int, ...] | None = None
    uplink: str | None = None
    queue: float = 0.0
    launch: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r} must be letters, digits, '.', '-', '_' or ':'")
        for what in ("cores", "speed", "rate_in", "rate_out"):
            if not getattr(self, what) > 0:
                raise ValueError(f"{what} must be more than 0, got {getattr(self, what)!r}")
        if not math.isfinite(self.cores) or not math.isfinite(self.speed):
            raise ValueError(f"cores and speed must be finite, got {self.cores!r} and {self.speed!r}")
        if not 0 <= self.queue < math.inf:
            raise ValueError(f"queue must be seconds, 0 or more, got {self.queue!r}")
        if self.memory is not None and self.memory <= 0:
            raise ValueError(f"memory must be more than 0, got {self.memory}: leave it away where it does not bind")
        object.__setattr__(self, "gpus", MappingProxyType({kind: n for kind, n in self.gpus.items() if n}))
        object.__setattr__(self, "launch", MappingProxyType(dict(self.launch)))

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())

    def to_json(self) -> dict[str, Any]:
        """As in a cluster file; what is as it would be without being written is left out."""
        told: dict[str, Any] = {"name": self.name, "cores": self.cores}
        if self.memory is not None:
            told["memory"] = self.memory
        if self.gpus:
            told["gpus"] = dict(self.gpus)
        if self.rate_in == self.rate_out:
            told["rate"] = format_rate(self.rate_in)
        else:
            told |= {"rate_in": format_rate(self.rate_in), "rate_out": format_rate(self.rate_out)}
        if self.speed != 1.0:
            told["speed"] = self.speed
        if self.parts is not None:
            told["parts"] = list(self.parts)
        if self.uplink is not None:
            told["uplink"] = self.uplink
        if self.queue:
            told["queue"] = self.queue
        return told | dict(self.launch)


@dataclass(frozen=True, kw_only=True)
class ClusterUplink:
    """A link that several hosts share on their way to the others: a rack's, a site's. Bytes per second."""

    name: str
    rate_in: float
    rate_out: float

    def to_json(self) -> dict[str, Any]:
        if self.rate_in == self.rate_out:
            return {"rate": format_rate(self.rate_in)}
        return {"rate_in": format_rate(self.rate_in), "rate_out": format_rate(self.rate_out)}


@dataclass(frozen=True)
class Cluster:
    """Hosts in the order of the file, which numbers them for planners; plans name them, and never number them.

    `gpu_speeds`: how fast a GPU of a kind is; the kind that the profile was timed on has 1, as has every one that is
    not named.
    """

    hosts: tuple[ClusterHost, ...]
    uplinks: Mapping[str, ClusterUplink] = field(default_factory=lambda: MappingProxyType({}))
    gpu_speeds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        object.__setattr__(self, "uplinks", MappingProxyType(dict(self.uplinks)))
        object.__setattr__(self, "gpu_speeds", MappingProxyType(dict(self.gpu_speeds)))
        if not self.hosts:
            raise ValueError("a cluster must have hosts: hosts: [{name: h1, cores: 16, rate: 10gbit}]")
        names = [host.name for host in self.hosts]
        for number, host in enumerate(self.hosts):
            if host.name in names[:number]:
                raise ValueError(f"host {host.name} is there twice: give each host its own name")
            if host.uplink is not None and host.uplink not in self.uplinks:
                near = did_you_mean(host.uplink, self.uplinks) or f": there are {in_words(self.uplinks)}"
                raise ValueError(f"host {host.name}: there is no uplink {host.uplink!r}{near}")
        for kind, speed in self.gpu_speeds.items():
            if not 0 < speed < math.inf:
                raise ValueError(f"the speed of GPU {kind} must be more than 0, got {speed!r}")

    # --- looking

    def __len__(self) -> int:
        return len(self.hosts)

    def __iter__(self) -> Iterator[ClusterHost]:
        return iter(self.hosts)

    def __getitem__(self, name: str) -> ClusterHost:
        """The host of a name; ValueError, with the nearest name, where there is none."""
        return self.hosts[self.index(name)]

    def index(self, name: str) -> int:
        for number, host in enumerate(self.hosts):
            if host.name == name:
                return number
        near = did_you_mean(name, self.names)
        raise ValueError(f"there is no host {name!r} in the cluster{near or f': it has {in_words(self.names)}'}")

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def gpu_speed(self, kind: str) -> float:
        return self.gpu_speeds.get(kind, 1.0)

    def gpus_without_speed(self, computes_on: str) -> list[str]:
        """Kinds of GPUs that count as fast as `computes_on`, the one a profile was timed on, for nobody says more.

        Where a profile names no kind ("cuda") and all hosts have the same, there is nothing to say.
        """
        kinds = {kind for host in self.hosts for kind in host.gpus}
        if computes_on == "cpu" or (computes_on == "cuda" and len(kinds) < 2):
            return []
        return sorted(kinds - self.gpu_speeds.keys() - {computes_on})

    def check_parts(self, num_parts: int) -> None:
        """ValueError where a host has a part that is none of `num_parts`, or a part lies on no disk at all."""
        for host in self.hosts:
            if beyond := [part for part in host.parts or () if part >= num_parts]:
                raise ValueError(f"host {host.name} has part {beyond[0]}, and there are {num_parts}, from 0")
        if all(host.parts is not None for host in self.hosts):
            there = {part for host in self.hosts for part in host.parts or ()}
            if lacking := [part for part in range(num_parts) if part not in there]:
                raise ValueError(f"part {lacking[0]} is on no host's disk: add it to `parts` of one, or push it there")

    # --- changing

    def with_settings(self, settings: Sequence[str]) -> Cluster:
        """Another cluster, with `HOST.KEY=VALUE`, `all.KEY=VALUE`, `UPLINK.rate=VALUE` or `gpu.KIND=SPEED` applied in
        their order. A value is written as in the file.

        >>> made = Cluster((ClusterHost(name="h1", cores=4),))
        >>> made.with_settings(["h1.rate=8mbit"])["h1"].rate_in
        1000000.0
        """
        hosts, uplinks, speeds = list(self.hosts), dict(self.uplinks), dict(self.gpu_speeds)
        for setting in settings:
            name, key, value = split_setting(setting)
            try:
                if name == "gpu":
                    speeds[key] = float(read_value("speed", value))
                elif name in uplinks:
                    uplinks[name] = replace(uplinks[name], **uplink_values({key: value}))
                else:
                    changes = host_values({key: value})
                    chosen = range(len(hosts)) if name == "all" else [self.index(name)]
                    for number in chosen:
                        hosts[number] = replace(hosts[number], **changes)
            except ValueError as error:
                raise ValueError(f"{setting}: {error}") from None
        kinds = sorted({kind for host in hosts for kind in host.gpus})
        for kind in speeds.keys() - self.gpu_speeds.keys() - set(kinds):
            raise ValueError(
                f"gpu.{kind}: no host has such a GPU: {f'there are {in_words(kinds)}' if kinds else 'there are none'}"
            )
        return Cluster(tuple(hosts), uplinks, speeds)

    # --- files

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """From `.json`, `.yaml` or `.yml`. ValueError of one line that names file, host and key."""
        value = load_file(path)
        try:
            return cls.from_json(value)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def from_json(cls, value: Any) -> Cluster:
        """From plain values, as `to_json` gives them or a file has them."""
        if isinstance(value, list):
            value = {"hosts": value}
        if not isinstance(value, Mapping):
            raise ValueError("a cluster is a mapping with hosts: hosts: [{name: h1, cores: 16, rate: 10gbit}]")
        keys = ("hosts", "defaults", "uplinks", "gpu_speeds")
        for key in value:
            if key not in keys:
                raise ValueError(f"unknown key {key!r}{did_you_mean(key, keys) or f': there are {in_words(keys)}'}")
        defaults = checked_mapping(value.get("defaults"), "defaults", "{cores: 16, rate: 10gbit}")
        if "name" in defaults:
            raise ValueError("name is each host's own: write it there, not in defaults")
        uplinks = {}
        for name, told in checked_mapping(value.get("uplinks"), "uplinks", "{rack1: 40gbit}").items():
            try:
                rates = uplink_values(told if isinstance(told, Mapping) else {"rate": told})
                uplinks[str(name)] = ClusterUplink(name=str(name), **rates)
            except TypeError:
                raise ValueError(f"uplink {name}: write its rate, such as {name}: 40gbit") from None
            except ValueError as error:
                raise ValueError(f"uplink {name}: {error}") from None
        speeds = checked_mapping(value.get("gpu_speeds"), "gpu_speeds", "{a100: 1.0, t4: 0.3}")
        hosts = [_host(name, {**defaults, **told}) for name, told in host_entries(value.get("hosts"))]
        return cls(tuple(hosts), uplinks, {str(kind): read_value("speed", told) for kind, told in speeds.items()})

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"hosts": [host.to_json() for host in self.hosts]}
        if self.uplinks:
            told["uplinks"] = {name: uplink.to_json() for name, uplink in self.uplinks.items()}
        if self.gpu_speeds:
            told["gpu_speeds"] = dict(self.gpu_speeds)
        return told

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, which is YAML too."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def _host(name: str, told: Mapping[str, Any]) -> ClusterHost:
    try:
        values = host_values(told)
        if "cores" not in values:
            raise ValueError("cores are missing: say how many it has, such as cores: 16")
        if "rate_in" not in values or "rate_out" not in values:
            raise ValueError("rate is missing: say how fast its link is, such as rate: 10gbit, or rate: unlimited")
        return ClusterHost(name=name, **values)
    except ValueError as error:
        raise ValueError(f"host {name}: {error}") from None
