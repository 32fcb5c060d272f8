"""The file of a placement, plan.json: which host serves which parts, how many trainers and whose samplers it runs.

`gnnsys plan --out` writes it, `gnnsys simulate` asks what would be if, `gnnsys launch --plan` carries it out. Hosts
have names and never machine numbers: a rendezvous numbers machines as it likes. docs/placement.md describes the format.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnsys.graph import did_you_mean

FORMAT, VERSION = "gnnsys-placement-plan", 1
_KEYS = ("format", "version", "parts_digest", "profile", "hosts", "predicted", "runners_up", "cluster")
_HOST_KEYS = ("name", "parts", "trainers", "samplers")
_PREDICTED_KEYS = ("seconds_per_epoch", "binds", "shares", "bounds", "settings")
_CRC = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class PlacedSampler:
    """A process that makes batches for trainer number `trainer`, counted from 0, among those of host `host`."""

    host: str
    trainer: int


@dataclass(frozen=True, kw_only=True)
class PlacedHost:
    """What one host does. A trainer that no sampler of any host names samples for itself."""

    name: str
    parts: tuple[int, ...] = ()
    num_trainers: int = 0
    samplers: tuple[PlacedSampler, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlacementForecast:
    """What was predicted of a placement. `binds` is one line for people; `shares` is the part of the time that was
    spent on each link, core or trainer; `bounds` are seconds of an epoch that no schedule of this placement beats;
    `settings` say how it was simulated."""

    seconds_per_epoch: float
    binds: str
    shares: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """Another placement that was simulated, and what was said of it."""

    name: str
    hosts: tuple[PlacedHost, ...]
    seconds_per_epoch: float


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """A placement by names of hosts. `parts_digest` is the CRC-32 of the manifest of the parts it was made for,
    `profile_digest` and `profile_path` are those of the job profile, `cluster` is the cluster file's content."""

    hosts: tuple[PlacedHost, ...]
    parts_digest: int
    forecast: PlacementForecast
    profile_digest: str
    profile_path: str = ""
    runners_up: tuple[RunnerUp, ...] = ()
    cluster: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_hosts(self.hosts)

    @property
    def num_trainers(self) -> int:
        return sum(host.num_trainers for host in self.hosts)

    @property
    def num_samplers(self) -> int:
        return sum(len(host.samplers) for host in self.hosts)

    @property
    def num_parts(self) -> int:
        return sum(len(host.parts) for host in self.hosts)

    def host(self, name: str) -> PlacedHost:
        """The host of a name; ValueError names those that there are."""
        for host in self.hosts:
            if host.name == name:
                return host
        names = [host.name for host in self.hosts]
        raise ValueError(f"the plan has no host {name!r}{did_you_mean(name, names)} It has {', '.join(names)}")

    def host_of_part(self) -> tuple[str, ...]:
        """The name of the host that serves each part."""
        found = {part: host.name for host in self.hosts for part in host.parts}
        return tuple(found[part] for part in range(len(found)))

    def samplers_of(self, host: str, trainer: int) -> tuple[str, ...]:
        """The hosts of a trainer's samplers, in the order of the file; none: it samples for itself."""
        wanted = PlacedSampler(host=host, trainer=trainer)
        return tuple(placed.name for placed in self.hosts for sampler in placed.samplers if sampler == wanted)

    def check_parts(self, digest: int, where: str) -> None:
        """ValueError for parts (`digest`: the CRC-32 of their manifest) that the plan was not made for."""
        if digest != self.parts_digest:
            raise ValueError(f"the plan is for parts with the digest {self.parts_digest:08x}, {where} has {digest:08x}")

    def check_host_names(self, names: Sequence[str]) -> None:
        """ValueError unless every host of the plan is among `names`, those that a job has."""
        if missing := [host.name for host in self.hosts if host.name not in names]:
            raise ValueError(f"the plan has host {missing[0]}, this job has not: it has {', '.join(names)}")

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "parts_digest": f"{self.parts_digest:08x}",
            "profile": {"digest": self.profile_digest, "path": self.profile_path},
            "hosts": [_host_to_json(host) for host in self.hosts],
            "predicted": {
                "seconds_per_epoch": self.forecast.seconds_per_epoch,
                "binds": self.forecast.binds,
                "shares": dict(self.forecast.shares),
                "bounds": dict(self.forecast.bounds),
                "settings": dict(self.forecast.settings),
            },
            "runners_up": [
                {
                    "name": other.name,
                    "seconds_per_epoch": other.seconds_per_epoch,
                    "hosts": [_host_to_json(host) for host in other.hosts],
                }
                for other in self.runners_up
            ],
            "cluster": dict(self.cluster),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, values: Any) -> PlacementPlan:
        """ValueError, one line that says where, for what is wrong."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'it is no plan of a placement: "format" must be "{FORMAT}"')
        if values.get("version") != VERSION:
            raise ValueError(
                f"version {values.get('version')!r} is not understood: make the plan anew (version {VERSION})"
            )
        _refuse_unknown(values, _KEYS, "the plan")
        digest, profile, others = values.get("parts_digest"), values.get("profile"), values.get("runners_up", [])
        if not (isinstance(digest, str) and _CRC.fullmatch(digest)):
            raise ValueError(f'"parts_digest" must be eight hexadecimal digits, got {digest!r}')
        if not (isinstance(profile, dict) and isinstance(profile.get("digest"), str)):
            raise ValueError(f'"profile" must be {{"digest": ..., "path": ...}}, got {profile!r}')
        if not isinstance(others, list):
            raise ValueError(f'"runners_up" must be a list, got {others!r}')
        return cls(
            hosts=_hosts(values.get("hosts")),
            parts_digest=int(digest, 16),
            forecast=_forecast(values.get("predicted")),
            profile_digest=profile["digest"],
            profile_path=str(profile.get("path", "")),
            runners_up=tuple(_runner_up(number, other) for number, other in enumerate(others, start=1)),
            cluster=_mapping(values.get("cluster", {}), "cluster"),
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> PlacementPlan:
        """The plan of a file. ValueError, one line that names the file, for what is wrong."""
        file = Path(path)
        try:
            values = json.loads(file.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise ValueError(
                f"there is no plan {file}: make one with gnnsys plan PARTS --cluster FILE --profile FILE --out {file}"
            ) from None
        except OSError as error:
            raise ValueError(f"the plan {file} cannot be read: {error.strerror}") from None
        except ValueError as error:  # bytes that are no text as well
            raise ValueError(f"{file} is no JSON: {error}") from None
        try:
            return cls.from_json(values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


def is_placement_plan(values: Any) -> bool:
    """Whether a decoded JSON file says that it is a plan of a placement, right or wrong."""
    return isinstance(values, dict) and values.get("format") == FORMAT


def check_hosts(hosts: Sequence[PlacedHost]) -> None:
    """ValueError unless names differ, every part is served by one host, and every sampler's trainer is there."""
    if not hosts:
        raise ValueError("a plan needs a host, at least")
    by_name: dict[str, PlacedHost] = {}
    for host in hosts:
        if host.name in by_name:
            raise ValueError(f"host {host.name} is there twice")
        by_name[host.name] = host
    by_part: dict[int, str] = {}
    for host in hosts:
        for part in host.parts:
            if part in by_part:
                raise ValueError(f"part {part} is served by {by_part[part]} and by {host.name}: give it to one of them")
            by_part[part] = host.name
    if missing := [part for part in range(len(by_part)) if part not in by_part]:
        raise ValueError(f"no host serves part {missing[0]}, one serves part {max(by_part)}")
    if not any(host.num_trainers for host in hosts):
        raise ValueError("no host of the plan has a trainer")
    for host in hosts:
        for sampler in host.samplers:
            where = f"host {host.name}: a sampler is for trainer {sampler.trainer} of {sampler.host}"
            if sampler.host not in by_name:
                raise ValueError(f"{where}, which is no host of the plan{did_you_mean(sampler.host, by_name)}")
            if sampler.trainer >= by_name[sampler.host].num_trainers:
                raise ValueError(f"{where}, which has {by_name[sampler.host].num_trainers}")


