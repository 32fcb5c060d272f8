"""What hosts can do is measured by agents of their own, with encrypted messages: several hosts on this machine here,
hosts with links of known rates in the lab."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.comm import CURVE, Keys
from gnnsys.lab import Lab, available
from gnnsys.launch import bounded_by_others
from gnnsys.launch.agent_measures import AgentMeasures
from gnnsys.launch.core_work import core_speed, core_work
from gnnsys.launch.message_rates import NUM_SLICES, RateServer, _Arrivals, host_rate, pull_rates
from gnnsys.observe import usable_core_time
from gnnsys.planning import Cluster, MachineProfile
from gnnsys.planning.cluster.cluster_sketch import as_written
from tests.support.processes import HANGS_AFTER, ROOT

# In the place of ssh: every host is this machine. What it is told to run is its last word, the host the one before.
SSH = """#!/bin/sh
for word; do host=$last; last=$word; done
case $host in
  127.0.0.9) echo "ssh: connect to host 127.0.0.9 port 22: No route to host" >&2; exit 255;;
  127.0.0.8) other="import gnnsys.launch.local_facts as facts; facts.source_digest = lambda: str(0)"
             last=$(echo "$last" | sed "s/import sys;/import sys; $other;/");;
esac
exec sh -c "$last"
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of `gnnsys plan`, that measure what is in cluster.json."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    files = ["--cluster", str(tmp_path / "cluster.json"), "--out", str(tmp_path / "out.json")]
    limits = ["--seconds", "0.1", "--cost-seconds", "0", "--connect-timeout", str(HANGS_AFTER)]
    return ["plan", "--measure", *files, "--ssh", str(ssh), *limits]


