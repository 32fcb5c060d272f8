"""Which address of this machine the other machines reach: nothing for the user to choose, one variable to overrule it.

A machine asks its kernel which of its addresses leads to MASTER_ADDR. The machine that is MASTER_ADDR itself may find
loopback there (Debian gives a host's own name 127.0.1.1); it then takes the address under which the others reach it.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.comm.rendezvous import Group

VARIABLE = "GNNSYS_ADDRESS"
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_DISCARD = 9  # a port for a datagram socket that is never sent from: connecting it only asks for the route


@dataclass(frozen=True)
class AddressReport:
    """What one machine knows: its `own` address towards the `master`, and whether the user `fixed` it."""

    own: str
    master: str
    fixed: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AddressReport:
        return cls(str(values["own"]), str(values["master"]), bool(values["fixed"]))


def find_address(master: str, environment: Mapping[str, str] | None = None) -> AddressReport:
    """This machine's address on the way to `master` (a host name, IPv4 or IPv6); ValueError where there is no way."""
    env = os.environ if environment is None else environment
    wanted = env.get(VARIABLE)
    if wanted:
        return AddressReport(resolve(wanted, f"{VARIABLE}={wanted!r}")[0], "", fixed=True)
    bare = master.strip("[]")
    reasons = []
    for target in resolve(bare, f"MASTER_ADDR={master!r}"):
        try:
            with socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
                probe.connect((target, _DISCARD))
                return AddressReport(str(probe.getsockname()[0]), target)
        except OSError as error:
            reasons.append(f"{target}: {error.strerror or error}")
    raise ValueError(
        f"no way to MASTER_ADDR={master!r} ({'; '.join(reasons)}): set {VARIABLE} to this machine's address"
    )


def settle_address(found: Sequence[AddressReport], machine: int, is_own: Callable[[str], bool] | None = None) -> str:
    """The address that `machine` listens on, from what all machines found. `is_own` tells addresses of this host."""
    mine = found[machine]
    if mine.fixed or not is_loopback(mine.own):
        return mine.own
    from_outside = list(
        dict.fromkeys(other.master for other in found if other.master and not is_loopback(other.master))
    )
    for address in from_outside:
        if (is_own or is_bindable)(address):
            return address
    if from_outside or any(not is_loopback(other.own) for other in found):
        raise ValueError(
            f"machine {machine} knows itself only as {mine.own}, which others cannot reach: set {VARIABLE} there to "
            f"an address that they reach"
        )
    return mine.own


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address; None where it cannot be told."""
    try:
        if ":" in address:
            wanted = ipaddress.ip_address(address.split("%")[0]).packed.hex()
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((fields[5] for fields in lines if fields[0] == wanted), None)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an IPv4 address
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(found[20:24]) == address:
                        return name
    except OSError:
        return None
    return None


def resolve(name: str, what: str) -> list[str]:
    """Addresses of a name or of an address, those that need no scope first; ValueError, about `what`, for neither."""
    try:
        entries = socket.getaddrinfo(name.strip("[]"), _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{what} is neither an address nor a known host name: {error}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    return sorted(addresses, key=lambda address: ipaddress.ip_address(address.split("%")[0]).is_link_local)


def endpoint(address: str, port: int | str = "*") -> str:
    """What ZeroMQ binds or connects to."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this host reaches it. Names are looked up."""
    try:
        return ipaddress.ip_address(address.strip("[]").split("%")[0]).is_loopback
    except ValueError:
        return all(ipaddress.ip_address(found.split("%")[0]).is_loopback for found in resolve(address, address))


def is_bindable(address: str) -> bool:
    """Whether it is an address of this host."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def agree_on_address(group: Group) -> str:
    """Where this machine is reached. Only the leaders look, and all ranks hear what is wrong."""
    problem, found, address = None, None, None
    if group.num_machines == 1:
        return LOOPBACK
    if group.is_leader:
        try:
            found = find_address(group.address).to_json()
        except ValueError as error:
            problem = f"machine {group.machine}: {error}"
    group.agree("address", problem)
    told = group.gather("found", [group.machine, found])
    by_machine = {machine: AddressReport.from_json(values) for machine, values in told if values is not None}
    if group.is_leader:
        try:
            address = settle_address([by_machine[m] for m in range(group.num_machines)], group.machine)
        except ValueError as error:
            problem = str(error)
    group.agree("settled", problem)
    settled = {machine: given for machine, given in group.gather("addresses", [group.machine, address]) if given}
    return str(settled[group.machine])
