from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.cli.plan_placement import manifest_digest, trainers_and_parts
from gnnsys.graph import sbm
from gnnsys.partition import partition_graph
from gnnsys.planning import PlacedHost, PlacementPlan
from tests.planning.profile.profiles import made_profile

CLUSTER = {
    "defaults": {"cores": 4, "rate": "1gbit", "slots": 2},
    "hosts": [{"name": "h1"}, {"name": "h2"}, {"name": "h3", "rate": "10mbit"}],
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with parts, a cluster file and a profile of these parts."""
    partition_graph(sbm(200), 3, tmp_path / "parts")
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    made_profile(3, parts_digest=manifest_digest(str(tmp_path / "parts"))).save(tmp_path / "job.json")
    return tmp_path


def plan_line(job: Path, *more: str, **changes: str) -> list[str]:
    given = {"cluster": job / "cluster.json", "profile": job / "job.json", "trainers": "3", "steps": "300"} | changes
    return ["plan", str(job / "parts"), *(f"--{name}={value}" for name, value in given.items()), *more]


def test_a_plan_is_made_written_and_asked_what_if(job, capsys):
    assert main(plan_line(job, "--out", str(job / "plan.json"))) == 0
    shown = capsys.readouterr().out
    for told in ("3 trainers, 3 parts", "s per epoch", "binds ", "at least ", "runners-up", "even", "written: "):
        assert told in shown, told
    plan = PlacementPlan.from_file(job / "plan.json")
    assert plan.num_trainers == 3 and plan.num_parts == 3 and plan.profile_path == "job.json"
    assert main(["simulate", str(job / "plan.json")]) == 0
    assert "1.00 times the plan's" in capsys.readouterr().out
    trace = job / "timeline.json"
    line = ["simulate", str(job / "plan.json"), "--set", "all.rate=1mbit", "--trainers", "9", "--trace", str(trace)]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "what binds: " in shown and "link" in shown and "note: " in shown and "slots" in shown
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_runner_up_with_the_trainers_of_the_plan_says_its_parts():
    hosts = (PlacedHost(name="h1", parts=(0, 1), num_trainers=2), PlacedHost(name="h2", parts=(2,)))
    others = (PlacedHost(name="h1", parts=(0,), num_trainers=2), PlacedHost(name="h2", parts=(1, 2)))
    elsewhere = (replace(hosts[0], num_trainers=1), replace(hosts[1], num_trainers=1))
    assert trainers_and_parts(others, hosts) == "h1 2, parts 0; h2 0, parts 1 2"
    assert trainers_and_parts(elsewhere, hosts) == "h1 1, h2 1"


def test_a_kind_of_gpu_that_nobody_says_the_speed_of_is_named(job, capsys):
    hosts = [{"name": f"h{n}", "gpus": {kind: 2}} for n, kind in enumerate(("h200", "t4", "a10"))]
    (job / "cluster.json").write_text(json.dumps({**CLUSTER, "hosts": hosts}))
    profile = made_profile(3, parts_digest=manifest_digest(str(job / "parts")))
    for computes_on, settings, told in (
        ("h200", [], "GPU of kind a10, t4 is: it counts as fast as the profile's, h200; --set gpu.a10=0.5"),
        ("h200", ["gpu.t4=0.3", "gpu.a10=0.5"], None),
        ("cpu", [], None),
    ):
        replace(profile, computes_on=computes_on).save(job / "job.json")
        assert main(plan_line(job, *(f"--set={setting}" for setting in settings))) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if "nobody says" in line]
        assert notes == [] if told is None else len(notes) == 1 and told in notes[0]


def test_every_number_is_there_as_json(job, capsys):
    assert main(plan_line(job, "--json", "-")) == 0
    told = json.loads(capsys.readouterr().out)
    assert PlacementPlan.from_json(told).num_trainers == 3
    (job / "plan.json").write_text(json.dumps(told | {"profile": told["profile"] | {"path": "job.json"}}))
    assert main(["simulate", str(job / "plan.json"), "--set", "h1.cores=0.01", "--json", "-"]) == 0
    slower = json.loads(capsys.readouterr().out)
    assert slower["cluster"]["hosts"][0]["cores"] == 0.01
    assert slower["predicted"]["seconds_per_epoch"] >= told["predicted"]["seconds_per_epoch"]


def part_elsewhere(plan: PlacementPlan) -> tuple[str, int, int]:
    """A host of a plan, a part that it serves, and one that it does not."""
    host = next(host for host in plan.hosts if host.parts)
    return host.name, host.parts[0], (host.parts[0] + 1) % 3


def test_bad_use_is_one_line(job, tmp_path, capsys):
    assert main(plan_line(job, "--out", str(job / "plan.json"))) == 0
    files = {
        "key": CLUSTER | {"hosts": [{"name": "h1", "core": 3}]},
        "zero": CLUSTER | {"hosts": [{"name": "h1", "rate": 0}]},
        "twice": CLUSTER | {"hosts": [{"name": "h1"}, {"name": "h1"}]},
        "disk": CLUSTER | {"hosts": [{"name": "h1", "parts": [0, 1]}]},
        "others": CLUSTER | {"hosts": [{"name": "other"}]},
    }
    for name, values in files.items():
        (job / f"{name}.json").write_text(json.dumps(values))
    made_profile(3).save(job / "foreign.json")
    (job / "empty.json").write_text("")
    capsys.readouterr()
    plan = ["simulate", str(job / "plan.json")]
    (job / "hosts.txt").write_text("other1\nother2\n")
    host, part, kept = part_elsewhere(PlacementPlan.from_file(job / "plan.json"))
    on_disks = [f"--set={name}.parts={kept if name == host else '0,1,2'}" for name in ("h1", "h2", "h3")]
    for line, told in [
        (plan_line(job, cluster=str(job / "key.json")), "unknown key 'core': did you mean 'cores'?"),
        (plan_line(job, cluster=str(job / "zero.json")), "host h1: rate: a rate must be more than 0, got 0"),
        (plan_line(job, cluster=str(job / "twice.json")), "host h1 is there twice"),
        (plan_line(job, cluster=str(job / "disk.json")), "part 2 is on no host's disk"),
        (plan_line(job, cluster=str(job / "absent.json")), "absent.json"),
        (plan_line(job, trainers="7"), "slots lack 1: 7 trainers need 7, 3 hosts have 6 beside their parts: add"),
        (plan_line(job, trainers="0"), "--trainers must be at least 1"),
        (plan_line(job, profile=str(job / "foreign.json")), "the profile is of parts with the digest 00000abc"),
        (plan_line(job, profile=str(job / "empty.json")), "is no JSON"),
        (plan_line(job, profile=str(job / "absent.json")), "there is no profile"),
        (plan_line(job, "--samplers", "some"), "--samplers must be auto or a whole number"),
        (plan_line(job, "--policy", "lottery"), "policy is 'lottery'"),
        (plan_line(job, "--cost", "much"), "cost is one of path, bound, load"),
        (plan_line(job, "--out", str(job / "no" / "plan.json")), "does not exist"),
        (plan_line(job, "--set", "h9.rate=1gbit"), "there is no host 'h9'"),
        (plan_line(job, "--set", "zz.rate=1gbit"), "there is no host 'zz' in the cluster: it has h1, h2, h3"),
        (plan_line(job, "--set", "h1.colour=1"), "unknown key 'colour': there are cores, memory, gpus, rate, rate_in"),
        (plan_line(job, "--set", "all.slots=0"), "no host can hold a trainer: it needs 1 slots"),
        (plan_line(job, "--set", "h1.rate=10"), "h1.rate=10: rate: 10 is 10 bytes per second: write its unit"),
        (plan_line(job, "--set", "gpu.t4=0.5"), "gpu.t4: no host has such a GPU"),
        (plan_line(job, "--memory", "1g"), "--memory is about one machine"),
        (["plan", str(job), "--cluster", str(job / "cluster.json")], "needs --profile job.json"),
        (["plan", str(job), *plan_line(job)[2:]], "has no manifest.json"),
        (["plan", "sbm-100", "--trainers", "3"], "--trainers needs --cluster FILE"),
        ([*plan, "--cluster", str(job / "others.json")], "the cluster has not: it has other"),
        ([*plan, *on_disks], f"the plan has part {part} on {host}, whose disk has {kept}: push it there, or make"),
        ([*plan, "--set", "zz.rate=1gbit"], "there is no host 'zz' in the cluster: it has h1, h2, h3"),
        ([*plan, "--set", "h1.rate=0"], "h1.rate=0: rate: a rate must be more than 0, got '0'"),
        (["profile", str(job / "parts"), "--trace", str(job / "empty.json"), "--out", "x"], "empty.json: it is empty"),
        (
            ["launch", "--plan", str(job / "plan.json"), "--hosts", str(job / "hosts.txt"), __file__],
            "hosts.txt has not",
        ),
        ([*plan, "--profile", str(job / "foreign.json")], "the profile is of parts with the digest 00000abc"),
        ([*plan, "--set", "h1.rates=1gbit"], "did you mean 'rate'?"),
        ([*plan, "--trace", str(job / "no" / "timeline.json")], "does not exist"),
        ([*plan, "--trainers", "0"], "--trainers must be at least 1"),
        (["simulate", str(job / "job.json")], "no plan of a placement"),
        (["simulate", str(job / "absent.json")], "make one with gnnsys plan PARTS --cluster FILE --profile FILE --out"),
    ]:
        assert main(line) == 2, line
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith(f"gnnsys {line[0]}: error: ") and told in error, (
            line,
            error,
        )


def test_a_plan_whose_profile_was_made_anew_says_so(job, capsys):
    assert main(plan_line(job, "--out", str(job / "plan.json"))) == 0
    digest = manifest_digest(str(job / "parts"))
    made_profile(3, parts_digest=digest, batch_size=20).save(job / "job.json")
    assert main(["simulate", str(job / "plan.json")]) == 2
    assert "another profile than that of the plan" in capsys.readouterr().err
    assert main(["simulate", str(job / "plan.json"), "--profile", str(job / "job.json")]) == 0
