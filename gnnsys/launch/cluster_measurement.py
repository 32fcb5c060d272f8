"""`gnnsys plan --measure`: what the hosts of a cluster can do, found out by an agent on each of them.

First what one core of each is worth and how many it has, all hosts at once; then the rate into and out of one host
after the other, while the rest are silent. What is not missing is not measured. Every step has a deadline.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnnsys.launch.channel import HostError, HostLost
from gnnsys.launch.host_group import HostGroup, LaunchOptions
from gnnsys.launch.hosts import Host
from gnnsys.launch.launcher import interrupts
from gnnsys.launch.preflight import Checks

MOST_PEERS = 16  # that send to or receive from a host at once
SETUP_SECONDS = 120.0  # to import torch and make tables on a slow host
PATIENCE = 15.0  # times the seconds of a measurement
NEAR = 0.93  # of what the others can give or take, from which it is they who bound a rate


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """`seconds`: of each transfer. `work_seconds`: of each kind of work. `cost_seconds`: for a machine's cost profile,
    where it has none; 0 for none. `reference`: the host whose cores have speed 1; None: this machine's."""

    seconds: float = 2.0
    work_seconds: float = 0.5
    cost_seconds: float = 20.0
    reference: str | None = None

    def __post_init__(self) -> None:
        if not 0.1 <= self.seconds <= 600:
            raise ValueError(f"--seconds must be from 0.1 to 600, got {self.seconds:g}")
        if not (self.cost_seconds == 0 or 1 <= self.cost_seconds <= 600):
            raise ValueError(f"--cost-seconds must be from 1 to 600, or 0 for no costs, got {self.cost_seconds:g}")