def _host_to_json(host: PlacedHost) -> dict[str, Any]:
    samplers = [{"host": sampler.host, "trainer": sampler.trainer} for sampler in host.samplers]
    return {"name": host.name, "parts": list(host.parts), "trainers": host.num_trainers, "samplers": samplers}


def _hosts(entries: Any) -> tuple[PlacedHost, ...]:
    if not isinstance(entries, list) or not entries:
        raise ValueError('"hosts" must be a list of at least one {"name": ..., "parts": ..., "trainers": ...}')
    return tuple(_host(number, entry) for number, entry in enumerate(entries, start=1))


def _host(number: int, entry: Any) -> PlacedHost:
    if not isinstance(entry, dict) or not (isinstance(entry.get("name"), str) and entry["name"]):
        raise ValueError(f'host {number} must be {{"name": ..., "parts": ..., "trainers": ...}}, got {entry!r}')
    name = entry["name"]
    _refuse_unknown(entry, _HOST_KEYS, f"host {name}")
    parts, trainers, samplers = entry.get("parts", []), entry.get("trainers", 0), entry.get("samplers", [])
    if not (isinstance(parts, list) and all(map(_is_count, parts))):
        raise ValueError(f'host {name}: "parts" must be a list of whole numbers, got {parts!r}')
    if not _is_count(trainers):
        raise ValueError(f'host {name}: "trainers" must be a whole number, got {trainers!r}')
    if not isinstance(samplers, list):
        raise ValueError(f'host {name}: "samplers" must be a list, got {samplers!r}')
    placed = []
    for sampler in samplers:
        if not (
            isinstance(sampler, dict)
            and sampler.keys() == {"host", "trainer"}
            and isinstance(sampler["host"], str)
            and _is_count(sampler["trainer"])
        ):
            raise ValueError(f'host {name}: a sampler must be {{"host": ..., "trainer": N}}, got {sampler!r}')
        placed.append(PlacedSampler(host=sampler["host"], trainer=sampler["trainer"]))
    return PlacedHost(name=name, parts=tuple(parts), num_trainers=trainers, samplers=tuple(placed))


