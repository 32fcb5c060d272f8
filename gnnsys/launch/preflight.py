"""What is looked at on every host before a job starts. Each finding is one line: host, what is wrong, and the remedy.

`judge_*` are pure functions of what hosts say (`local_facts.py`); `Preflight` asks all hosts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gnnsys.launch.channel import AgentChannel, HostError, HostLost
from gnnsys.launch.hosts import Host
from gnnsys.observe import format_size

Facts = Mapping[str, Any]
MEMORY_PER_RANK = 512 << 20  # bytes that torch and a small model take
FILES_PER_RANK = 64  # connections and maps of a rank, at the least
MOST_SKEW = 5.0  # seconds that clocks may differ by
CHECK_SECONDS = 60.0
PARTS_SECONDS = 3600.0  # to read and compare all of a host's parts


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be on a host. A warning does not keep a job from starting."""

    host: str
    problem: str
    remedy: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.host}: {self.problem}: {self.remedy}"


def judge_versions(facts: Mapping[str, Facts], own: Mapping[str, str] | None = None) -> list[Finding]:
    """Hosts whose versions differ from those of most others (of the first host, where it is a draw).

    `own`: versions of the launcher, whose gnnsys must be that of the hosts.
    """
    found = []
    for name in ("gnnsys", "torch", "python"):
        by_host = {host: fact["versions"][name] for host, fact in facts.items()}
        usual = Counter(by_host.values()).most_common(1)[0][0]
        like = next(host for host, version in by_host.items() if version == usual)
        for host, version in by_host.items():
            if version != usual:
                remedy = f"install the same {name} there, or set python or workdir for this host"
                found.append(Finding(host, f"{name} is {version}, and {usual} on {like}", remedy))
            elif version == "missing":
                found.append(Finding(host, f"{name} is not installed for {facts[host]['python']}", f"install {name}"))
        if own is not None and name == "gnnsys" and own[name] != usual:
            remedy = "install the same gnnsys here, or set python or workdir for the hosts"
            found.append(Finding("the launcher", f"{name} is {own[name]}, and {usual} on {like}", remedy))
    return found


def judge_host(host: Host, fact: Facts, num_ranks: int, world_size: int, clock_error: float) -> list[Finding]:
    """What a host lacks for its ranks. `clock_error`: seconds by which its clock is ahead, at the least."""
    found = []
    if not fact["has_script"]:
        remedy = f"copy the script there, or set workdir (it is {fact['workdir']}) for this host"
        found.append(Finding(host.name, "the script is not there", remedy))
    need = host.memory or num_ranks * MEMORY_PER_RANK
    if fact["memory_free"] is not None and fact["memory_free"] < need:
        said = f"{format_size(fact['memory_free'])} of memory are free, {format_size(need)} are needed"
        found.append(Finding(host.name, said, "end other programs there, or give it fewer slots"))
    if host.gpus is not None and fact["gpus"] < host.gpus:
        said = f"{fact['gpus']} GPUs are there, the hosts file says {host.gpus}"
        found.append(Finding(host.name, said, "check nvidia-smi there, or correct gpus in the hosts file"))
    elif 0 < fact["gpus"] < num_ranks:
        said = f"{num_ranks} ranks for {fact['gpus']} GPUs"
        found.append(Finding(host.name, said, f"set slots to {fact['gpus']} for a GPU each", is_warning=True))
    if abs(clock_error) > MOST_SKEW:
        which = "ahead of" if clock_error > 0 else "behind"
        said = f"its clock is {abs(clock_error):.1f} s {which} the launcher's"
        found.append(Finding(host.name, said, "set the clocks by NTP (chronyc makestep)"))
    files, need = fact["limits"]["open_files"], FILES_PER_RANK * (num_ranks + world_size)
    if files is not None and files < need:
        said = f"at most {files} open files, {need} are needed"
        found.append(Finding(host.name, said, f"ulimit -Hn {need}, in /etc/security/limits.conf"))
    locked = fact["limits"]["locked"]
    if fact["gpus"] and locked is not None and locked < (1 << 30):
        said = f"at most {format_size(locked)} of locked memory: GPUs cannot read part files by themselves"
        found.append(Finding(host.name, said, "ulimit -Hl unlimited, in /etc/security/limits.conf", is_warning=True))
    return found


