"""Links between hosts: figures of others become lines, and real connections are measured."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import pytest

from gnnsys.doctor import ADVICE, FAILS, OK, judge_links, listen_once, look_at_hosts, measure_to
from gnnsys.launch import Host, LaunchOptions, LinkSpeed, ProbeServer, measure_link
from gnnsys.launch.network_probe import HELLO, MOST_BYTES, MOST_CLIENTS

GBIT = 1e9 / 8


def link(rate: float = 25.0, round_trip: float = 50e-6, target: str = "h2") -> LinkSpeed:
    return LinkSpeed("h1", target, rate * GBIT, round_trip)


def test_a_fast_link_is_well():
    (found,) = judge_links([link()])
    assert str(found) == "ok      h1->h2         25 Gbit/s by one connection, 50 us there and back"
    assert judge_links([]) == []


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([link(0.94)], "0.94 Gbit/s by one connection, 50 us there and back: rows of every batch cross it"),
        ([link(round_trip=3e-3)], "3,000 us there and back: each hop of a sample waits"),
        (
            [link(), link(), link(9.4, target="h7")],
            "the other links have 25 Gbit/s, and all ranks wait for the slowest",
        ),
    ],
)
def test_a_slow_link_is_worth_a_word(links: list[LinkSpeed], said: str):
    found = judge_links(links)
    assert [each.state for each in found] == [OK] * (len(links) - 1) + [ADVICE]
    assert said in str(found[-1]) and found[-1].remedy


def test_one_host_listens_and_the_other_measures():
    said: list[str] = []
    ready = threading.Event()
    came: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        ready.set()

    listening = threading.Thread(target=lambda: came.append(listen_once(0, say, timeout=60)))
    listening.start()
    assert ready.wait(60)
    port = int(re.findall(r"--to THIS_HOST:(\d+)", said[0])[0])
    socket.create_connection(("127.0.0.1", port)).close()  # no client of ours: it is let go, and the next one served
    (found,) = measure_to(f"127.0.0.1:{port}", seconds=0.01)
    listening.join(60)
    assert len(came) == 1 and came[0].endswith("127.0.0.1")
    assert found.subject == "here->127.0.0.1" and "Gbit/s by one connection" in found.found


def test_nobody_who_listens_is_a_failure_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (found,) = measure_to(f"127.0.0.1:{port}")
    assert found.state == FAILS and "Connection refused" in str(found)
    assert f"gnnsys doctor --listen {port} on 127.0.0.1" in found.remedy


def test_nobody_who_comes_is_said():
    with pytest.raises(ValueError, match=r"nobody came to port \d+ within 0\.01 s"):
        listen_once(0, lambda _: None, timeout=0.01)


@pytest.mark.parametrize("target", ["host", "host:", ":5", "host:x", "host:70000"])
def test_a_target_that_is_none_is_a_users_error(target: str):
    with pytest.raises(ValueError, match="--to must be HOST:PORT"):
        measure_to(target)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", HELLO + (MOST_BYTES + 1).to_bytes(8, "big")])
def test_a_server_lets_go_who_does_not_speak_as_a_client(sent: bytes):
    server = ProbeServer(address="127.0.0.1")
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), 60) as other:
            other.sendall(sent)
            other.settimeout(60)
            with contextlib.suppress(ConnectionResetError):  # it is let go with bytes unread
                assert other.recv(1) == b""
        assert measure_link("127.0.0.1", server.port, seconds=0.001)["rate"] > 0
    finally:
        server.close()
    with pytest.raises(OSError):
        measure_link("127.0.0.1", server.port, seconds=0.001)


def test_a_server_has_place_for_so_many_clients_and_lets_others_go():
    server = ProbeServer(address="127.0.0.1")
    server.start()
    with contextlib.ExitStack() as silent:
        for _ in range(MOST_CLIENTS):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
        with socket.create_connection(("127.0.0.1", server.port), 60) as other:
            assert other.recv(1) == b""
    server.close()


def test_hosts_are_looked_at_by_their_agents_and_links_measured_both_ways():
    """Two agents on this machine: what is asked of them is what ssh would bring."""
    hosts = [Host(name=name, address="127.0.0.1") for name in ("one", "two")]
    found = look_at_hosts(hosts, LaunchOptions(ssh=None), seconds=0.01)
    assert [each.subject for each in found] == ["one", "two", "one->two", "two->one"]
    assert [each.state for each in found[:2]] == [OK, OK] and "cores" in found[0].found
    assert all("Gbit/s" in each.found for each in found[2:])


def test_a_host_that_cannot_be_reached_is_a_failure_and_nothing_is_measured():
    hosts = [Host(name="one", address="127.0.0.1"), Host(name="two", address="127.0.0.2")]
    found = look_at_hosts(hosts, LaunchOptions(ssh=("no-such-ssh",)))
    assert [(each.subject, each.state) for each in found] == [("one", FAILS), ("two", FAILS)]
    assert "no-such-ssh cannot be run" in str(found[0]) and "a job would not start" in str(found[0])
