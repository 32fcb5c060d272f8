"""A plan of a job as it is carried out: which hosts take part, how many ranks each runs, which parts each serves, whose
samplers it runs, and what all ranks are given.

`gnnsys launch --plan FILE` starts it and `gnnsys.open` keeps to it. A file is one of these, which people write
(docs/launch.md), or a plan of a placement, which `gnnsys plan` writes. Hosts have names, never machine numbers: a
rendezvous numbers machines as it likes. Whatever is wrong in a file is one line that says where.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from gnnsys.graph import MANIFEST
from gnnsys.observe import bytes_per_second, format_rate, unique_keys
from gnnsys.planning.cluster.cluster import Cluster
from gnnsys.planning.placement.plan_file import PlacedSampler, PlacementPlan, is_placement_plan

_Host = TypeVar("_Host")
FORMAT, VERSION = "gnnsys-launch-plan", 1
_KEYS = ("format", "version", "hosts", "parts_digest", "env", "arguments", "seconds_per_epoch", "binds")
_HOST_KEYS = ("name", "ranks", "parts", "samplers", "rate_in", "rate_out")
_DIGEST = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class PlannedHost:
    """A host that takes part. `parts` are those that it serves; None: as its description and its disk say. `samplers`:
    processes that it runs, each of which makes batches for one rank. `rate_in` and `rate_out`: of its link, bytes per
    second, for replies that are paced."""

    name: str
    num_ranks: int
    parts: tuple[int, ...] | None = None
    samplers: tuple[PlacedSampler, ...] = ()
    rate_in: float = math.inf
    rate_out: float = math.inf


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Ranks are numbered in the order of `hosts`. `parts_digest` is that of the manifest of the parts it was made for
    (`manifest_digest`). `env` and `arguments` are for all ranks. `seconds_per_epoch` and `binds` are a prediction."""

    hosts: tuple[PlannedHost, ...]
    parts_digest: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    seconds_per_epoch: float | None = None
    binds: str = ""

    @property
    def num_ranks(self) -> int:
        return sum(host.num_ranks for host in self.hosts)

    @classmethod
    def from_placement(cls, plan: PlacementPlan) -> LaunchPlan:
        """What is carried out of a placement."""
        links = {host.name: host for host in Cluster.from_json(plan.cluster)} if plan.cluster else {}
        hosts = [
            PlannedHost(
                name=host.name,
                num_ranks=host.num_trainers,
                parts=host.parts,
                samplers=host.samplers,
                rate_in=links[host.name].rate_in if host.name in links else math.inf,
                rate_out=links[host.name].rate_out if host.name in links else math.inf,
            )
            for host in plan.hosts
            if host.num_trainers or host.parts or host.samplers
        ]
        said = plan.forecast
        return cls(
            hosts=tuple(hosts),
            parts_digest=plan.parts_digest,
            seconds_per_epoch=said.seconds_per_epoch,
            binds=said.binds,
        )

    def samplers_of(self, host: str, trainer: int) -> list[tuple[str, int]]:
        """The samplers of a rank, `trainer` among those of its host: where each runs, and its number there."""
        wanted = PlacedSampler(host=host, trainer=trainer)
        return [
            (other.name, number)
            for other in self.hosts
            for number, sampler in enumerate(other.samplers)
            if sampler == wanted
        ]

    def choose(self, described: Sequence[_Host], where: str) -> list[_Host]:
        """The hosts of a description (`gnnsys.launch.Host`) that take part, as the plan has them, those without ranks
        last. `where`: what the description is called."""
        by_name: dict[str, Any] = {host.name: host for host in described}  # type: ignore[attr-defined]
        if missing := [host.name for host in self.hosts if host.name not in by_name]:
            raise ValueError(f"the plan has host {missing[0]}, {where} has not: it has {', '.join(by_name)}")
        in_order = [*self.hosts_with_ranks, *(host for host in self.hosts if not host.num_ranks)]
        chosen = [replace(by_name[host.name], slots=host.num_ranks, assists=not host.num_ranks) for host in in_order]
        return [
            host if planned.parts is None else replace(host, parts=planned.parts)
            for host, planned in zip(chosen, in_order, strict=True)
        ]

    @property
    def hosts_with_ranks(self) -> list[PlannedHost]:
        """The others serve parts or run samplers alone."""
        return [host for host in self.hosts if host.num_ranks]

    def choose_here(self, here: _Host) -> list[_Host]:
        """This machine in the place of the plan's only host."""
        slots = here.slots  # type: ignore[attr-defined]
        if len(self.hosts) != 1:
            raise ValueError(f"the plan has {len(self.hosts)} hosts, --local has one: use --hosts FILE")
        if slots != self.num_ranks:
            raise ValueError(f"the plan has {self.num_ranks} ranks: write --local {self.num_ranks}, got {slots}")
        return [replace(here, parts=self.hosts[0].parts)]  # type: ignore[type-var]

    def check_parts(self, path: str | os.PathLike[str], found: int | None = None) -> None:
        """ValueError for a directory of other parts than those that the plan was made for. `found`: their digest."""
        if self.parts_digest is None:
            return
        if found is None:
            found = manifest_digest(path)
        if self.parts_digest != found:
            raise ValueError(f"the plan is for parts with the digest {self.parts_digest:08x}, {path} has {found:08x}")

    def text(self) -> str:
        """What `read_launch_plan` reads."""
        return json.dumps({**self._placed(), "env": dict(self.env), "arguments": list(self.arguments)}, indent=1) + "\n"

    def line_for_ranks(self, names: Sequence[str] = ()) -> str:
        """What ranks must know of it, in one line: neither variables nor arguments. `names`: of its hosts, where the
        job calls them otherwise."""
        called = {host.name: name for host, name in zip(self.hosts, names or _names(self.hosts), strict=True)}
        hosts = tuple(
            replace(
                host,
                name=called[host.name],
                samplers=tuple(replace(sampler, host=called[sampler.host]) for sampler in host.samplers),
            )
            for host in self.hosts
        )
        return json.dumps(replace(self, hosts=hosts)._placed(), separators=(",", ":"))

    def _placed(self) -> dict[str, Any]:
        hosts: list[dict[str, Any]] = []
        for host in self.hosts:
            own: dict[str, Any] = {} if host.parts is None else {"parts": list(host.parts)}
            if host.samplers:
                own["samplers"] = [{"host": sampler.host, "trainer": sampler.trainer} for sampler in host.samplers]
            for way, rate in (("rate_in", host.rate_in), ("rate_out", host.rate_out)):
                own |= {} if math.isinf(rate) else {way: format_rate(rate)}
            hosts.append({"name": host.name, "ranks": host.num_ranks, **own})
        digest = {} if self.parts_digest is None else {"parts_digest": f"{self.parts_digest:08x}"}
        said = {} if self.seconds_per_epoch is None else {"seconds_per_epoch": self.seconds_per_epoch}
        binds = {"binds": self.binds} if self.binds else {}
        return {"format": FORMAT, "version": VERSION, "hosts": hosts, **digest, **said, **binds}


