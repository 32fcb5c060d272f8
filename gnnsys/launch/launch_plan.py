"""A plan of a job: which hosts take part, how many ranks each runs, which parts each serves, what all ranks are given.

`gnnsys launch --plan FILE` reads it, a planner writes it (`LaunchPlan.text`). JSON with a version; whatever is wrong in
it is one line that says where. docs/launch.md describes the format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gnnsys.launch.hosts import Host, unique_keys
from gnnsys.launch.part_files import read_listing

FORMAT, VERSION = "gnnsys-launch-plan", 1
_KEYS = ("format", "version", "hosts", "parts_digest", "env", "arguments")
_HOST_KEYS = ("name", "ranks", "parts")
_DIGEST = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class PlannedHost:
    """A host that takes part. `parts` are those that it serves; None: as its description and its disk say."""

    name: str
    num_ranks: int
    parts: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Ranks are numbered in the order of `hosts`. `parts_digest` is that of the manifest of the parts it was made for
    (`PartsListing.digest`). `env` and `arguments` are for all ranks."""

    hosts: tuple[PlannedHost, ...]
    parts_digest: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return sum(host.num_ranks for host in self.hosts)

    def choose(self, described: Sequence[Host], where: str) -> list[Host]:
        """The hosts of a description that take part, as the plan has them. `where`: what the description is called."""
        by_name = {host.name: host for host in described}
        if missing := [host.name for host in self.hosts if host.name not in by_name]:
            raise ValueError(f"the plan has host {missing[0]}, {where} has not: it has {', '.join(by_name)}")
        chosen = [replace(by_name[host.name], slots=host.num_ranks) for host in self.hosts]
        return [
            host if planned.parts is None else replace(host, parts=planned.parts)
            for host, planned in zip(chosen, self.hosts, strict=True)
        ]

    def choose_here(self, here: Host) -> list[Host]:
        """This machine in the place of the plan's only host."""
        if len(self.hosts) != 1:
            raise ValueError(f"the plan has {len(self.hosts)} hosts, --local has one: use --hosts FILE")
        if here.slots != self.num_ranks:
            raise ValueError(f"the plan has {self.num_ranks} ranks: write --local {self.num_ranks}, got {here.slots}")
        return [replace(here, parts=self.hosts[0].parts)]

    def check_parts(self, path: str | os.PathLike[str]) -> None:
        """ValueError for a directory of other parts than those that the plan was made for."""
        found = read_listing(Path(path)).digest
        if self.parts_digest not in (None, found):
            raise ValueError(f"the plan is for parts with the digest {self.parts_digest:08x}, {path} has {found:08x}")

    def text(self) -> str:
        """What `read_plan` reads."""
        hosts: list[dict[str, Any]] = []
        for host in self.hosts:
            own = {} if host.parts is None else {"parts": list(host.parts)}
            hosts.append({"name": host.name, "ranks": host.num_ranks, **own})
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION, "hosts": hosts}
        if self.parts_digest is not None:
            values["parts_digest"] = f"{self.parts_digest:08x}"
        return json.dumps({**values, "env": dict(self.env), "arguments": list(self.arguments)}, indent=1) + "\n"


def read_plan(path: str | os.PathLike[str]) -> LaunchPlan:
    """The plan of a file. ValueError, one line that names the file, for what is wrong."""
    file = Path(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ValueError(f"there is no plan {file}") from None
    except OSError as error:
        raise ValueError(f"the plan {file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # bytes that are no text as well
        raise ValueError(f"{file} is no JSON: {error}") from None
    try:
        return _plan(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _plan(values: Any) -> LaunchPlan:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f'it is no plan of a launch: "format" must be "{FORMAT}"')
    if values.get("version") != VERSION:
        raise ValueError(f"version {values.get('version')!r} is not understood: make the plan anew (version {VERSION})")
    _refuse_unknown(values, _KEYS, "the plan")
    entries = values.get("hosts")
    if not isinstance(entries, list) or not entries:
        raise ValueError('"hosts" must be a list of at least one {"name": ..., "ranks": ...}')
    hosts = tuple(_host(number, entry) for number, entry in enumerate(entries, start=1))
    names = [host.name for host in hosts]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ValueError(f"host {twice[0]} is there twice")
    _check_parts(hosts)
    digest, env, words = values.get("parts_digest"), values.get("env", {}), values.get("arguments", [])
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ValueError(f'"parts_digest" must be eight hexadecimal digits, got {digest!r}')
    if not isinstance(env, dict) or not all(isinstance(value, str) and "\0" not in value for value in env.values()):
        raise ValueError(f'"env" must be a mapping of names to text, got {env!r}')
    if wrong := [name for name in env if not re.fullmatch(r"[^=\0]+", name)]:
        raise ValueError(f"{wrong[0]!r} can be no name of a variable")
    if not isinstance(words, list) or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ValueError(f'"arguments" must be a list of words, got {words!r}')
    number = None if digest is None else int(digest, 16)
    return LaunchPlan(hosts=hosts, parts_digest=number, env=env, arguments=tuple(words))


def _host(number: int, entry: Any) -> PlannedHost:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f'host {number} must be {{"name": ..., "ranks": ...}}, got {entry!r}')
    name = entry["name"]
    _refuse_unknown(entry, _HOST_KEYS, f"host {name}")
    ranks, parts = entry.get("ranks"), entry.get("parts")
    if not isinstance(ranks, int) or not _is_count(ranks) or ranks < 1:
        raise ValueError(f'host {name}: "ranks" must be a whole number of at least 1, got {ranks!r}')
    if parts is not None and not (isinstance(parts, list) and all(map(_is_count, parts))):
        raise ValueError(f'host {name}: "parts" must be a list of whole numbers, got {parts!r}')
    return PlannedHost(name=name, num_ranks=ranks, parts=None if parts is None else tuple(parts))


def _check_parts(hosts: Sequence[PlannedHost]) -> None:
    """Each part is served by exactly one host, or nothing is said of parts at all."""
    served = [(part, host.name) for host in hosts for part in host.parts or ()]
    if silent := [host.name for host in hosts if host.parts is None]:
        if len(silent) < len(hosts):
            raise ValueError(f'host {silent[0]} has no "parts", others have: write [] for a host that serves none')
        return
    by_part: dict[int, str] = {}
    for part, name in served:
        if part in by_part:
            raise ValueError(f"part {part} is served by {by_part[part]} and by {name}: give it to one of them")
        by_part[part] = name
    if missing := [part for part in range(len(served)) if part not in by_part]:
        raise ValueError(f"no host serves part {missing[0]}, one serves part {max(by_part)}")


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{where} has an unknown key {unknown[0]!r}: there are {', '.join(known)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
