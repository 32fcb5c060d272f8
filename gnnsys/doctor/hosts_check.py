"""All hosts of a job at once, by launch's agents: what keeps a job from starting, and how fast their links are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gnnsys.doctor.diagnosis import ADVICE, FAILS, Diagnosis
from gnnsys.doctor.network import judge_links
from gnnsys.launch import Checks, Finding, Host, HostError, HostGroup, HostLost, LaunchOptions
from gnnsys.observe import format_size


def look_at_hosts(
    hosts: Sequence[Host], options: LaunchOptions, parts: str | None = None, seconds: float = 0.5
) -> list[Diagnosis]:
    """The preflight of `gnnsys launch`, then the rate from each host to the next, `seconds` each."""
    group = HostGroup(hosts, options, lambda *_: None)
    try:
        ready = group.connect(Checks(parts=parts), 0.0, verify=False)
        found = judge_findings(ready.findings, ready.facts)
        if not ready.errors:
            found += judge_links(group.links(seconds))
        return found
    except (HostLost, HostError) as error:
        remedy = "look whether the host is up, and whether hosts may open connections to each other"
        return [Diagnosis(error.host.name, error.why, "links could not be measured", remedy, FAILS)]
    finally:
        group.close()


def judge_findings(findings: Sequence[Finding], facts: Mapping[str, Mapping[str, Any]]) -> list[Diagnosis]:
    """What the preflight found, and a line for each host of which it found nothing. `facts`: by host."""
    bad = {finding.host for finding in findings}
    found = [Diagnosis(host, summary(fact)) for host, fact in facts.items() if host not in bad]
    for finding in findings:
        state = ADVICE if finding.is_warning else FAILS
        why = "a job starts, and is slower than it could be" if finding.is_warning else "a job would not start"
        found.append(Diagnosis(finding.host, finding.problem, why, finding.remedy, state))
    return found


def summary(fact: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in fact["versions"].items())
    memory = "" if fact["memory_free"] is None else f", {format_size(fact['memory_free'])} free"
    return f"{versions}; {fact['cores']} cores, {fact['gpus']} GPUs{memory}"
