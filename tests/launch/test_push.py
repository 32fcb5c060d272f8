"""Parts come to the hosts that serve them: each byte once, even after a kill, and a changed byte is found."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.graph import file_checksum, sbm
from gnnsys.launch import Checks, Host, LaunchOptions, PushOptions, push_parts
from gnnsys.launch.agent_files import Receiver
from gnnsys.launch.host_group import HostGroup
from gnnsys.launch.part_files import PartFile, file_problem, read_listing
from gnnsys.launch.push import shares_of
from gnnsys.partition import open_parts, partition_graph
from tests.support.processes import HANGS_AFTER, ROOT, await_true

NUM_PARTS, NUM_HOSTS = 8, 4


@pytest.fixture(autouse=True)
def package_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "parts"
    partition_graph(sbm(2000), NUM_PARTS, folder)
    return folder


def own_disks(folder: Path, num_hosts: int = NUM_HOSTS) -> list[Host]:
    """Hosts on this machine, whose agents run in folders of their own: `data` is another place for each."""
    made = []
    for number in range(num_hosts):
        (folder / f"h{number}").mkdir()
        made.append(Host(name=f"h{number}", workdir=str(folder / f"h{number}")))
    return made


HERE = ("sh", "-c", 'eval "exec $(for last; do :; done; echo "$last")"', "sh")  # the last word, as ssh has it run


def push(parts: Path, hosts: list[Host], **options):
    return push_parts(parts, hosts, PushOptions(ssh=HERE, connect_timeout=120.0, **options), to="data")


def test_each_host_gets_its_parts_once_and_nothing_the_second_time(parts, tmp_path):
    hosts, listing = own_disks(tmp_path), read_listing(parts)
    for turn, host in enumerate(push(parts, hosts)):
        assert host.error is None and host.parts == [2 * turn, 2 * turn + 1]
        files = listing.of_parts(host.parts)
        assert host.bytes_sent == sum(file.bytes for file in files) + (parts / "manifest.json").stat().st_size
        assert (host.files_sent, host.files_there) == (len(files) + 1, 0)
        there = tmp_path / f"h{turn}" / "data"
        assert sorted(each.name for each in there.iterdir()) == [
            "manifest.json",
            *(f"part-{p:04d}" for p in host.parts),
        ]
        for file in files:
            assert (there / file.name).read_bytes() == (parts / file.name).read_bytes()
        open_parts(there).part(host.parts[0])
    again = push(parts, hosts)
    assert [(host.bytes_sent, host.files_sent, host.error) for host in again] == [(0, 0, None)] * NUM_HOSTS


def test_a_changed_byte_is_found_named_and_replaced_and_nothing_else_is_sent(parts, tmp_path):
    hosts = own_disks(tmp_path, 1)
    push(parts, hosts)
    file = tmp_path / "h0" / "data" / "part-0003" / "0001.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    (pushed,) = push(parts, hosts)
    assert pushed.replaced == ["part-0003/0001.npy"] and pushed.bytes_sent == len(whole)
    assert file.read_bytes() == whole


def test_a_byte_that_changed_at_the_source_is_named_and_not_spread(parts, tmp_path):
    damaged = tmp_path / "parts"
    shutil.copytree(parts, damaged)
    file = damaged / "part-0002" / "0000.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (pushed,) = push(damaged, own_disks(tmp_path, 1))
    assert pushed.error == f"{file} does not match its checksum: it was altered here; make these parts again"
    there = tmp_path / "h0" / "data"
    assert not (there / "part-0002" / "0000.npy").exists() and not (there / "manifest.json").exists()


def test_a_byte_that_changes_on_its_way_is_found_by_the_host(parts, tmp_path):
    hosts = own_disks(tmp_path, 1)
    program = (
        "from gnnsys.launch import agent, agent_files\n"
        "put = agent_files.Receiver.put\n"
        "def flip(self, path, name, offset, data):\n"
        "    if name == 'part-0001/0000.npy':\n"
        "        data = data[:-1] + bytes([data[-1] ^ 1])\n"
        "    put(self, path, name, offset, data)\n"
        "agent_files.Receiver.put = flip\n"
        "agent.main()\n"
    )
    ssh = ("sh", "-c", f'cd {hosts[0].workdir}; exec {sys.executable} -c "$0"', program)
    (pushed,) = push_parts(parts, hosts, PushOptions(ssh=ssh, connect_timeout=120.0), to="data")
    assert pushed.error is not None and "part-0001/0000.npy does not match its checksum: a byte was" in pushed.error
    assert push(parts, hosts)[0].error is None


def test_a_file_that_was_begun_is_gone_on_with_where_it_ends(parts, tmp_path):
    """And from its beginning where what is there is not its beginning."""
    (host,) = own_disks(tmp_path, 1)
    push(parts, [host])
    folder = tmp_path / "h0" / "data" / "part-0000"
    (largest,) = sorted(folder.glob("*.npy"), key=lambda file: file.stat().st_size)[-1:]
    whole, name = largest.read_bytes(), subprocess.check_output(["hostname"], text=True).strip()
    begun = folder / f".{largest.name}.{name}.incoming"
    for beginning, sent in ((whole[:1000], len(whole) - 1000), (whole, 0), (b"x" * 1000, len(whole))):
        largest.unlink()
        begun.write_bytes(beginning)
        (pushed,) = push(parts, [host])
        assert (pushed.bytes_sent, pushed.resumed) == (sent, len(whole) - sent) and pushed.error is None
        assert largest.read_bytes() == whole and not begun.exists()


@pytest.fixture
def receivers():
    made = [Receiver(), Receiver()]
    yield made
    for each in made:
        each.close()


def test_two_pushes_to_one_place_do_not_mix(tmp_path, receivers):
    first, second = receivers
    place, data, own = str(tmp_path), bytes(range(256)), (256, zlib.crc32(bytes(range(256))))
    first.put(place, "x.npy", 0, data[:100])
    with pytest.raises(ValueError, match=r"x.npy cannot be written: another push is under way there"):
        second.have(place, [["x.npy", *own]], 0)
    second.put(place, "x.npy", 0, b"other")
    with pytest.raises(ValueError, match=r"x.npy cannot be written: another push is under way there"):
        second.finish(place, "x.npy", *own)
    first.put(place, "x.npy", 100, data[100:])
    first.finish(place, "x.npy", *own)
    assert (tmp_path / "x.npy").read_bytes() == data
    assert second.have(place, [["x.npy", *own]], 0)["whole"] == ["x.npy"]
    assert [file.name for file in tmp_path.iterdir()] == ["x.npy"]


def test_a_file_of_which_not_all_has_come_is_none(tmp_path, receivers):
    data = b"whole"
    receivers[0].put(str(tmp_path), "x.npy", 0, data)
    with pytest.raises(ValueError, match=r"x.npy: 5 of 6 bytes have come"):
        receivers[0].finish(str(tmp_path), "x.npy", 6, zlib.crc32(data))
    assert not (tmp_path / "x.npy").exists()


def test_what_is_received_stays_below_its_folder(tmp_path, receivers):
    inside = tmp_path / "inside"
    for name in ("../x", "/x", "part-0000/../../x", "part-0000/.x", ""):
        with pytest.raises(ValueError, match="is no file of a part"):
            receivers[0].put(str(inside), name, 0, b"x")
    receivers[0].put(str(inside), "x.npy", 0, b"x")
    (incoming,) = inside.iterdir()
    receivers[0].close()
    incoming.unlink()
    (tmp_path / "else").write_bytes(b"mine")
    incoming.symlink_to(tmp_path / "else")
    receivers[0].put(str(inside), "x.npy", 0, b"x")
    with pytest.raises(ValueError, match="cannot be written"):
        receivers[0].finish(str(inside), "x.npy", 1, zlib.crc32(b"x"))
    assert (tmp_path / "else").read_bytes() == b"mine" and {file.name for file in tmp_path.iterdir()} == {
        "else",
        "inside",
    }


def test_the_first_interrupt_ends_a_push(parts, tmp_path):
    """While a host has not answered."""
    (tmp_path / "hosts").write_text("h1\nh2\n")
    hangs = f"sh -c 'read line; echo >> {tmp_path}/asked; exec sleep 1000'"
    command = [sys.executable, "-m", "gnnsys.cli", "push", str(parts), "--hosts", str(tmp_path / "hosts")]
    command += ["--ssh", hangs, "--connect-timeout", "1000"]
    asked = tmp_path / "asked"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pushing:
        await_true(lambda: asked.exists() and asked.stat().st_size == 2, "two hosts")
        pushing.send_signal(signal.SIGINT)
        said = pushing.communicate(timeout=HANGS_AFTER)[1]
    assert pushing.returncode == 130 and said.splitlines()[-1] == "gnnsys push: interrupted"


def test_a_disk_that_cannot_be_written_is_told(parts, tmp_path):
    (host,) = own_disks(tmp_path, 1)
    (tmp_path / "h0" / "data").write_text("a file where a folder is to be")
    (pushed,) = push(parts, [host])
    assert pushed.error is not None and "data/part-0000/0000.npy cannot be written: " in pushed.error


def looked_at(hosts: list[Host]) -> list[str]:
    """What a launch finds wrong with `data` before it starts."""
    group = HostGroup(hosts, LaunchOptions(ssh=HERE, connect_timeout=120.0), lambda *_: None)
    try:
        return [str(finding) for finding in group.connect(Checks(parts="data"), 0.0, verify=True).findings]
    finally:
        group.close()


def test_a_launch_finds_what_a_push_has_not_brought_and_nothing_once_it_has(parts, tmp_path):
    hosts = [replace(host, address="127.0.0.1") for host in own_disks(tmp_path, 2)]
    remedy = "gnnsys push data --hosts FILE"
    push(parts, hosts)
    assert looked_at(hosts) == []
    (tmp_path / "h1" / "data" / "manifest.json").write_text((parts / "manifest.json").read_text() + " ")
    assert looked_at(hosts) == [f"h1: data has other parts than on h0: {remedy} --overwrite"]
    (tmp_path / "h1" / "data" / "manifest.json").unlink()
    assert looked_at(hosts) == [f"h1: data has no manifest.json, as h0 has: {remedy}"]


def test_other_parts_are_not_overwritten_unless_asked(parts, tmp_path):
    hosts = own_disks(tmp_path, 1)
    partition_graph(sbm(500), 2, tmp_path / "h0" / "data")
    (pushed,) = push(parts, hosts)
    assert pushed.error == "data holds other parts there: remove them, or push with --overwrite"
    assert push(parts, hosts, overwrite=True)[0].error is None
    assert open_parts(tmp_path / "h0" / "data").num_parts == NUM_PARTS


def test_who_gets_what_is_decided_as_open_does_or_as_described():
    hosts = [Host(name=f"h{number}") for number in range(3)]
    assert shares_of(8, hosts) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert shares_of(2, hosts) == [[0], [1], []]
    told = [Host(name="a", parts=(1,)), Host(name="b", parts=(0, 1))]
    assert shares_of(2, told) == [[1], [0, 1]]
    with pytest.raises(ValueError, match="host a is to serve part 1, there are 1: 0 to 0"):
        shares_of(1, told)
    with pytest.raises(ValueError, match="no host is to serve part 2"):
        shares_of(3, told)


def test_a_listing_without_torch_says_what_the_parts_room_says(parts, tmp_path):
    listing, opened = read_listing(parts), open_parts(parts)
    assert listing.num_parts == opened.num_parts
    stored = [sum(file.bytes for file in listing.of_parts([part])) for part in range(NUM_PARTS)]
    assert stored == [sum(opened.stored_bytes(part).values()) for part in range(NUM_PARTS)]
    assert all(file.crc32 == file_checksum(parts / file.name) for file in listing.files)
    assert all(file_problem(parts, file, verify=True) is None for file in listing.files)
    for text, why in (
        ("{}", "is no manifest of parts"),
        ("[", "is no manifest"),
        (
            json.dumps(
                {"format": "gnnsys-parts", "files": {"../x": {"bytes": 1, "crc32": 1}}, "book": {"num_parts": 1}}
            ),
            "'../x'",
        ),
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=why):
            read_listing(tmp_path)
    assert file_problem(tmp_path, PartFile("x", 1, zlib.crc32(b"x")), verify=True) == f"{tmp_path / 'x'} is missing"
