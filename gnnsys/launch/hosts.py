"""The description of a cluster: which hosts there are, how each is reached, and how many ranks it runs.

Three ways to write the same. A hosts file has one host per line, `NAME key=value ...`; `.json` and `.yaml` files have
`hosts`, a list of names or mappings, and may have `defaults` for all of them. Whatever is wrong is one line that says
what to write instead.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gnnsys.observe import parse_size, unique_keys

_NAME = re.compile(r"(?:::)?[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")  # a name, an IPv4 or an IPv6 address
_TOP_KEYS = ("hosts", "defaults")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host. `address` is what the others reach it by; `ssh` goes to it too.

    `slots` are the ranks that it runs: its GPUs where 0, and one without any. `gpus` and `memory` (bytes) are what it
    must have. `python` and `workdir` are paths on that host. `parts` are those that it serves; None: decided by what it
    has on its disk. One that `assists` runs no rank: it serves parts, or makes batches for ranks elsewhere.
    """

    name: str
    address: str = ""
    slots: int = 0
    gpus: int | None = None
    memory: int | None = None
    user: str | None = None
    port: int = 22
    python: str = sys.executable
    workdir: str = ""
    parts: tuple[int, ...] | None = None
    assists: bool = False

    def __post_init__(self) -> None:
        if not self.address:
            object.__setattr__(self, "address", self.name)
        if not self.workdir:
            object.__setattr__(self, "workdir", os.getcwd())
        for what, text in (("name", self.name), ("address", self.address), ("user", self.user or "x")):
            if not _NAME.fullmatch(text):
                raise ValueError(f"{what} {text!r} must be letters, digits, '.', '-', '_' or ':'")
        if self.slots < 0:
            raise ValueError(f"slots must be at least 1, got {self.slots}")
        if self.gpus is not None and self.gpus < 0:
            raise ValueError(f"gpus must be at least 0, got {self.gpus}")
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be from 1 to 65535, got {self.port}")
        if not os.path.isabs(self.workdir):
            raise ValueError(f"workdir must be an absolute path, got {self.workdir!r}")

    def num_ranks(self, num_gpus: int) -> int:
        """Ranks that it runs where `num_gpus` were found on it."""
        if self.assists:
            return 0
        return self.slots or (num_gpus if self.gpus is None else self.gpus) or 1


KEYS = tuple(field.name for field in fields(Host) if field.name != "assists")  # which a plan says


def read_hosts(path: str | os.PathLike[str]) -> list[Host]:
    """The hosts of a file, in its order. ValueError, naming file and line or host, for what is wrong."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no hosts file {file}: write one host name per line into it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the hosts file {file} cannot be read: {error}") from None
    if file.suffix in (".json", ".yaml", ".yml"):
        entries = _described(file, _load(file, text))
    else:
        entries = [(f"{file}, line {number}", entry) for number, entry in _lines(file, text)]
    hosts: list[Host] = []
    for where, entry in entries:
        host = _host(where, entry)
        for other in hosts:
            if other.name == host.name:
                raise ValueError(
                    f"{where}: host {host.name} is there twice: for several ranks on it write slots=N once"
                )
            if (other.address, other.port) == (host.address, host.port):
                raise ValueError(f"{where}: {host.name} has the address of {other.name}: give each host its own")
        hosts.append(host)
    if not hosts:
        raise ValueError(f"{file} names no host: write one host name per line, or hosts: [NAME, ...] in YAML")
    return hosts


def local_hosts(num_ranks: int) -> list[Host]:
    """This machine alone, with so many ranks."""
    if num_ranks < 1:
        raise ValueError(f"--local must be at least 1 rank, got {num_ranks}")
    return [Host(name="localhost", address="127.0.0.1", slots=num_ranks)]


def _lines(file: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        entry: dict[str, Any] = {"name": words[0]}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"{file}, line {number}: {word!r} is no key=value: write one host per line")
            if key in entry:
                raise ValueError(f"{file}, line {number}: {key} is there twice")
            entry[key] = value
        found.append((number, entry))
    return found


def _load(file: Path, text: str) -> Any:
    if file.suffix == ".json":
        try:
            return json.loads(text, object_pairs_hook=unique_keys)
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{file}: to read YAML, pip install pyyaml; or write the same as hosts.json") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from None


def _described(file: Path, value: Any) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(value, list):
        value = {"hosts": value}
    if not isinstance(value, dict) or not isinstance(value.get("hosts"), list):
        raise ValueError(f"{file} must have hosts, a list: hosts: [NAME, ...]")
    if unknown := [key for key in value if key not in _TOP_KEYS]:
        raise ValueError(f"{file} has an unknown key {unknown[0]!r}: there are {', '.join(_TOP_KEYS)}")
    defaults = value.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ValueError(f"{file}: defaults must be a mapping, such as {{user: me}}")
    if own := [key for key in ("name", "address") if key in defaults]:
        raise ValueError(f"{file}: {own[0]} is each host's own: write it there, not in defaults")
    found = []
    for number, entry in enumerate(value["hosts"], start=1):
        if isinstance(entry, str):
            entry = {"name": entry}
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{file}, host {number}: write a name, or a mapping with name, got {entry!r}")
        found.append((f"{file}, host {entry['name']}", {**defaults, **entry}))
    return found


def _host(where: str, entry: Mapping[str, Any]) -> Host:
    if unknown := [key for key in entry if key not in KEYS]:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}: there are {', '.join(KEYS)}")
    try:
        made = Host(name=entry["name"])
        values = {key: _value(key, value) for key, value in entry.items() if key != "name"}
        return replace(made, **{"address": made.name, **values})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _value(key: str, value: Any) -> Any:
    if key in ("slots", "gpus", "port"):
        if isinstance(value, bool) or not str(value).isdecimal() or (key == "slots" and int(value) == 0):
            raise ValueError(f"{key} must be a whole number{' of at least 1' if key == 'slots' else ''}, got {value!r}")
        return int(value)
    if key == "memory":
        return parse_size(value)
    if key == "parts":
        numbers = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        if not all(not isinstance(number, bool) and str(number).strip().isdecimal() for number in numbers):
            raise ValueError(f"parts must be whole numbers, such as 0,1, got {value!r}")
        return tuple(sorted({int(number) for number in numbers}))
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be text, got {value!r}")
    return value
