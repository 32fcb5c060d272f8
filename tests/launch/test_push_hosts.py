"""Pushes over real ssh to hosts of a lab: what travels is counted on their wires."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from gnnsys.graph import sbm
from gnnsys.launch.part_files import file_problem, read_listing
from gnnsys.partition import partition_graph
from tests.launch.ssh_hosts import SshHosts, needs_ssh, ssh_hosts
from tests.support.processes import ROOT, await_true

pytestmark = needs_ssh
SIZE = 8 << 20  # seconds on a slow wire
AROUND = 300_000  # bytes of ssh itself, of manifests and messages


def push_command(hosts: SshHosts, folder: Path, source: Path) -> list[str]:
    """A push to folders of their own, as if these were the disks of the hosts."""
    for host in hosts.lab.names:
        (folder / host).mkdir()
        (folder / host / "gnnsys").symlink_to(ROOT / "gnnsys")
    file = hosts.describe(**{host: f"workdir={folder / host}" for host in hosts.lab.names})
    command = [sys.executable, "-m", "gnnsys.cli", "push", str(source), "--hosts", str(file), "--to", "data"]
    return [*command, "--ssh", " ".join(hosts.ssh), "--connect-timeout", "120"]


def test_a_killed_push_over_ssh_goes_on_in_the_middle_of_a_file(tmp_path):
    """A slow wire to the second host, kill -9 in the middle: the next push sends what the first has not brought."""
    source = tmp_path / "parts"
    partition_graph(sbm(500), 2, source)
    enlarge(source, 1, SIZE)
    listing = read_listing(source)
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        command = push_command(hosts, tmp_path, source)
        hosts.lab.set_rate("20mbit")
        with subprocess.Popen(command) as pushing:
            await_true(lambda: begun(tmp_path / "h2") > 1 << 20 or pushing.poll() is not None, "a megabyte")
            pushing.send_signal(signal.SIGKILL)
        hosts.lab.set_rate(None)
        for number in hosts.lab.hosts:
            hosts.await_nothing(number)
        there, before = begun(tmp_path / "h2"), hosts.lab.bytes()[2]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        moved = (hosts.lab.bytes()[2] - before).bytes_in
    assert 1 << 20 < there < SIZE and "were there of files that had been begun" in done.stdout
    assert moved < 1.1 * (SIZE - there) + AROUND
    for part, host in enumerate(("h1", "h2")):
        assert all(
            file_problem(tmp_path / host / "data", each, verify=True) is None for each in listing.of_parts([part])
        )


@pytest.mark.long  # the same to one host, above; shares and checksums in test_push.py
def test_eight_parts_to_four_hosts_travel_once_through_a_kill_and_a_changed_byte_is_found(tmp_path):
    source = tmp_path / "parts"
    partition_graph(sbm(2000), 8, source)
    for part in range(8):
        enlarge(source, part, SIZE // 2)
    listing, names = read_listing(source), ["h1", "h2", "h3", "h4"]
    own = {name: listing.of_parts([2 * n, 2 * n + 1]) for n, name in enumerate(names)}
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh", 4) as hosts:
        command = push_command(hosts, tmp_path, source)

        def moved_by(arguments: list[str]) -> tuple[list[int], str, str]:
            """Bytes that came to each host but the first, where ssh itself runs; and what was said."""
            before = [hosts.lab.bytes()[host].bytes_in for host in (2, 3, 4)]
            done = subprocess.run(arguments, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            after = [hosts.lab.bytes()[host].bytes_in for host in (2, 3, 4)]
            return [late - early for late, early in zip(after, before, strict=True)], done.stdout, done.stderr

        hosts.lab.set_rate("50mbit")
        first = [hosts.lab.bytes()[host].bytes_in for host in (2, 3, 4)]
        with subprocess.Popen(command) as pushing:
            enough = 2 << 20
            await_true(
                lambda: all(there(tmp_path / name) > enough for name in names[1:]) or pushing.poll() is not None,
                "two megabytes at each host",
            )
            pushing.send_signal(signal.SIGKILL)
        for number in hosts.lab.hosts:
            hosts.await_nothing(number)
        hosts.lab.set_rate(None)
        begun_by = [there(tmp_path / name) for name in names]
        assert all(enough < count < SIZE for count in begun_by[1:])
        killed = [hosts.lab.bytes()[host].bytes_in for host in (2, 3, 4)]
        moved, said, _ = moved_by(command)
        for n, name in enumerate(names):
            parts = [file for file in own[name] if file_problem(tmp_path / name / "data", file, verify=True)]
            assert parts == [] and not list((tmp_path / name).glob("data/part-*/.*.incoming"))
            assert sorted(each.name for each in (tmp_path / name / "data").glob("part-*")) == [
                f"part-{2 * n + k:04d}" for k in range(2)
            ]
        for n, name in enumerate(names[1:]):
            needed = sum(file.bytes for file in own[name])
            assert moved[n] < 1.1 * (needed - begun_by[n + 1]) + AROUND  # no file that had been begun came whole again
            assert needed < moved[n] + killed[n] - first[n] < 1.15 * needed + 2 * AROUND
        assert "were there of files that had been begun" in said
        idle, said, _ = moved_by(command)
        assert max(idle) < AROUND and said.count("0 B sent in 0 files") == 4
        file = tmp_path / "h3" / "data" / "part-0005" / "0000.npy"
        whole = file.read_bytes()
        file.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
        moved, said, errors = moved_by(command)
        assert "gnnsys push: h3: part-0005/0000.npy did not match its checksum, and was replaced" in errors
        assert file.read_bytes() == whole and moved[0] < AROUND and moved[2] < AROUND
        assert len(whole) < moved[1] < 1.1 * len(whole) + AROUND


def enlarge(folder: Path, part: int, size: int) -> None:
    """Makes the first array of a part larger, and the manifest say so: what is in files does not matter here."""
    from gnnsys.graph import manifest_checksum

    manifest = json.loads((folder / "manifest.json").read_text())
    name = f"part-000{part}/0000.npy"
    data = bytes(range(256)) * (size // 256)
    (folder / name).write_bytes(data)
    manifest["files"][name] |= {"bytes": len(data), "crc32": zlib.crc32(data)}
    manifest.pop("crc32")
    manifest["crc32"] = manifest_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def begun(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("data/part-*/.*.incoming"))


def there(folder: Path) -> int:
    """Bytes of parts that have come, whole files or begun ones."""
    return sum(file.stat().st_size for file in folder.glob("data/part-*/*"))
