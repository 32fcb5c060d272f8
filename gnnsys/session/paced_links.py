"""Which rates the links of this job's hosts have, where replies are to leave at OES's rate (`gnnsys.open(pace=...)`).

A plan says them by the names of hosts; else each host is told its own. Half of a rate is the receiver's to keep, a
client's; the other half the sender's, a server's (`gnnsys.comm.reply_pacing`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from gnnsys.comm import LINK_PAYLOAD
from gnnsys.observe import bytes_per_second
from gnnsys.planning import LaunchPlan
from gnnsys.session.planned_hosts import planned_name

GivenPace: TypeAlias = "bool | str | float | None"


class PacedLink(NamedTuple):
    """Bytes of messages per second that a host's link carries each way; None: no limit, and nothing is paced."""

    rate_in: float | None
    rate_out: float | None


def paced_link(given: GivenPace, plan: LaunchPlan | None, host: str) -> PacedLink:
    """What `pace` means for a host: a rate of its link, True for what the plan says of it, None or False for none."""
    if given is None or given is False:
        return PacedLink(None, None)
    if given is not True:
        rate = bytes_per_second(given)
        return _link(rate, rate)
    remedy = 'pace="10gbit" says it of this host\'s link'
    if plan is None:
        raise ValueError(f"pace=True takes the rates of links from a plan, and there is none: {remedy}")
    hosts = {each.name: each for each in plan.hosts}
    name = planned_name(host, hosts)
    if name not in hosts:
        raise ValueError(f"the plan has no host {host}, so no rate of its link: {remedy}")
    found = hosts[name]
    if math.isinf(found.rate_in) and math.isinf(found.rate_out):
        raise ValueError(f"the plan has no rate_in or rate_out of host {name}: write them there, or {remedy}")
    return _link(found.rate_in, found.rate_out)


def assisting_links(plan: LaunchPlan | None, names: Sequence[str]) -> list[PacedLink]:
    """Those of hosts without ranks, as the plan has them."""
    hosts = {} if plan is None else {each.name: each for each in plan.hosts}
    found = [hosts.get(planned_name(name, hosts)) for name in names]
    return [PacedLink(None, None) if each is None else _link(each.rate_in, each.rate_out) for each in found]


def _link(rate_in: float, rate_out: float) -> PacedLink:
    return PacedLink(*(None if math.isinf(rate) else rate * LINK_PAYLOAD for rate in (rate_in, rate_out)))