def test_names_become_a_cluster_that_can_be_planned_for(words, tmp_path: Path, capsys) -> None:
    (tmp_path / "cluster.json").write_text(
        '{"defaults": {"address": "127.0.0.1"}, '
        '"hosts": ["a", {"name": "b", "speed": 7, "rate_in": "3mbit", "cores": 0.5, "memory": "1G"}]}'
    )
    assert main(words) == 0
    cluster = Cluster.from_file(tmp_path / "out.json")
    a, b = cluster
    assert (b.speed, b.rate_in, b.cores, b.memory) == (7, 3e6 / 8, 0.5, 1 << 30)
    assert 0.2 < a.speed < 5  # the same machine, which may be busy
    assert a.cores == pytest.approx(usable_core_time(), rel=0.01) and a.memory is not None
    assert all(1e5 < rate < 1e12 for rate in (a.rate_in, a.rate_out, b.rate_out))
    assert dict(a.launch) == {"address": "127.0.0.1"}
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[:3]] == ["host", "a", "b"]
    assert "rate into a" in told.err and "rate into b" not in told.err and "rate out of b" in told.err


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ({"address": "127.0.0.9"}, "b: cannot be reached: ssh: connect to host 127.0.0.9 port 22: No route to host"),
        ({"address": "127.0.0.8"}, "(0), and "),
        ({"address": "127.0.0.1", "python": "BARE"}, "b: there is no gnnsys for"),
        ({"address": "127.0.0.1", "workdir": "/nowhere"}, "b: sh: 1: cd: can't cd to /nowhere: set workdir"),
        ({"address": "127.0.0.1", "port": 0}, "host b: port must be from 1 to 65535"),
    ],
)
def test_a_host_that_cannot_be_measured_is_one_line_and_nothing_is_written(
    host, says: str, words, tmp_path: Path, capsys
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    text = str([{"name": "a", "address": "127.0.0.1"}, {"name": "b", **host}]).replace("'", '"')
    (tmp_path / "cluster.json").write_text(text.replace("BARE", str(bare)))
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(("gnnsys plan: error: b: ", "gnnsys plan: error: host b: ")) and says in line
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--ssh", "no-such-ssh"], "there is no program no-such-ssh here"),
        (["--seconds", "0"], "--seconds must be from 0.1 to 600"),
        (["--cost-seconds", "-1"], "--cost-seconds must be from 1 to 600, or 0"),
        (["--reference", "z"], "--reference z is no host of the cluster: it has a, b"),
        (["--trainers", "3"], "--trainers has no meaning with --measure"),
        (["--out", "/nowhere/out.json"], "the folder /nowhere does not exist"),
    ],
)
def test_wrong_options_are_one_line_before_any_host_is_asked(more, says, words, tmp_path: Path, capsys) -> None:
    (tmp_path / "cluster.json").write_text('["a", "b"]')
    assert main([*words, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_one_host_alone_has_no_rate_to_measure(words, tmp_path: Path, capsys) -> None:
    (tmp_path / "cluster.json").write_text('["a"]')
    assert main(words) == 2
    assert "a is the only host: nothing goes over its link" in capsys.readouterr().err


def test_options_of_a_measurement_need_one(capsys) -> None:
    assert main(["plan", "--sizes", "nodes=1,edges=1,features=1", "--again"]) == 2
    assert "--again needs --measure" in capsys.readouterr().err


def test_a_rate_is_what_came_in_each_slice_of_the_time() -> None:
    """10 bytes a second, and 40 in the second half; before it begins and after it ends anything may come."""
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    arrivals = _Arrivals(times, sizes=[999.0, 10.0, 10.0, 40.0, 40.0, 999.0])
    assert arrivals.rates(0.0, 4.0) == pytest.approx([10] * 4 + [40] * 4)
    assert host_rate([arrivals.rates(0.0, 2.0), arrivals.rates(2.0, 4.0)]) == pytest.approx(50)
    assert arrivals.cover(2.0, 5.0) and not arrivals.cover(2.0, 5.5) and not arrivals.cover(3.0, 4.0)


def test_a_pause_of_a_machine_does_not_change_a_rate() -> None:
    steady, paused = [2.0] * NUM_SLICES, [3.0] * (NUM_SLICES - 3) + [0.0, 0.0, 5.0]
    assert host_rate([steady, paused]) == 5.0


@pytest.mark.parametrize("encrypts", [True, CURVE])
def test_rates_of_several_hosts_are_told_by_name_and_add_up_to_what_their_servers_sent(encrypts) -> None:
    keys = Keys.generate(encrypts=encrypts)
    servers = {"a": RateServer(keys), "b": RateServer(keys)}
    try:
        peers = {name: f"tcp://127.0.0.1:{server.port}" for name, server in servers.items()}
        rates = pull_rates(peers, keys, 0.2)
        assert rates.keys() == {"a", "b"} and {len(each) for each in rates.values()} == {NUM_SLICES}
        mean = [sum(each) / NUM_SLICES for each in rates.values()]
        assert min(mean) > 1e5
        sent = [server._server.counters()["kinds"]["PULL"]["bytes_out"] for server in servers.values()]
        assert all(size > 0.19 * rate for size, rate in zip(sent, mean, strict=True))  # for 0.2 s and more
    finally:
        for server in servers.values():
            server.close()


def test_a_host_that_does_not_answer_is_named_by_its_deadline() -> None:
    server = RateServer(Keys.generate())
    try:
        with pytest.raises(RuntimeError, match=r"^a "):
            pull_rates({"a": f"tcp://127.0.0.1:{server.port}"}, Keys.generate(), 0.1, patience=1.0)
    finally:
        server.close()


def test_a_speed_is_the_ratio_of_work() -> None:
    own = core_work(0.01)
    assert own.keys() == {"serving", "sampling", "encrypting"} and min(own.values()) > 0
    assert core_speed(own, own) == pytest.approx(1)
    assert core_speed(own, {kind: 3 * seconds for kind, seconds in own.items()}) == pytest.approx(3)
    with pytest.raises(ValueError, match="same kinds"):
        core_speed(own, {"serving": 1.0})


@pytest.mark.long
def test_a_machine_without_a_cost_profile_has_one_afterwards_and_is_not_measured_twice(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = AgentMeasures().costs(1.0, gpus=0)
    (file,) = (tmp_path / "gnnsys" / "profiles").glob("*.json")
    assert MachineProfile.load(file).seconds_taken == made["seconds"] and made["error"] >= 0
    assert AgentMeasures().costs(1.0, gpus=0) == made


def test_a_rate_that_is_all_that_others_can_is_told() -> None:
    rates = {name: {"rate_in": 50.0, "rate_out": 50.0} for name in "bcd"} | {"a": {"rate_in": 148.0, "rate_out": 100.0}}
    every = {name: ["rate_in", "rate_out"] for name in rates}
    assert bounded_by_others(rates, every) == ["a: rate_in is all that the others send: its own link may be faster"]
    assert bounded_by_others(rates, {**every, "a": ["rate_out"]}) == []


@pytest.mark.long
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_rates_and_cores_of_a_lab_are_found(words, tmp_path: Path) -> None:
    """Links of 250, 250, 50 and 50 Mbit/s, each within 5%, while the sum over a host's links is more than its own."""
    wanted = {"h1": 250, "h2": 250, "h3": 50, "h4": 50}
    with Lab(4, rate=[f"{rate}mbit" for rate in wanted.values()], cpu=[None, None, 0.8, 0.8]) as lab:
        (tmp_path / "cluster.json").write_text('["h1", "h2", "h3", "h4"]')
        ssh = f"{sys.executable} {ROOT}/launch/lab.py ssh --lab {lab.id} --"
        assert main([*words, "--ssh", ssh, "--seconds", "3"]) == 0
    for host in Cluster.from_file(tmp_path / "out.json"):
        for rate in (host.rate_in, host.rate_out):
            assert 8e-6 * rate == pytest.approx(wanted[host.name], rel=0.05), host
        assert 0.5 < host.speed < 2
        assert host.cores == (0.8 if host.name in ("h3", "h4") else as_written("cores", usable_core_time()))