@dataclass
class MeasuredCluster:
    """`values`: by host, the keys of a cluster file that were found. `work`: core-seconds of each kind, by host.
    `notes`: what a person must know of them."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    work: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measure_cluster(
    hosts: Sequence[Host],
    missing: Mapping[str, Sequence[str]],
    launch: LaunchOptions,
    options: MeasureOptions | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> MeasuredCluster:
    """Finds out what is `missing`, keys of a cluster file by host. `tell` gets a line for each step. ValueError where a
    host cannot be reached, or is not like the others; where there are several such, `tell` gets a line for each."""
    options = options or MeasureOptions()
    if options.reference is not None and options.reference not in missing:
        raise ValueError(f"--reference {options.reference} is no host of the cluster: it has {', '.join(missing)}")
    if len(hosts) < 2 and any(key.startswith("rate") for keys in missing.values() for key in keys):
        raise ValueError(f"{hosts[0].name} is the only host: nothing goes over its link. Write rate: unlimited for it")
    if launch.ssh is not None and not launch.ssh:
        raise ValueError("--ssh must be a command, such as --ssh 'ssh -i key', got nothing")
    if launch.ssh is not None and shutil.which(launch.ssh[0]) is None:
        raise ValueError(f"there is no program {launch.ssh[0]} here: install it, or name another with --ssh COMMAND")
    group = HostGroup(hosts, launch, lambda *_: None)
    try:
        with interrupts():
            ready = group.connect(Checks(), 0.0, verify=False)
            if len(ready.errors) > 1:
                for finding in ready.errors:
                    tell(str(finding))
                raise ValueError(f"nothing was measured: {len(ready.errors)} things are wrong, see above")
            if ready.errors:
                raise ValueError(str(ready.errors[0]))
            found = MeasuredCluster({host.name: {} for host in hosts})
            found.notes += [str(finding) for finding in ready.findings]
            _count(found, ready.facts)
            _work(group, found, missing, options, tell)
            _costs(group, found, ready.facts, options, tell)
            _Rates(group, hosts, options, tell).measure(found, missing)
            return found
    except (HostLost, HostError) as error:
        raise ValueError(f"{error.host.name}: {error.why}") from None
    finally:
        group.close()


def _count(found: MeasuredCluster, facts: Mapping[str, Mapping[str, Any]]) -> None:
    for name, fact in facts.items():
        found.values[name] |= {"memory": fact["memory_free"], "gpus": fact["gpus"]}


def _work(
    group: HostGroup, found: MeasuredCluster, missing: Mapping[str, Sequence[str]], options: MeasureOptions,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    asked = [name for name, keys in missing.items() if "speed" in keys or "cores" in keys or name == options.reference]
    if not asked:
        return
    tell(f"cores of {len(asked)} hosts: serving, sampling, encrypting")
    timeout = SETUP_SECONDS + PATIENCE * options.work_seconds
    answers = group.ask("core_work", {name: {"seconds": options.work_seconds} for name in asked}, timeout)
    found.work = {name: answer["work"] for name, answer in answers.items()}
    from gnnsys.launch.core_work import core_speed, core_work  # imports torch

    reference = core_work(options.work_seconds) if options.reference is None else found.work[options.reference]
    for name, answer in answers.items():
        found.values[name] |= {"cores": answer["cores"], "speed": core_speed(answer["work"], reference)}


def _costs(
    group: HostGroup, found: MeasuredCluster, facts: Mapping[str, Mapping[str, Any]], options: MeasureOptions,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    if not options.cost_seconds:
        return
    tell(f"cost profiles of machines that have none, {options.cost_seconds:g} s at most")
    asked = {name: {"budget": options.cost_seconds, "gpus": fact["gpus"]} for name, fact in facts.items()}
    answers = group.ask("machine_costs", asked, SETUP_SECONDS + PATIENCE * options.cost_seconds)
    for name, answer in answers.items():
        if answer["error"] > 0.15:
            found.notes.append(
                f"{name}: its cost profile is off by {answer['error']:.0%}: the machine was busy. Measure it there by "
                "`python -m gnnsys.planning.costs --again` when it is not"
            )


class _Rates:
    """Rates of one host after the other, all others at its other end."""

    def __init__(
        self, group: HostGroup, hosts: Sequence[Host], options: MeasureOptions, tell: Callable[[str], None]
    ) -> None:
        self._group, self._hosts, self._options, self._tell = group, list(hosts), options, tell
        self._key: dict[str, Any] = {}
        self._endpoints: dict[str, str] = {}

    def measure(self, found: MeasuredCluster, missing: Mapping[str, Sequence[str]]) -> None:
        into = [name for name, keys in missing.items() if "rate_in" in keys]
        out_of = [name for name, keys in missing.items() if "rate_out" in keys]
        if not into and not out_of:
            return
        from gnnsys.launch.message_rates import host_rate  # imports torch

        self._listen()
        for name in into:
            self._tell(f"rate into {name}")
            answers = self._pull({name: self._peers(name)})
            found.values[name]["rate_in"] = host_rate(list(answers[name].values()))
        for name in out_of:
            self._tell(f"rate out of {name}")
            answers = self._pull({other: [name] for other in self._peers(name)})
            found.values[name]["rate_out"] = host_rate([answer[name] for answer in answers.values()])

    def _listen(self) -> None:
        from gnnsys.comm import Keys, endpoint

        self._key = Keys.generate().to_json()
        ports = self._group.ask("listen_rates", {host.name: {"key": self._key} for host in self._hosts}, SETUP_SECONDS)
        self._endpoints = {host.name: endpoint(host.address, ports[host.name]) for host in self._hosts}

    def _peers(self, name: str) -> list[str]:
        """All others, or those behind it in the file where they are many."""
        names = [host.name for host in self._hosts]
        at = names.index(name)
        return (names[at + 1 :] + names[:at])[:MOST_PEERS]

    def _pull(self, sources: Mapping[str, Sequence[str]]) -> dict[str, dict[str, list[float]]]:
        """Has each host pull from its sources, all at once; rates by host and source, slice by slice."""
        seconds = self._options.seconds
        patience = PATIENCE * seconds + 10.0
        asked = {
            name: {
                "peers": {source: self._endpoints[source] for source in others},
                "key": self._key, "seconds": seconds, "patience": patience,
            }
            for name, others in sources.items()
        }  # fmt: skip
        answers = self._group.ask("pull_rates", asked, 2 * patience)
        return {name: dict(answer) for name, answer in answers.items()}


def bounded_by_others(rates: Mapping[str, Mapping[str, float]], measured: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each measured rate that is as much as all others together give or take: its own link may be faster.

    `rates`: `rate_in` and `rate_out` of every host; `measured`: which of them were, by host. Of two hosts nothing is
    said: what binds a pair is not known.

    >>> slow = {"rate_in": 1e6, "rate_out": 1e6}
    >>> bounded_by_others({"a": {"rate_in": 1.95e6, "rate_out": 1e6}, "b": slow, "c": slow}, {"a": ["rate_in"]})
    ['a: rate_in is all that the others send: its own link may be faster']
    """
    found = []
    for key, other_way, does in (("rate_in", "rate_out", "send"), ("rate_out", "rate_in", "take")):
        for name, keys in measured.items():
            others = [told[other_way] for other, told in rates.items() if other != name]
            if key in keys and 2 <= len(others) <= MOST_PEERS and rates[name][key] >= NEAR * sum(others):
                found.append(f"{name}: {key} is all that the others {does}: its own link may be faster")
    return found
