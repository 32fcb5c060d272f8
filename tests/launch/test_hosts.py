"""A cluster's description: three ways to write the same, and one line for whatever is wrong in it."""

from __future__ import annotations

import json
import re
import sys

import pytest

from gnnsys.launch import Host, local_hosts, read_hosts

LINES = """
# two hosts
h1 address=10.0.0.1 slots=2 user=me   # the first
h2 port=2222 gpus=4 memory=8g python=/opt/python workdir=/data parts=1,3
"""
ENTRIES = [
    {"name": "h1", "address": "10.0.0.1", "slots": 2, "user": "me"},
    {
        "name": "h2",
        "port": 2222,
        "gpus": 4,
        "memory": "8g",
        "python": "/opt/python",
        "workdir": "/data",
        "parts": [1, 3],
    },
]
YAML = """
defaults: {user: me, slots: 2}
hosts:
  - h1
  - {name: h2, slots: 3}
"""


def test_a_hosts_file_and_json_say_the_same(tmp_path):
    (tmp_path / "hosts").write_text(LINES)
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": ENTRIES}))
    found = read_hosts(tmp_path / "hosts")
    assert found == read_hosts(tmp_path / "hosts.json")
    assert found[0] == Host(name="h1", address="10.0.0.1", slots=2, user="me")
    assert (found[1].address, found[1].memory, found[1].parts) == ("h2", 8 << 30, (1, 3))
    assert found[0].python == sys.executable and found[0].parts is None


def test_yaml_has_defaults_for_all_hosts(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "cluster.yaml").write_text(YAML)
    first, second = read_hosts(tmp_path / "cluster.yaml")
    assert (first.name, first.user, first.slots) == ("h1", "me", 2)
    assert (second.name, second.user, second.slots) == ("h2", "me", 3)


def test_a_host_runs_a_rank_per_gpu_unless_it_is_told():
    assert [Host(name="h").num_ranks(gpus) for gpus in (0, 4)] == [1, 4]
    assert Host(name="h", gpus=2).num_ranks(4) == 2
    assert Host(name="h", slots=3, gpus=2).num_ranks(2) == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hosts", "h1\nh2\nh1\n", "hosts, line 3: host h1 is there twice: for several ranks on it write slots=N once"),
        ("hosts", "h1 address=a\nh2 address=a", "h2 has the address of h1: give each host its own"),
        ("hosts", "# nobody\n", "hosts names no host: write one host name per line"),
        ("hosts", "h1 h2", "line 1: 'h2' is no key=value: write one host per line"),
        ("hosts", "h1 slot=2", "line 1: unknown key 'slot': there are name, address, slots"),
        ("hosts", "h1 slots=2 slots=3", "line 1: slots is there twice"),
        ("hosts", "h1 slots=0", "slots must be a whole number of at least 1, got '0'"),
        ("hosts", "h1 port=99999", "port must be from 1 to 65535, got 99999"),
        ("hosts", "h1 workdir=data", "workdir must be an absolute path, got 'data'"),
        ("hosts", "-oProxyCommand=x", "must be letters, digits"),
        ("hosts", "h1 parts=a", "parts must be whole numbers, such as 0,1, got 'a'"),
        ("hosts", "h1 memory=lots", "a size must look like"),
        ("hosts.json", "{", "hosts.json is no JSON"),
        ("hosts.json", '{"hosts": ["a"], "hosts": []}', "'hosts' is there twice"),
        ("hosts.json", '{"host": []}', "must have hosts, a list"),
        ("hosts.json", '{"hosts": [], "wheels": 4}', "unknown key 'wheels': there are hosts, defaults"),
        ("hosts.json", '{"hosts": [{"slots": 1}]}', "host 1: write a name, or a mapping with name"),
        ("hosts.json", '{"hosts": ["a"], "defaults": {"name": "b"}}', "name is each host's own"),
        ("hosts.json", '{"hosts": [{"name": "a", "slots": true}]}', "slots must be a whole number"),
        ("hosts.json", '{"hosts": []}', "names no host"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_what_to_write(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as told:
        read_hosts(tmp_path / name)
    assert "\n" not in str(told.value)


def test_a_mark_of_its_encoding_and_a_short_address_are_no_mistakes(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfh1\n::1\n")
    assert [host.name for host in read_hosts(tmp_path / "hosts")] == ["h1", "::1"]


def test_a_file_that_is_not_there_and_no_ranks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no hosts file .*: write one host name per line"):
        read_hosts(tmp_path / "none")
    with pytest.raises(ValueError, match="--local must be at least 1 rank, got 0"):
        local_hosts(0)
