"""Hosts of a lab with a real sshd each, keys made for the test, and nothing of the user's own ~/.ssh.

The launcher of a test runs outside of the lab: its ssh client enters the network of the first host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnsys.lab import Command, Lab, available
from tests.support.processes import HANGS_AFTER, ROOT

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if os.path.exists("/usr/sbin/sshd") else None)
PORT = 2200
NOWHERE = "10.77.9.9"  # an address that only ssh knows: it leads to the second host


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if SSHD is None or shutil.which("ssh") is None:
        return "needs ssh and sshd: apt-get install openssh-server"
    return available()


needs_ssh = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class SshHosts:
    """A lab whose hosts run sshd. `ssh` is the command to give to a launcher."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self._daemons: dict[int, Command] = {}
        for name in ("host_key", "user_key"):
            quiet = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(quiet, check=True, stdin=subprocess.DEVNULL)
        (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        known = [f"[{lab.address(host)}]:{PORT} {public}\n" for host in lab.hosts]
        (folder / "known_hosts").write_text("".join(known))
        (folder / "ssh_config").write_text(
            f"Host {NOWHERE}\n  HostName {lab.address(2)}\n"
            f"Host *\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  User root\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n  KexAlgorithms curve25519-sha256\n"  # others take a tenth of a second
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own empty folder
        for host in lab.hosts:
            self.boot(host)

    @property
    def ssh(self) -> tuple[str, ...]:
        network = f"--net=/proc/{self.lab._first_pids[0]}/ns/net"
        return ("nsenter", network, "ssh", "-F", str(self.folder / "ssh_config"))

    def boot(self, host: int) -> None:
        """Starts a host's sshd, and waits until it listens."""
        config = self.folder / f"sshd_config_{host}"
        config.write_text(
            f"ListenAddress {self.lab.address(host)}\nPort {PORT}\nHostKey {self.folder}/host_key\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\nAllowUsers root\nMaxStartups 100\n"
            f"SetEnv PYTHONPATH={ROOT}\n"  # whatever other checkout is installed here
        )
        assert SSHD is not None
        daemon = self.lab.start(host, [SSHD, "-D", "-e", "-f", str(config)])
        deadline = time.monotonic() + HANGS_AFTER
        while "Server listening" not in daemon.output:
            assert not daemon.done() and time.monotonic() < deadline, daemon.output
            time.sleep(0.01)
        self._daemons[host] = daemon

    def describe(self, name: str = "hosts", **of_each: str) -> Path:
        """A hosts file of all hosts. `of_each`: further words, `h2="slots=2 python=..."`."""
        lines = []
        for number, host in zip(self.lab.hosts, self.lab.names, strict=True):
            own = of_each.get(host, "")
            workdir = "" if "workdir=" in own else f"workdir={ROOT}"
            address = "" if "address=" in own else f"address={self.lab.address(number)}"
            lines.append(f"{host} {address} port={PORT} {workdir} {own}\n")
        file = self.folder / name
        file.write_text("".join(lines))
        return file

    def processes(self, host: int) -> set[str]:
        """Command lines of what runs on a host beside its sshd and what sshd runs by itself."""
        found = set()
        for pid in self._daemons[host].pids():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if text and not text.startswith("sshd:"):
                    found.add(f"{pid} {text}")
        return {line for line in found if SSHD is None or f" {SSHD} -D" not in f" {line}"}

    def await_nothing(self, host: int) -> None:
        deadline = time.monotonic() + HANGS_AFTER
        while left := self.processes(host):
            assert time.monotonic() < deadline, f"on host {host} there is still {left}"
            time.sleep(0.02)


@contextlib.contextmanager
def ssh_hosts(folder: Path, num_hosts: int = 2) -> Iterator[SshHosts]:
    with Lab(hosts=num_hosts) as lab:
        yield SshHosts(lab, folder)
