"""Links between hosts: how fast they are, and which of them hold a job back."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from gnnsys.doctor.diagnosis import ADVICE, FAILS, Diagnosis
from gnnsys.launch import LinkSpeed, ProbeServer, measure_link

SLOW_RATE = 2e9 / 8  # bytes per second
SLOW_ROUND_TRIP = 1e-3  # seconds
LISTEN_SECONDS = 600.0


def judge_links(links: Sequence[LinkSpeed]) -> list[Diagnosis]:
    """One line for each link: too slow by itself, slower than the others, or well."""
    usual = statistics.median(link.rate for link in links) if links else 0.0
    return [_judge_link(link, usual if len(links) > 2 else 0.0) for link in links]


def _judge_link(link: LinkSpeed, usual: float) -> Diagnosis:
    subject = f"{link.source}->{link.target}"
    said = f"{_gbit(link.rate)} Gbit/s by one connection, {link.round_trip * 1e6:,.0f} us there and back"
    if link.rate < usual / 2:
        why = f"the other links have {_gbit(usual)} Gbit/s, and all ranks wait for the slowest"
        remedy = (
            f"look at speed and errors of the interfaces of both (ethtool, ip -s link), beginning with {link.target}"
        )
        return Diagnosis(subject, said, why, remedy, ADVICE)
    if link.rate < SLOW_RATE:
        why = "rows of every batch cross it"
        remedy = "set address= in the hosts file to that of a faster network, and partition with fewer cut edges"
        return Diagnosis(subject, said, why, remedy, ADVICE)
    if link.round_trip > SLOW_ROUND_TRIP:
        why = "each hop of a sample waits for a round trip"
        return Diagnosis(subject, said, why, "take hosts of one rack or zone, or deepen the loader's pipeline", ADVICE)
    return Diagnosis(subject, said)


def listen_once(port: int, say: Callable[[str], None], timeout: float = LISTEN_SECONDS) -> str:
    """Answers one measurement from another host; its address. `say` gets what to type there."""
    server = ProbeServer(port)
    try:
        say(f"listening at port {server.port}; on the other host: gnnsys doctor --to THIS_HOST:{server.port}")
        return server.serve_one(timeout)
    except TimeoutError:
        raise ValueError(
            f"nobody came to port {server.port} within {timeout:g} s: is it open in the firewall?"
        ) from None
    finally:
        server.close()


def measure_to(target: str, seconds: float = 1.0) -> list[Diagnosis]:
    """Measures the link from here to `gnnsys doctor --listen` at HOST:PORT."""
    address, colon, port = target.rpartition(":")
    if not colon or not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--to must be HOST:PORT, as the listening host prints it, got {target!r}")
    address = address.removeprefix("[").removesuffix("]")
    try:
        found = measure_link(address, int(port), seconds)
    except OSError as error:
        remedy = f"run gnnsys doctor --listen {port} on {address}, and open that port in its firewall"
        said = f"no measurement: {error.strerror or error}"
        return [Diagnosis(f"here->{address}", said, "ranks cannot reach each other", remedy, FAILS)]
    return judge_links([LinkSpeed("here", address, found["rate"], found["round_trip"])])


def _gbit(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g}"
