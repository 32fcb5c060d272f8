"""Cluster files that lack what is to be measured: what is missing, and what a filled-in file keeps of a person's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gnnsys.planning import Cluster, ClusterSketch

FOUND = {"cores": 4.0, "memory": 3 << 30, "gpus": 0, "rate_in": 31.2e6, "rate_out": 6.243e6, "speed": 0.98765}
ALL = ["cores", "memory", "gpus", "rate_in", "rate_out", "speed"]


def test_names_alone_are_enough_and_everything_is_missing() -> None:
    for value in (["h1", "h2"], {"hosts": ["h1", "h2"]}, {"hosts": {"h1": None, "h2": {}}}):
        sketch = ClusterSketch(value)
        assert sketch.names == ["h1", "h2"]
        assert sketch.missing("h1") == sketch.missing("h2") == ALL


def test_a_filled_in_file_is_a_cluster_with_what_was_measured() -> None:
    cluster = Cluster.from_json(ClusterSketch({"hosts": ["h1"]}).filled({"h1": FOUND}))
    host = cluster["h1"]
    assert (host.cores, host.memory, host.num_gpus, host.speed) == (4, 3 << 30, 0, 0.988)
    assert host.rate_in == pytest.approx(31.2e6, rel=0.005) and host.rate_out == pytest.approx(6.243e6, rel=0.005)


def test_what_a_person_has_written_stays() -> None:
    written = {
        "defaults": {"memory": "64G", "gpus": 0},
        "hosts": [{"name": "h1", "cores": 2, "address": "10.0.0.1", "uplink": "rack"}, {"name": "h2", "rate": "9mbit"}],
        "uplinks": {"rack": "40gbit"},
        "gpu_speeds": {"t4": 0.3},
    }
    sketch = ClusterSketch(written)
    assert sketch.missing("h1") == ["rate_in", "rate_out", "speed"]
    assert sketch.missing("h2") == ["cores", "speed"]
    filled = sketch.filled({"h1": FOUND, "h2": FOUND})
    assert {key: filled[key] for key in written if key != "hosts"} == {
        key: written[key] for key in written if key != "hosts"
    }
    assert filled["hosts"][0] == {**written["hosts"][0], "rate_in": "250mbit", "rate_out": "49.9mbit", "speed": 0.988}
    assert filled["hosts"][1] == {**written["hosts"][1], "cores": 4, "speed": 0.988}
    cluster = Cluster.from_json(filled)
    assert (cluster["h1"].memory, cluster["h1"].cores) == (64 << 30, 2)
    assert cluster["h2"].rate_in == cluster["h2"].rate_out == 9e6 / 8


def test_again_replaces_rates_and_speeds_and_nothing_else() -> None:
    hosts = [{"name": "h1", "cores": 2, "memory": "1G", "gpus": 1, "rate": "1gbit", "speed": 3}]
    again = ClusterSketch({"hosts": hosts}, again=True)
    assert again.missing("h1") == ["rate_in", "rate_out", "speed"]
    host = Cluster.from_json(again.filled({"h1": FOUND}))["h1"]
    assert (host.cores, host.memory, host.num_gpus) == (2, 1 << 30, 1)
    assert host.rate_in == 31.25e6 and host.rate_out == pytest.approx(6.243e6, rel=0.005) and host.speed == 0.988
    assert ClusterSketch({"hosts": hosts}).missing("h1") == []


@pytest.mark.parametrize("name", ["new.json", "new.yaml"])
def test_the_file_is_written_at_once_and_read_as_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / name
    file.write_text("what was there before")
    sketch = ClusterSketch({"hosts": ["h1"], "uplinks": {"rack": "1gbit"}})
    sketch.save(file, {"h1": FOUND})
    assert Cluster.from_file(file) == Cluster.from_json(sketch.filled({"h1": FOUND}))
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"hosts": []}, "a cluster must have hosts"),
        ({"hosts": ["h1", "h1"]}, "host h1 is there twice"),
        ({"hosts": [{"name": "h1", "coers": 1}]}, "host h1: unknown key 'coers': did you mean 'cores'?"),
        ({"hosts": [{"name": "h1", "rate": 0}]}, "host h1: rate: a rate must be more than 0"),
        ({"hosts": [{"name": "h1", "uplink": "r"}]}, "host h1: there is no uplink 'r'"),
        ({"hostes": ["h1"]}, "hosts must be a list"),
        ({"hosts": ["h1"], "uplink": {}}, "unknown key 'uplink'"),
        (3, "a cluster file must be a mapping"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_before_anything_is_measured(value: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ValueError) as raised:
        ClusterSketch.from_file(file)
    assert says in str(raised.value) and str(raised.value).startswith(f"{file}: ")
    assert "\n" not in str(raised.value)


def test_a_host_of_which_nothing_was_found_is_told() -> None:
    with pytest.raises(ValueError, match="host h2: cores are missing"):
        ClusterSketch({"hosts": ["h1", "h2"]}).filled({"h1": FOUND})