def manifest_digest(path: str | os.PathLike[str]) -> int:
    """That of a directory of parts: the CRC-32 of its manifest."""
    try:
        return zlib.crc32((Path(path) / MANIFEST).read_bytes())
    except OSError:
        raise ValueError(f"{path} has no {MANIFEST}: make parts with gnnsys partition SOURCE --out {path}") from None


def read_launch_plan(path: str | os.PathLike[str]) -> LaunchPlan:
    """The plan of a file. ValueError, one line that names the file, for what is wrong."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(
            f"there is no plan {file}: make one with gnnsys plan PARTS --cluster FILE --profile FILE --out {file}"
        ) from None
    except OSError as error:
        raise ValueError(f"the plan {file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # bytes that are no text
        raise ValueError(f"{file} is no JSON: {error}") from None
    return parse_launch_plan(text, str(file))


def parse_launch_plan(text: str, where: str) -> LaunchPlan:
    """The plan of a text, which errors call `where`."""
    try:
        values = json.loads(text, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    try:
        return (
            LaunchPlan.from_placement(PlacementPlan.from_json(values)) if is_placement_plan(values) else _plan(values)
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


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
    names = _names(hosts)
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ValueError(f"host {twice[0]} is there twice")
    if not any(host.num_ranks for host in hosts):
        raise ValueError("no host of the plan has a rank")
    if idle := [host.name for host in hosts if not (host.num_ranks or host.parts or host.samplers)]:
        raise ValueError(f"host {idle[0]} has neither ranks nor parts nor samplers: leave it away")
    _check_parts(hosts)
    _check_samplers(hosts)
    digest, env, words = values.get("parts_digest"), values.get("env", {}), values.get("arguments", [])
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ValueError(f'"parts_digest" must be eight hexadecimal digits, got {digest!r}')
    if not isinstance(env, dict) or not all(isinstance(value, str) and "\0" not in value for value in env.values()):
        raise ValueError(f'"env" must be a mapping of names to text, got {env!r}')
    if wrong := [name for name in env if not re.fullmatch(r"[^=\0]+", name)]:
        raise ValueError(f"{wrong[0]!r} can be no name of a variable")
    if not isinstance(words, list) or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ValueError(f'"arguments" must be a list of words, got {words!r}')
    number, seconds, binds = (
        None if digest is None else int(digest, 16),
        values.get("seconds_per_epoch"),
        values.get("binds", ""),
    )
    if seconds is not None and not (
        isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0
    ):
        raise ValueError(f'"seconds_per_epoch" must be a number above 0, got {seconds!r}')
    if not isinstance(binds, str):
        raise ValueError(f'"binds" must be a line of text, got {binds!r}')
    return LaunchPlan(
        hosts=hosts, parts_digest=number, env=env, arguments=tuple(words), seconds_per_epoch=seconds, binds=binds
    )


def _host(number: int, entry: Any) -> PlannedHost:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError(f'host {number} must be {{"name": ..., "ranks": ...}}, got {entry!r}')
    name = entry["name"]
    _refuse_unknown(entry, _HOST_KEYS, f"host {name}")
    ranks, parts, samplers = entry.get("ranks"), entry.get("parts"), entry.get("samplers", [])
    if not _is_count(ranks):
        raise ValueError(f'host {name}: "ranks" must be a whole number, got {ranks!r}')
    if parts is not None and not (isinstance(parts, list) and all(map(_is_count, parts))):
        raise ValueError(f'host {name}: "parts" must be a list of whole numbers, got {parts!r}')
    if not isinstance(samplers, list):
        raise ValueError(f'host {name}: "samplers" must be a list, got {samplers!r}')
    placed = tuple(_sampler(name, sampler) for sampler in samplers)
    rates = {}
    for way in ("rate_in", "rate_out"):
        try:
            rates[way] = bytes_per_second(entry.get(way, math.inf))
        except ValueError as error:
            raise ValueError(f"host {name}: {way}: {error}") from None
    return PlannedHost(
        name=name, num_ranks=cast(int, ranks), parts=None if parts is None else tuple(parts), samplers=placed, **rates
    )


def _sampler(name: str, entry: Any) -> PlacedSampler:
    is_right = isinstance(entry, dict) and entry.keys() == {"host", "trainer"}
    if not is_right or not isinstance(entry["host"], str) or not _is_count(entry["trainer"]):
        raise ValueError(f'host {name}: a sampler must be {{"host": ..., "trainer": N}}, got {entry!r}')
    return PlacedSampler(host=entry["host"], trainer=entry["trainer"])


def _check_samplers(hosts: Sequence[PlannedHost]) -> None:
    """Each is for a rank that there is."""
    by_name = {host.name: host for host in hosts}
    for host in hosts:
        for sampler in host.samplers:
            where = f"host {host.name}: a sampler is for trainer {sampler.trainer} of {sampler.host}"
            if sampler.host not in by_name:
                raise ValueError(f"{where}, which is no host of the plan")
            if sampler.trainer >= by_name[sampler.host].num_ranks:
                raise ValueError(f"{where}, which has {by_name[sampler.host].num_ranks}, counted from 0")


def _names(hosts: Sequence[PlannedHost]) -> list[str]:
    return [host.name for host in hosts]


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
