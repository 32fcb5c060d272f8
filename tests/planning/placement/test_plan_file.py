from __future__ import annotations

import copy
import json

import pytest

from gnnsys.planning import (
    PlacedHost,
    PlacedSampler,
    PlacementForecast,
    PlacementPlan,
    RunnerUp,
    is_placement_plan,
)

HOSTS = (
    PlacedHost(name="h1", parts=(0, 2), num_trainers=2, samplers=(PlacedSampler(host="h1", trainer=1),)),
    PlacedHost(name="h2", parts=(1,), num_trainers=1),
    PlacedHost(name="h3", samplers=(PlacedSampler(host="h1", trainer=1), PlacedSampler(host="h2", trainer=0))),
)


def plan() -> PlacementPlan:
    return PlacementPlan(
        hosts=HOSTS,
        parts_digest=0x00C0FFEE,
        forecast=PlacementForecast(
            seconds_per_epoch=12.5,
            binds="the link out of h1",
            shares={"h1 out": 0.75},
            bounds={"busiest link": 11.0},
            settings={"policy": "maxmin"},
        ),
        profile_digest="abc",
        profile_path="job.json",
        runners_up=(RunnerUp(name="even", hosts=HOSTS[:2], seconds_per_epoch=14.0),),
        cluster={"hosts": []},
    )


def test_a_file_says_what_the_plan_said(tmp_path):
    plan().save(tmp_path / "plan.json")
    assert PlacementPlan.from_file(tmp_path / "plan.json") == plan()
    assert is_placement_plan(json.loads((tmp_path / "plan.json").read_text()))


def test_it_answers_who_serves_what_and_who_samples_for_whom():
    found = plan()
    assert found.host_of_part() == ("h1", "h2", "h1") and found.num_parts == 3
    assert (found.num_trainers, found.num_samplers) == (3, 3)
    assert found.samplers_of("h1", 1) == ("h1", "h3") and found.samplers_of("h1", 0) == ()
    assert found.host("h2").num_trainers == 1
    with pytest.raises(ValueError, match="did you mean 'h2'"):
        found.host("h22")


def test_a_plan_of_other_parts_or_hosts_is_refused():
    plan().check_parts(0x00C0FFEE, "parts/")
    with pytest.raises(ValueError, match="digest 00c0ffee, parts/ has 00000001"):
        plan().check_parts(1, "parts/")
    plan().check_host_names(["h3", "h2", "h1", "h0"])
    with pytest.raises(ValueError, match="the plan has host h3, this job has not: it has h1, h2"):
        plan().check_host_names(["h1", "h2"])


WRONG = [
    (("version",), 9, "version 9 is not understood"),
    (("format",), "other", "no plan of a placement"),
    (("host",), [], "unknown key 'host': did you mean 'hosts'"),
    (("parts_digest",), "xyz", "eight hexadecimal digits"),
    (("profile",), None, '"profile" must be'),
    (("runners_up",), {}, "must be a list"),
    (("cluster",), [], '"cluster" must be an object'),
    (("hosts",), [], "a list of at least one"),
    (("hosts", 0, "name"), "", "host 1 must be"),
    (("hosts", 0, "name"), "h2", "host h2 is there twice"),
    (("hosts", 0, "trainer"), 3, "host h1 has an unknown key 'trainer': did you mean 'trainers'"),
    (("hosts", 0, "trainers"), -1, '"trainers" must be a whole number'),
    (("hosts", 0, "trainers"), True, '"trainers" must be a whole number'),
    (("hosts", 0, "trainers"), 1, "trainer 1 of h1, which has 1"),
    (("hosts", 0, "parts"), [0, 1, 2], "part 1 is served by h1 and by h2"),
    (("hosts", 0, "parts"), [0, 3], "no host serves part 2, one serves part 3"),
    (("hosts", 0, "parts"), 0, '"parts" must be a list'),
    (("hosts", 0, "samplers"), {}, '"samplers" must be a list'),
    (("hosts", 0, "samplers", 0, "trainer"), "x", "a sampler must be"),
    (("hosts", 0, "samplers", 0, "host"), "h11", "no host of the plan: did you mean 'h1'"),
    (("predicted",), [], '"predicted" must be'),
    (("predicted", "second"), 1, "unknown key 'second'"),
    (("predicted", "binds"), 1, '"binds" must be text'),
    (("predicted", "seconds_per_epoch"), float("nan"), "a number of 0 or more"),
    (("predicted", "shares", "x"), "much", '"shares" has no number'),
    (("runners_up", 0, "name"), 1, "runner-up 1 must be"),
    (("runners_up", 0, "seconds_per_epoch"), None, "runner-up 1"),
]


@pytest.mark.parametrize(("where", "value", "told"), WRONG)
def test_what_is_wrong_is_one_line_that_names_the_file(where, value, told, tmp_path):
    values = copy.deepcopy(plan().to_json())
    inner = values
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as error:
        PlacementPlan.from_file(tmp_path / "plan.json")
    assert told in str(error.value) and "plan.json: " in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_none_is_one_line(tmp_path):
    (tmp_path / "text").write_text("{")
    for name, told in (("absent", "there is no plan"), ("text", "is no JSON"), (".", "cannot be read")):
        with pytest.raises(ValueError, match=told):
            PlacementPlan.from_file(tmp_path / name)


def test_a_plan_without_hosts_or_trainers_is_none():
    forecast = PlacementForecast(seconds_per_epoch=1, binds="")
    for hosts, told in (((), "needs a host"), ((PlacedHost(name="h1", parts=(0,)),), "has a trainer")):
        with pytest.raises(ValueError, match=told):
            PlacementPlan(hosts=hosts, parts_digest=0, forecast=forecast, profile_digest="")
