"""Cluster files: what may be written, what comes back, and one line for each mistake."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gnnsys.planning import Cluster, ClusterHost

TEXT = """
defaults: {cores: 16, memory: 64G, rate: 10gbit}
hosts:
  - {name: h1, gpus: {a100: 4}, parts: [1, 0]}
  - {name: h2, rate_out: 1gbit, uplink: rack2, gpus: 2, speed: 0.5}
  - {name: h3, cores: 0.45, rate: 250mbit, uplink: rack2, address: 10.0.0.3, slots: 2}
uplinks:
  rack2: {rate: 40gbit, rate_out: 20gbit}
gpu_speeds: {a100: 2}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    pytest.importorskip("yaml")
    file = tmp_path / "cluster.yaml"
    file.write_text(TEXT)
    return Cluster.from_file(file)


def test_a_file_says_what_each_host_has(cluster: Cluster) -> None:
    assert cluster.names == ["h1", "h2", "h3"]
    assert cluster["h1"] == ClusterHost(
        name="h1", cores=16, memory=64 << 30, gpus={"a100": 4}, rate_in=1.25e9, rate_out=1.25e9, parts=(0, 1)
    )
    second, third = cluster["h2"], cluster["h3"]
    assert (second.rate_in, second.rate_out, second.num_gpus, second.speed) == (1.25e9, 1.25e8, 2, 0.5)
    assert (third.cores, third.rate_in, third.parts) == (0.45, 31.25e6, None)
    assert dict(third.launch) == {"address": "10.0.0.3", "slots": 2}
    assert (cluster.uplinks["rack2"].rate_in, cluster.uplinks["rack2"].rate_out) == (5e9, 2.5e9)
    assert (cluster.gpu_speed("a100"), cluster.gpu_speed("gpu")) == (2.0, 1.0)


def test_what_is_saved_is_read_as_the_same(cluster: Cluster, tmp_path: Path) -> None:
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.from_file(tmp_path / "cluster.json") == cluster
    assert json.loads(json.dumps(cluster.to_json())) == cluster.to_json()


def test_hosts_may_be_a_mapping_by_name() -> None:
    one = Cluster.from_json({"hosts": {"a": {"cores": 2, "rate": "1gbit"}, "b": {"cores": 3, "rate": "unlimited"}}})
    two = Cluster.from_json(
        [{"name": "a", "cores": 2, "rate": "1gbit"}, {"name": "b", "cores": 3, "rate": "unlimited"}]
    )
    assert one == two
    assert one["b"].rate_in == math.inf


def test_settings_change_one_host_all_or_an_uplink_in_their_order(cluster: Cluster) -> None:
    settings = ["all.rate=1gbit", "h3.rate_in=10gbit", "h2.parts=3,2", "rack2.rate=8gbit", "gpu.t4=0.3", "h1.gpus=t4:8"]
    changed = cluster.with_settings(settings)
    assert [host.rate_out for host in changed] == [1.25e8] * 3
    assert [host.rate_in for host in changed] == [1.25e8, 1.25e8, 1.25e9]
    assert changed["h2"].parts == (2, 3)
    assert changed.uplinks["rack2"].rate_in == 1e9
    assert changed.gpu_speed("t4") == 0.3
    assert changed["h1"].gpus == {"t4": 8}
    assert cluster["h3"].rate_in == 31.25e6  # as it was


def test_a_host_name_in_a_setting_may_have_dots() -> None:
    cluster = Cluster.from_json([{"name": "gpu1.example.org", "cores": 2, "rate": "1gbit"}])
    assert cluster.with_settings(["gpu1.example.org.cores=4"])["gpu1.example.org"].cores == 4