def _forecast(values: Any) -> PlacementForecast:
    if not isinstance(values, dict):
        raise ValueError(f'"predicted" must be {{"seconds_per_epoch": ..., "binds": ...}}, got {values!r}')
    _refuse_unknown(values, _PREDICTED_KEYS, '"predicted"')
    binds = values.get("binds", "")
    if not isinstance(binds, str):
        raise ValueError(f'"binds" must be text, got {binds!r}')
    return PlacementForecast(
        seconds_per_epoch=_seconds(values.get("seconds_per_epoch"), '"predicted"'),
        binds=binds,
        shares=_numbers(values.get("shares", {}), "shares"),
        bounds=_numbers(values.get("bounds", {}), "bounds"),
        settings=_mapping(values.get("settings", {}), "settings"),
    )


def _runner_up(number: int, values: Any) -> RunnerUp:
    if not isinstance(values, dict) or not isinstance(values.get("name"), str):
        raise ValueError(f'runner-up {number} must be {{"name": ..., "hosts": ...}}, got {values!r}')
    hosts = _hosts(values.get("hosts"))
    check_hosts(hosts)
    seconds = _seconds(values.get("seconds_per_epoch"), f"runner-up {number}")
    return RunnerUp(name=values["name"], hosts=hosts, seconds_per_epoch=seconds)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f'{where}: "seconds_per_epoch" must be a number of 0 or more, got {value!r}')
    return float(value)


def _numbers(values: Any, name: str) -> dict[str, float]:
    found = _mapping(values, name)
    if wrong := [key for key, value in found.items() if isinstance(value, bool) or not isinstance(value, int | float)]:
        raise ValueError(f'"{name}" has no number for {wrong[0]!r}, but {found[wrong[0]]!r}')
    return {key: float(value) for key, value in found.items()}


def _mapping(values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f'"{name}" must be an object, got {values!r}')
    return values


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{where} has an unknown key {unknown[0]!r}{did_you_mean(unknown[0], known)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
