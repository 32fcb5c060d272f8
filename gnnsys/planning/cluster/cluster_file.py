"""How a cluster file is written: its keys, and what each value may be. JSON, or YAML where PyYAML is there.

    defaults: {cores: 16, memory: 64G, rate: 10gbit}
    hosts:
      - {name: h1, gpus: {a100: 4}, parts: [0, 1]}
      - {name: h2, rate_in: 10gbit, rate_out: 1gbit, uplink: rack2}
    uplinks: {rack2: 40gbit}
    gpu_speeds: {a100: 1.0}

Keys that only `gnnsys launch` reads are allowed, so that one file can serve both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gnnsys.graph import did_you_mean, in_words
from gnnsys.observe import bytes_per_second, parse_size

HOST_KEYS = ("cores", "memory", "gpus", "rate", "rate_in", "rate_out", "speed", "parts", "uplink", "queue")
LAUNCH_KEYS = ("address", "slots", "user", "port", "python", "workdir")  # of `gnnsys.launch`, kept as they are
UPLINK_KEYS = ("rate", "rate_in", "rate_out")
LEAST_RATE = 1000.0  # bytes per second; a number below it lacks a unit
_ANY_GPU = "gpu"  # the kind of GPUs that are only counted


def load_file(path: str | os.PathLike[str]) -> Any:
    """The values of a file. ValueError, naming it, where it cannot be read."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(
            f"there is no cluster file {file}: write one with the hosts' names, cores and rates (docs/profile.md)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the cluster file {file} cannot be read: {error}") from None
    if file.suffix in (".yaml", ".yml"):
        return _load_yaml(file, text)
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None


def _load_yaml(file: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{file}: to read YAML, pip install pyyaml; or write the same as JSON") from None

    class _UniqueKeys(yaml.SafeLoader):
        """A key that is there twice is a mistake, not the last of both."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            return _unique(
                [(str(self.construct_object(key)), self.construct_object(told, True)) for key, told in node.value]
            )

    try:
        return yaml.load(text, _UniqueKeys)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def host_entries(told: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Hosts as a list of mappings with a name, or as a mapping by name."""
    if isinstance(told, Mapping):
        for name, entry in told.items():
            yield str(name), checked_mapping(entry, f"host {name}", "{cores: 16, rate: 10gbit}")
        return
    if not isinstance(told, list):
        raise ValueError("hosts must be a list or a mapping by name: hosts: [{name: h1, cores: 16, rate: 10gbit}]")
    for number, entry in enumerate(told, start=1):
        if isinstance(entry, str):
            yield entry, {}
        elif isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
            yield entry["name"], {key: value for key, value in entry.items() if key != "name"}
        else:
            raise ValueError(f"host {number}: write a name, or a mapping with name, got {entry!r}")


def checked_mapping(value: Any, what: str, example: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a mapping, such as {example}, got {value!r}")
    return value


def host_values(told: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `ClusterHost` from keys of the file. `rate` is both directions; `rate_in` and `rate_out` win."""
    values: dict[str, Any] = {}
    launch: dict[str, Any] = {}
    for key, value in sorted(told.items(), key=lambda pair: pair[0] != "rate"):  # rate first
        if key in LAUNCH_KEYS:
            launch[key] = value
        elif key not in HOST_KEYS:
            known = (*HOST_KEYS, *LAUNCH_KEYS)
            near = did_you_mean(key, known) or f": there are {in_words(HOST_KEYS, most=len(HOST_KEYS))}"
            raise ValueError(f"unknown key {key!r}{near}")
        elif key == "rate":
            values["rate_in"] = values["rate_out"] = read_rate(key, value)
        else:
            values[key] = read_value(key, value)
    return values | ({"launch": launch} if launch else {})


def uplink_values(told: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, float] = {}
    for key, value in sorted(told.items(), key=lambda pair: pair[0] != "rate"):
        if key not in UPLINK_KEYS:
            raise ValueError(
                f"unknown key {key!r}{did_you_mean(key, UPLINK_KEYS) or f': there are {in_words(UPLINK_KEYS)}'}"
            )
        for name in ("rate_in", "rate_out") if key == "rate" else (key,):
            values[name] = read_rate(key, value)
    return values


def read_rate(key: str, value: Any) -> float:
    try:
        rate = bytes_per_second(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if rate < LEAST_RATE and (not isinstance(value, str) or value.strip()[-1].isdigit()):
        raise ValueError(f"{key}: {value} is {value} bytes per second: write its unit, such as 10gbit or 30MB/s")
    return rate


def read_value(key: str, value: Any) -> Any:
    """The value of one key of a host, from the file or from the command line, where all is text."""
    if key in ("rate_in", "rate_out"):
        return read_rate(key, value)
    if key in ("cores", "speed"):
        try:
            number = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            number = float("nan")
        if not 0 < number < float("inf"):
            raise ValueError(f"{key} must be a number of more than 0, such as 16 or 0.45, got {value!r}")
        return number
    if key == "queue":
        try:
            seconds = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            seconds = float("nan")
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"queue must be seconds, such as 0.05, got {value!r}")
        return seconds
    if key == "memory":
        return _read_memory(value)
    if key == "gpus":
        return _read_gpus(value)
    if key == "parts":
        return _read_parts(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be text, got {value!r}")
    return value


def _read_memory(value: Any) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"a size must look like 4G, 512M or 1000000, got {value!r}")
        size = parse_size(value)
    except ValueError as error:
        raise ValueError(f"memory: {error}") from None
    if size <= 0:
        raise ValueError(f"memory must be more than 0, got {value!r}")
    return size


def _read_gpus(value: Any) -> dict[str, int]:
    """4, {a100: 4}, or on the command line 4, a100:4, a100:4,t4:2."""
    told: Any = value
    if isinstance(value, str):
        told = {}
        for word in value.split(","):
            kind, _, count = word.rpartition(":")
            told[kind or _ANY_GPU] = count
    elif isinstance(value, int) and not isinstance(value, bool):
        told = {_ANY_GPU: value}
    counts: Mapping[Any, Any] = told if isinstance(told, Mapping) else {None: None}
    if not all(isinstance(count, int | str) and str(count).isdecimal() for count in counts.values()) or any(
        isinstance(count, bool) for count in counts.values()
    ):
        raise ValueError(f"gpus must be how many of each kind, such as {{a100: 4}}, got {value!r}")
    return {str(kind): int(count) for kind, count in counts.items() if int(count)}


def _read_parts(value: Any) -> tuple[int, ...]:
    numbers = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    if not all(not isinstance(number, bool) and str(number).strip().isdecimal() for number in numbers):
        raise ValueError(f"parts must be whole numbers from 0, such as [0, 1], got {value!r}")
    found = [int(number) for number in numbers]
    for number in found:
        if found.count(number) > 1:
            raise ValueError(f"part {number} is there twice")
    return tuple(sorted(found))


def split_setting(setting: str) -> tuple[str, str, str]:
    """ "h3.rate=10gbit" -> ("h3", "rate", "10gbit"). A host's name may have dots; a key has none."""
    target, equals, value = setting.partition("=")
    name, dot, key = target.strip().rpartition(".")
    if not (equals and dot and name and key and value.strip()):
        raise ValueError(f"a setting is HOST.KEY=VALUE, such as h3.rate=10gbit, got {setting!r}")
    return name, key, value.strip()