HOST = {"name": "h1", "cores": 4, "rate": "1gbit"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([{**HOST, "core": 4}], "host h1: unknown key 'core': did you mean 'cores'?"),
        ([{**HOST, "colour": 4}], "host h1: unknown key 'colour': there are"),
        ({"host": [HOST]}, "unknown key 'host': did you mean 'hosts'?"),
        ([{**HOST, "rate": 0}], "host h1: rate: a rate must be more than 0, got 0"),
        ([{**HOST, "rate_in": "0mbit"}], "host h1: rate_in: a rate must be more than 0, got '0mbit'"),
        ([{**HOST, "rate": "10gb"}], "host h1: rate: a rate looks like 10gbit"),
        ([HOST, HOST], "host h1 is there twice"),
        ([{"name": "h1", "rate": "1gbit"}], "host h1: cores are missing"),
        ([{"name": "h1", "cores": 2}], "host h1: rate is missing"),
        ([{"name": "h1", "cores": 2, "rate_in": "1gbit"}], "host h1: rate is missing"),
        ([{**HOST, "cores": 0}], "host h1: cores must be a number of more than 0"),
        ([{**HOST, "queue": "50ms"}], "host h1: queue must be seconds, such as 0.05, got '50ms'"),
        ([{**HOST, "queue": -1}], "host h1: queue must be seconds"),
        ([{**HOST, "cores": True}], "host h1: cores must be a number of more than 0"),
        ([{**HOST, "memory": "lots"}], "host h1: memory: a size must look like"),
        ([{**HOST, "memory": 0}], "host h1: memory must be more than 0"),
        ([{**HOST, "gpus": {"a100": -1}}], "host h1: gpus must be how many of each kind"),
        ([{**HOST, "gpus": [1]}], "host h1: gpus must be how many of each kind"),
        ([{**HOST, "parts": [0, "x"]}], "host h1: parts must be whole numbers"),
        ([{**HOST, "parts": [1, 1]}], "host h1: part 1 is there twice"),
        ([{**HOST, "uplink": "rack"}], "host h1: there is no uplink 'rack'"),
        ({"hosts": [{**HOST, "uplink": "rak1"}], "uplinks": {"rack1": "1gbit"}}, "did you mean 'rack1'?"),
        ({"hosts": [HOST], "uplinks": {"rack1": {"rate_in": "1gbit"}}}, "uplink rack1: write its rate"),
        ({"hosts": [HOST], "uplinks": {"rack1": 0}}, "uplink rack1: rate: a rate must be more than 0"),
        ({"hosts": [HOST], "gpu_speeds": {"a100": 0}}, "speed must be a number of more than 0"),
        ({"hosts": [HOST], "defaults": {"name": "x"}}, "name is each host's own"),
        ([], "a cluster must have hosts"),
        ({}, "hosts must be a list or a mapping by name"),
        ([{"cores": 4}], "host 1: write a name, or a mapping with name"),
        ([{**HOST, "name": "a b"}], "name 'a b' must be letters"),
        ("h1", "a cluster is a mapping with hosts"),
    ],
)
def test_a_mistake_is_one_line_that_names_host_and_key(value: Any, told: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ValueError) as caught:
        Cluster.from_file(file)
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"hosts": [], "hosts": []}', "'hosts' is there twice"),
        ("{", "is no JSON"),
    ],
)
def test_a_file_that_is_no_json_is_told(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=told):
        Cluster.from_file(file)


def test_a_host_that_is_twice_in_a_yaml_mapping_is_told(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "cluster.yaml"
    file.write_text("hosts:\n  h1: {cores: 1, rate: 1gbit}\n  h1: {cores: 2, rate: 1gbit}\n")
    with pytest.raises(ValueError, match="'h1' is there twice"):
        Cluster.from_file(file)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no cluster file"):
        Cluster.from_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("h9.rate=1gbit", "h9.rate=1gbit: there is no host 'h9' in the cluster: it has"),
        ("h1.rat=1gbit", "unknown key 'rat': did you mean 'rate'?"),
        ("h1.rate=0", "a rate must be more than 0"),
        ("h1.rate", "a setting is HOST.KEY=VALUE"),
        ("rate=1gbit", "a setting is HOST.KEY=VALUE"),
        ("h1.uplink=none", "there is no uplink 'none'"),
    ],
)
def test_a_wrong_setting_is_told(cluster: Cluster, setting: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        cluster.with_settings([setting])
    assert told in str(caught.value)


def test_parts_on_disks_are_compared_with_the_parts_there_are() -> None:
    def on(*parts: list[int] | None) -> Cluster:
        told = [{"name": f"h{n}", "cores": 1, "rate": "1gbit"} for n in range(len(parts))]
        return Cluster.from_json([t if p is None else {**t, "parts": p} for t, p in zip(told, parts, strict=True)])

    on([0, 1], [2]).check_parts(3)
    on([0], None).check_parts(3)  # the second may have any
    with pytest.raises(ValueError, match="host h1 has part 3, and there are 3"):
        on([0], [3]).check_parts(3)
    with pytest.raises(ValueError, match="part 1 is on no host's disk"):
        on([0], [2]).check_parts(3)
