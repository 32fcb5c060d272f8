"""The network of a lab: a bridge in the switch's namespace, and per host a veth pair with a token bucket at both ends.

The bucket at the host's end limits what it sends, the one at the switch's end what it receives. `traffic` reads the
kernel's counters at the switch's end. The kernel counts the headers of a large packet once, before it is segmented, so
up to 5% of the bytes on a real wire are missing.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

KEEP = "keep"  # in place of a rate: leave this direction as it is
LATENCY = 0.05  # seconds; a packet that would wait longer in a bucket is dropped
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True)
class HostTraffic:
    """Bytes and packets that a host has received and sent since it was made."""

    bytes_in: int
    bytes_out: int
    packets_in: int
    packets_out: int

    def __sub__(self, earlier: HostTraffic) -> HostTraffic:
        return HostTraffic(
            self.bytes_in - earlier.bytes_in,
            self.bytes_out - earlier.bytes_out,
            self.packets_in - earlier.packets_in,
            self.packets_out - earlier.packets_out,
        )


def parse_rate(text: str) -> float:
    """Bits per second from "1gbit", "100mbit" or "2.5gbit": powers of 1000, as `tc` has them.

    >>> parse_rate("100mbit")
    100000000.0
    """
    match = _RATE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"a rate must look like 1gbit, 100mbit or 500kbit, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def queue_seconds(rate: str) -> float:
    """The longest time that a packet waits in a bucket of this rate: behind a full one that has no tokens left.

    >>> round(queue_seconds("50mbit"), 4), round(queue_seconds("1gbit"), 4)
    (0.0612, 0.052)
    """
    return LATENCY + _burst(rate) * 8 / parse_rate(rate)


def _burst(rate: str) -> int:
    """Bytes: of two milliseconds, and at least one unsegmented packet."""
    return max(round(parse_rate(rate) / 8 * 0.002), 70_000)


def address(host: int, family: int = 4) -> str:
    """The address of a host. All labs use the same addresses: their networks are separate."""
    return f"10.77.0.{host}" if family == 4 else f"fd77::{host:x}"


def hosts_file(names: Sequence[str], family: int) -> str:
    """Text of /etc/hosts: every host by its name in `family`, and as NAME-v4 and NAME-v6."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    for host, name in enumerate(names, start=1):
        for version in (4, 6):
            aliases = f"{name} {name}-v{version}" if version == family else f"{name}-v{version}"
            lines.append(f"{address(host, version)} {aliases}")
    return "\n".join(lines) + "\n"


class Network:
    """`host_pids[i]` is a process in the namespace of host i + 1, `switch_pid` one in the switch's."""

    def __init__(self, switch_pid: int, host_pids: Sequence[int]) -> None:
        self._switch_pid, self._host_pids = switch_pid, tuple(host_pids)

    def make(self) -> None:
        lines = ["link set dev lo up", "link add name bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
        lines.append("link set dev bridge up")
        for host, pid in enumerate(self._host_pids, start=1):
            lines.append(f"link add name p{host} type veth peer name eth0 netns {pid}")
            lines.append(f"link set dev p{host} master bridge up")
        _batch("ip", self._switch_pid, lines)
        for host, pid in enumerate(self._host_pids, start=1):
            own = [f"address add {address(host)}/16 dev eth0", f"address add {address(host, 6)}/64 dev eth0 nodad"]
            _batch("ip", pid, ["link set dev lo up", *own, "link set dev eth0 up"])

    def set_rate(self, host: int, into: str | None, out: str | None) -> None:
        """None is as fast as the machine is."""
        for pid, device, rate in ((self._switch_pid, f"p{host}", into), (self._host_pids[host - 1], "eth0", out)):
            if rate == KEEP:
                continue
            if rate is None:  # add a plain queue first, so that there is one to delete
                _batch("tc", pid, [f"qdisc replace dev {device} root pfifo", f"qdisc del dev {device} root"])
                continue
            limits = f"rate {parse_rate(rate):.0f}bit burst {_burst(rate)} latency {1e3 * LATENCY:g}ms"
            _batch("tc", pid, [f"qdisc replace dev {device} root tbf {limits}"])

    def set_link(self, host: int, up: bool) -> None:
        """Sets the host's link at the switch up or down."""
        _batch("ip", self._switch_pid, [f"link set dev p{host} {'up' if up else 'down'}"])

    def traffic(self) -> dict[int, HostTraffic]:
        listing = json.loads(_inside(self._switch_pid, ["ip", "-json", "-statistics", "link", "show"]))
        found = {entry["ifname"]: entry["stats64"] for entry in listing}
        return {host: _traffic(found[f"p{host}"]) for host in range(1, len(self._host_pids) + 1)}


def _traffic(port: dict[str, dict[str, int]]) -> HostTraffic:
    into, out = port["tx"], port["rx"]  # the host receives what the switch sends
    return HostTraffic(into["bytes"], out["bytes"], into["packets"], out["packets"])


def _batch(program: str, pid: int, lines: Sequence[str]) -> None:
    _inside(pid, [program, "-batch", "-"], "\n".join(lines) + "\n")


def _inside(pid: int, command: list[str], text: str = "") -> str:
    full = ["nsenter", f"--net=/proc/{pid}/ns/net", *command]
    done = subprocess.run(full, input=text, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed in a host of the lab: {done.stderr.strip()}")
    return done.stdout