@dataclass(kw_only=True)
class Checks:
    """What a preflight looks at beside the hosts themselves. `arguments`: may name directories of parts.

    `parts_digest`: of the manifest that a plan was made for.
    """

    script: str | None = None
    arguments: Sequence[str] = ()
    parts: str | None = None
    parts_digest: int | None = None
    verify: bool = True
    port: int = 0
    checkpoints: str | None = None


@dataclass
class Ready:
    """What a preflight found out for the start."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Facts] = field(default_factory=dict)
    num_ranks: list[int] = field(default_factory=list)
    port: int = 0
    ports: list[int] = field(default_factory=list)  # that were free on each host
    checkpoint: str | None = None

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_warning]


class Preflight:
    """Asks the agents of all hosts. `clock_error(channel)`: seconds by which a host's clock is surely ahead."""

    def __init__(
        self, channels: Sequence[AgentChannel], checks: Checks, clock_error: Callable[[AgentChannel], float]
    ) -> None:
        self._channels, self._checks, self._clock_error = list(channels), checks, clock_error

    def run(self, facts: Mapping[str, Facts], own: Mapping[str, str] | None = None) -> Ready:
        """`facts`: the answers to `hello`, by host; `own`: versions of the launcher."""
        hosts = [channel.host for channel in self._channels]
        ranks = [host.num_ranks(facts[host.name]["gpus"]) for host in hosts]
        ready = Ready(facts=dict(facts), num_ranks=ranks)
        ready.findings += judge_versions(facts, own)
        for channel, host, num in zip(self._channels, hosts, ranks, strict=True):
            fact = facts[host.name]
            ready.findings += judge_host(host, fact, num, sum(ranks), self._clock_error(channel))
        if not ready.errors:  # hosts that are not alike may not understand the rest
            ready.port = self._reach(ready)
            self._parts(ready)
            self._checkpoint(ready)
        return ready

    def _reach(self, ready: Ready) -> int:
        """Every host opens a connection to every other; the port of the first is the one that ranks will meet at."""
        ports = self._ask("listen", lambda number: {"port": self._checks.port if number == 0 else 0}, ready)
        if None in ports:
            return 0
        targets = [
            {"name": channel.host.name, "address": channel.host.address, "port": port}
            for channel, port in zip(self._channels, ports, strict=True)
        ]
        timeout = CHECK_SECONDS / 6
        found = self._ask("reach", lambda _: {"targets": targets, "timeout": timeout}, ready)
        for channel, failed in zip(self._channels, found, strict=True):
            for name, why in (failed or {}).items():
                target = next(each for each in targets if each["name"] == name)
                problem = f"cannot open a connection to {name} ({target['address']} port {target['port']}): {why}"
                remedy = f"let hosts connect to each other in the firewall, or set address for {name}"
                ready.findings.append(Finding(channel.host.name, problem, remedy))
        self._ask("close_ports", lambda _: {}, ready)
        ready.ports = [int(port) for port in ports]
        return int(ports[0])

    def _parts(self, ready: Ready) -> None:
        named = [argument for argument in self._checks.arguments if not argument.startswith("-")]
        paths = list(dict.fromkeys([*([self._checks.parts] if self._checks.parts else []), *named]))
        if not paths and self._checks.parts_digest is None:
            return
        found = [answer or {} for answer in self._ask("find_parts", lambda _: {"paths": paths}, ready)]
        for path in paths:
            seen = [answer.get(path) for answer in found]
            if any(seen):
                self._parts_of(path, seen, ready)
            elif path == self._checks.parts:
                remedy = "gnnsys push sends them, gnnsys partition makes them"
                ready.findings.append(Finding(self._channels[0].host.name, f"{path} has no parts", remedy))
        self._planned_parts([each for answer in found for each in answer.values()], ready)

    def _planned_parts(self, seen: Sequence[dict[str, Any]], ready: Ready) -> None:
        """A plan that names its parts is for no others."""
        planned = self._checks.parts_digest
        if planned is None or any(each["digest"] == planned for each in seen):
            return
        there = ", ".join(sorted({f"{each['digest']:08x}" for each in seen})) or "none"
        problem = f"the plan is for parts with the digest {planned:08x}, those of the script have {there}"
        remedy = "plan again for these parts, or name the directory of those by --parts"
        ready.findings.append(Finding(self._channels[0].host.name, problem, remedy))

    def _parts_of(self, path: str, seen: Sequence[dict[str, Any] | None], ready: Ready) -> None:
        names = [channel.host.name for channel in self._channels]
        first = next(each for each in seen if each)
        where = names[list(seen).index(first)]
        remedy = f"gnnsys push {path} --hosts FILE"
        for name, each in zip(names, seen, strict=True):
            if each is None:
                ready.findings.append(Finding(name, f"{path} has no manifest.json, as {where} has", remedy))
            elif each["digest"] != first["digest"]:
                problem = f"{path} has other parts than on {where}"
                ready.findings.append(Finding(name, problem, f"{remedy} --overwrite"))
        if any(each is None or each["digest"] != first["digest"] for each in seen):
            return
        served = served_parts(first["num_parts"], [channel.host for channel in self._channels], seen)
        if isinstance(served, Finding):
            ready.findings.append(Finding(served.host, f"{path}: {served.problem}", remedy))
            return
        verify = self._checks.verify
        asked = self._ask(
            "check_parts", lambda n: {"path": path, "parts": served[n], "verify": verify}, ready, PARTS_SECONDS
        )
        for name, problems in zip(names, asked, strict=True):
            ready.findings += [Finding(name, problem, remedy) for problem in problems or ()]

    def _checkpoint(self, ready: Ready) -> None:
        if self._checks.checkpoints is None:
            return
        path = self._checks.checkpoints
        found = [name for name in self._ask("newest_checkpoint", lambda _: {"path": path}, ready) if name]
        ready.checkpoint = max(found, default=None)
        if not found:
            problem = f"{path} has no checkpoint to go on from"
            remedy = "leave --resume away to begin anew, or name the folder that the script gives gnnsys.resume"
            ready.findings.append(Finding(self._channels[0].host.name, problem, remedy))

    def _ask(
        self, do: str, arguments: Callable[[int], dict[str, Any]], ready: Ready, timeout: float = CHECK_SECONDS
    ) -> list[Any]:
        """The answers of all hosts, who are asked at once; None, and a finding, where one has none."""
        asked: list[Future[Any] | None] = []
        answers: list[Any] = []
        for number, channel in enumerate(self._channels):
            try:
                asked.append(channel.ask(do, **arguments(number)))
            except HostLost as error:
                ready.findings.append(Finding(error.host.name, error.why, "look whether the host is up"))
                asked.append(None)
        for channel, future in zip(self._channels, asked, strict=True):
            try:
                answers.append(None if future is None else channel.result(future, timeout))
            except (HostLost, HostError) as error:
                remedy = "look whether the host is up" if isinstance(error, HostLost) else f"({do} failed there)"
                ready.findings.append(Finding(error.host.name, error.why, remedy))
                answers.append(None)
        return answers


def served_parts(
    num_parts: int, hosts: Sequence[Host], seen: Sequence[dict[str, Any] | None]
) -> list[list[int]] | Finding:
    """The parts that each host will serve, as `gnnsys.open` will decide; a finding where nobody has one."""
    from gnnsys.partition import place_parts  # imports torch

    folders = [set(each["parts"]) if each else set() for each in seen]
    for host, have in zip(hosts, folders, strict=True):
        if lacks := [part for part in host.parts or () if part not in have]:
            return Finding(host.name, f"part {lacks[0]} is not there", "")
        if host.parts is not None:
            have &= set(host.parts)
    try:
        machine_of_part = place_parts(num_parts, folders)
    except ValueError as error:
        return Finding(hosts[0].name, str(error), "")
    return [[part for part, machine in enumerate(machine_of_part) if machine == n] for n in range(len(hosts))]
