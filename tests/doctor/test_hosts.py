"""Hosts of a lab over real ssh, whose links have a rate that is known: it is what the doctor measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnnsys.cli import main
from tests.launch.ssh_hosts import needs_ssh, ssh_hosts

MBIT = 40


# Of the rate itself; that agents measure both ways is in test_network.py, without ssh.
@pytest.mark.long
@needs_ssh
def test_the_rate_of_a_limited_link_is_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with ssh_hosts(tmp_path) as hosts:
        hosts.lab.set_rate(f"{MBIT}mbit")
        words = ["doctor", "--hosts", str(hosts.describe()), "--ssh", " ".join(hosts.ssh), "--json"]
        code = main([*words, "--connect-timeout", "120", "--seconds", "1"])
        for number in hosts.lab.hosts:
            hosts.await_nothing(number)
    found = {each["subject"]: each for each in json.loads(capsys.readouterr().out)}
    assert code == 0 and set(found) == {"h1", "h2", "h1->h2", "h2->h1"}
    for name in ("h1->h2", "h2->h1"):
        assert found[name]["state"] == "advice" and "rows of every batch cross it" in found[name]["why"]
        rate = float(found[name]["found"].split(" Gbit/s")[0])
        assert 0.5 * MBIT / 1000 < rate < 1.1 * MBIT / 1000
