"""Plans: who takes part with how many ranks and which parts. What is wrong is one line, and nothing is started."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.graph import sbm
from gnnsys.launch import Checks, Host, HostGroup, LaunchOptions, LaunchPlan, PlannedHost, read_listing, read_plan
from gnnsys.partition import partition_graph
from gnnsys.planning import PlacedSampler
from gnnsys.session.planned_hosts import watch_of
from tests.launch.test_push import HERE, own_disks, push
from tests.support.processes import ROOT

PLAN = {
    "format": "gnnsys-launch-plan",
    "version": 1,
    "hosts": [{"name": "h3", "ranks": 2, "parts": [2, 0]}, {"name": "h1", "ranks": 1, "parts": [1]}],
    "parts_digest": "000000ff",
    "env": {"OMP_NUM_THREADS": "8"},
    "arguments": ["--batch-size", "512"],
}


@pytest.fixture(autouse=True)
def package_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def written(tmp_path: Path, plan: object) -> Path:
    (tmp_path / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return tmp_path / "plan.json"


def test_a_plan_is_read_as_it_is_written(tmp_path):
    plan = read_plan(written(tmp_path, PLAN))
    hosts = (PlannedHost(name="h3", num_ranks=2, parts=(2, 0)), PlannedHost(name="h1", num_ranks=1, parts=(1,)))
    words = ("--batch-size", "512")
    assert plan == LaunchPlan(hosts=hosts, parts_digest=255, env={"OMP_NUM_THREADS": "8"}, arguments=words)
    assert json.loads(plan.text()) == PLAN
    few = LaunchPlan(hosts=(PlannedHost(name="h1", num_ranks=3),))
    assert read_plan(written(tmp_path, few.text())) == few
    short = {key: PLAN[key] for key in ("format", "version")} | {"hosts": [{"name": "h1", "ranks": 3}]}
    assert read_plan(written(tmp_path, short)) == few


def test_hosts_of_a_description_take_part_as_the_plan_says(tmp_path):
    described = [Host(name=f"h{number}", address=f"10.0.0.{number}", slots=4, memory=7) for number in range(1, 5)]
    third, first = read_plan(written(tmp_path, PLAN)).choose(described, "the file")
    assert third == replace(described[2], slots=2, parts=(2, 0)) and first == replace(described[0], slots=1, parts=(1,))
    with pytest.raises(ValueError, match=r"the plan has host h3, hosts\.txt has not: it has h1, h2"):
        read_plan(tmp_path / "plan.json").choose(described[:2], "hosts.txt")


HOST, SAMPLER = {"name": "h1", "ranks": 1}, {"host": "h1", "trainer": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[", "is no JSON"),
        ('{"format": "a", "format": "b"}', "'format' is there twice"),
        ([1], 'it is no plan of a launch: "format" must be "gnnsys-launch-plan"'),
        ({"format": "gnnsys-parts"}, "it is no plan of a launch"),
        ({"version": 2}, "version 2 is not understood: make the plan anew (version 1)"),
        ({"host": []}, "the plan has an unknown key 'host': there are format, version, hosts"),
        ({"hosts": []}, '"hosts" must be a list of at least one'),
        ({"hosts": ["h1"]}, "host 1 must be"),
        ({"hosts": [{**HOST, "gpus": 1}]}, "host h1 has an unknown key 'gpus': there are name, ranks, parts, samplers"),
        ({"hosts": [{**HOST, "samplers": 2}]}, 'host h1: "samplers" must be a list, got 2'),
        ({"hosts": [{**HOST, "samplers": [{"host": "h1"}]}]}, 'h1: a sampler must be {"host": ..., "trainer": N}'),
        ({"hosts": [{**HOST, "samplers": [SAMPLER]}]}, "a sampler is for trainer 1 of h1, which has 1, counted from 0"),
        ({"hosts": [{**HOST, "name": "h2", "samplers": [SAMPLER]}]}, "trainer 1 of h1, which is no host of the plan"),
        ({"hosts": [{"name": "h1"}]}, 'host h1: "ranks" must be a whole number, got None'),
        ({"hosts": [{"name": "h1", "ranks": True}]}, '"ranks" must be a whole number, got True'),
        ({"hosts": [HOST, HOST]}, "host h1 is there twice"),
        ({"hosts": [{"name": "h1", "ranks": 0, "parts": [0]}]}, "no host of the plan has a rank"),
        ({"hosts": [HOST, {"name": "h2", "ranks": 0}]}, "host h2 has neither ranks nor parts nor samplers"),
        ({"hosts": [{**HOST, "parts": [-1]}]}, '"parts" must be a list of whole numbers, got [-1]'),
        ({"hosts": [{**HOST, "parts": [0, 0]}]}, "part 0 is served by h1 and by h1"),
        ({"hosts": [{**HOST, "parts": [1]}]}, "no host serves part 0, one serves part 1"),
        ({"hosts": [{**HOST, "parts": [0]}, {"name": "h2", "ranks": 1}]}, 'host h2 has no "parts", others have'),
        ({"parts_digest": 255}, '"parts_digest" must be eight hexadecimal digits, got 255'),
        ({"env": {"A": 1}}, '"env" must be a mapping of names to text'),
        ({"env": {"A=B": "1"}}, "'A=B' can be no name of a variable"),
        ({"arguments": "--fast"}, '"arguments" must be a list of words'),
    ],
)
def test_what_is_wrong_in_a_plan_is_one_line(tmp_path, change, message, capsys):
    file = written(tmp_path, {**PLAN, **change} if isinstance(change, dict) else change)
    assert main(["launch", "--local", "1", "--plan", str(file), "train.py"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert str(file) in told and message in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--local", "3"], "the plan has 2 hosts, --local has one: use --hosts FILE"),
        (
            ["--slurm", "--nodes", "2", "--ranks", "2"],
            "--ranks is what the plan says: leave it away, or change the plan",
        ),
        (["--k8s", "--image", "x"], "--plan is for --local or --hosts or --slurm, not for --k8s"),
    ],
)
def test_a_plan_that_does_not_fit_its_mode_is_refused(tmp_path, options, message, capsys):
    assert main(["launch", *options, "--plan", str(written(tmp_path, PLAN)), "train.py"]) == 2
    assert message in capsys.readouterr().err


def test_ranks_of_a_plan_are_those_of_this_machine(tmp_path, capsys):
    file = str(written(tmp_path, {**PLAN, "hosts": [{"name": "any", "ranks": 2}]}))
    assert main(["launch", "--local", "3", "--plan", file, "train.py"]) == 2
    assert "the plan has 2 ranks: write --local 2, got 3" in capsys.readouterr().err
    assert main(["launch", "--local", "2", "--plan", file, "--print", "train.py"]) == 0
    assert capsys.readouterr().out.startswith("localhost (127.0.0.1): ranks 0 to 1\n")


def test_what_would_run_is_printed_and_nothing_is_run(tmp_path, capsys):
    (tmp_path / "hosts").write_text("".join(f"h{n} address=10.0.0.{n} workdir=/data python=py\n" for n in range(1, 5)))
    command = ["launch", "--hosts", str(tmp_path / "hosts"), "--plan", str(written(tmp_path, PLAN)), "--port", "7000"]
    command += ["--env", "A=b c", "--restarts", "2", "--print", "train.py", "parts/"]
    assert main(command) == 0
    torchrun = "py -m torch.distributed.run --nnodes=2 --node-rank={} --nproc-per-node={} --master-addr=10.0.0.3"
    torchrun += " --master-port=7000 --rdzv-backend=static --max-restarts=0 train.py --batch-size 512 parts/"
    told = json.dumps({key: value for key, value in PLAN.items() if key not in ("env", "arguments")})
    env = "env GNNSYS_LAUNCH_HOST={} GNNSYS_SERVE_PARTS=000000ff:{} "
    env += f"'GNNSYS_PLAN={told.replace(' ', '')}' OMP_NUM_THREADS=8 'A=b c' ".replace("{", "{{").replace("}", "}}")
    assert capsys.readouterr().out.splitlines() == [
        "h3 (10.0.0.3): ranks 0 to 1, serves parts 2,0",
        "  cd /data && " + env.format("h3", "2,0") + torchrun.format(0, 2),
        "h1 (10.0.0.1): rank 2, serves parts 1",
        "  cd /data && " + env.format("h1", "1") + torchrun.format(1, 1),
        "again on all hosts where it fails: 2 times at most",
    ]


def test_a_mode_without_a_plan_prints_too_and_the_ranks_of_a_host_may_be_its_gpus(tmp_path, capsys):
    (tmp_path / "hosts").write_text("h1 slots=2\nh2\nh3 slots=1\n")
    assert main(["launch", "--hosts", str(tmp_path / "hosts"), "--print", "-m", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == ["h1: ranks 0 to 1", "h2: one rank per GPU", "h3: 1 rank"]
    assert "--nproc-per-node=GPUS" in lines[3] and all("--master-port=PORT" in line for line in lines[1::2])
    assert lines[1].endswith(" -m train")
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main(["launch", "--local", "1", "--print", str(script)]) == 0
    assert capsys.readouterr().out.startswith("localhost (127.0.0.1): rank 0\n") and not (tmp_path / "ran").exists()


def test_a_plan_of_other_parts_is_refused_by_every_host_and_one_of_these_is_heeded(tmp_path):
    partition_graph(sbm(500), 2, tmp_path / "parts")
    hosts = [replace(host, address="127.0.0.1") for host in own_disks(tmp_path, 2)]
    push(tmp_path / "parts", [replace(host, parts=(0, 1)) for host in hosts])
    right = read_listing(tmp_path / "parts").digest

    def findings(digest: int, *parts: tuple[int, ...], argument: str = "data") -> list[str]:
        told = [replace(host, parts=own) for host, own in zip(hosts, parts, strict=True)]
        group = HostGroup(told, LaunchOptions(ssh=HERE, connect_timeout=120.0), lambda *_: None)
        try:
            checks = Checks(arguments=[argument], parts_digest=digest)
            return [str(finding) for finding in group.connect(checks, 0.0, verify=True).findings]
        finally:
            group.close()

    assert findings(right, (1,), (0,)) == []
    (other,) = findings(right ^ 1, (1,), (0,))
    assert re.match(
        f"h0: the plan is for parts with the digest {right ^ 1:08x}, those of the script have {right:08x}", other
    )
    (none,) = findings(right, (1,), (0,), argument="nothing")
    assert f"the plan is for parts with the digest {right:08x}, those of the script have none" in none
    (beyond,) = findings(right, (1, 2), (0,))
    assert beyond.startswith("h0: data: part 2 is not there")
    (left,) = findings(right, (1,), ())
    assert "no machine has part 0 of 2" in left


def test_the_plan_of_a_placement_is_carried_out_as_it_is(tmp_path, capsys):
    hosts = [
        {"name": "h2", "parts": [1], "trainers": 2, "samplers": [{"host": "h1", "trainer": 0}]},
        {"name": "h1", "parts": [0, 2], "trainers": 1, "samplers": []},
    ]
    forecast = {"seconds_per_epoch": 1.5, "binds": "h1 out"}
    made = {"format": "gnnsys-placement-plan", "version": 1, "parts_digest": "000000ff", "hosts": hosts}
    made |= {"profile": {"digest": "ab", "path": "job.json"}, "predicted": forecast}
    plan = read_plan(written(tmp_path, made))
    first = PlannedHost(name="h2", num_ranks=2, parts=(1,), samplers=(PlacedSampler(host="h1", trainer=0),))
    hosts = (first, PlannedHost(name="h1", num_ranks=1, parts=(0, 2)))
    assert plan == LaunchPlan(hosts=hosts, parts_digest=255, seconds_per_epoch=1.5, binds="h1 out")
    assert plan.samplers_of("h1", 0) == [("h2", 0)] and plan.samplers_of("h2", 0) == []
    assert json.loads(plan.line_for_ranks(["a", "b"]))["hosts"][0]["samplers"] == [{"host": "b", "trainer": 0}]
    again = read_plan(written(tmp_path, plan.text()))
    assert again == plan
    (tmp_path / "hosts").write_text("h1\nh2\n")
    assert (
        main(["launch", "--hosts", str(tmp_path / "hosts"), "--plan", str(written(tmp_path, made)), "--print", "t.py"])
        == 0
    )
    expected = ["h2: ranks 0 to 1, serves parts 1", "h1: rank 2, serves parts 0,2"]
    assert [line for line in capsys.readouterr().out.splitlines() if line[0] != " "] == expected
    assert main(["launch", "--plan", str(written(tmp_path, made)), "--print", "t.py"]) == 0  # to the plan's hosts
    assert [line for line in capsys.readouterr().out.splitlines() if line[0] != " "] == expected
    assert main(["launch", "t.py"]) == 2
    assert "nobody says where" in capsys.readouterr().err


def test_parts_that_are_here_and_not_the_plans_are_noticed_before_anything_is_printed(tmp_path, capsys):
    partition_graph(sbm(40), 2, tmp_path / "parts")
    plan = str(written(tmp_path, {**PLAN, "parts_digest": "000000ff"}))
    line = ["launch", "--plan", plan, "--print", "train.py"]
    assert main([*line, "elsewhere/"]) == 0 and capsys.readouterr().out
    assert main([*line, str(tmp_path / "parts")]) == 2
    told = capsys.readouterr()
    assert not told.out and "the plan is for parts with the digest 000000ff" in told.err and "plan again" in told.err


def test_what_a_plan_predicts_is_compared_with_what_batches_take():
    plan = LaunchPlan(hosts=(PlannedHost(name="h1", num_ranks=1),), seconds_per_epoch=10.0, binds="the link into h1")
    watch = watch_of(plan)
    lines = [line for now in range(80) if (line := watch.take(float(now), 5))]
    assert lines and lines[0].startswith("an epoch takes 5 s, the plan said 10 s (-50%); the link into h1")
    assert watch_of(None) is None and watch_of(LaunchPlan(hosts=plan.hosts)) is None


def test_a_host_without_ranks_comes_last_and_runs_something_else(tmp_path, capsys):
    hosts = [{"name": "h2", "ranks": 0, "parts": [1]}, {"name": "h1", "ranks": 2, "parts": [0]}]
    (tmp_path / "hosts").write_text("h1 python=py\nh2 python=py\n")
    file = str(written(tmp_path, {**PLAN, "hosts": hosts}))
    assert main(["launch", "--hosts", str(tmp_path / "hosts"), "--plan", file, "--print", "train.py", "parts/"]) == 0
    once, made, first, torchrun, second, assists = capsys.readouterr().out.splitlines()
    assert "once" in once and made == "  ASSISTANTS=$(py -m gnnsys.cli assist --make h2=tcp://h2:PORT)"
    assert first == "h1: ranks 0 to 1, serves parts 0" and second == "h2: no ranks, serves parts 1"
    assert "--nnodes=1 --node-rank=0 --nproc-per-node=2 --master-addr=h1" in torchrun
    assert assists.endswith(' GNNSYS_ASSISTANTS="$ASSISTANTS" py -m gnnsys.cli assist')


def test_a_push_sends_what_the_plan_says_and_refuses_other_parts(tmp_path, capsys):
    partition_graph(sbm(500), 2, tmp_path / "parts")
    for host in own_disks(tmp_path, 3):
        with open(tmp_path / "hosts", "a") as file:
            file.write(f"{host.name} workdir={host.workdir}\n")
    hosts = [{"name": "h2", "ranks": 1, "parts": [1]}, {"name": "h0", "ranks": 1, "parts": [0]}]
    digest = f"{read_listing(tmp_path / 'parts').digest:08x}"
    command = ["push", str(tmp_path / "parts"), "--hosts", str(tmp_path / "hosts"), "--to", "data"]
    command += ["--ssh", shlex.join(HERE), "--connect-timeout", "120", "--plan", str(tmp_path / "plan.json")]
    written(tmp_path, {**PLAN, "hosts": hosts})
    assert main(command) == 2
    assert f"the plan is for parts with the digest 000000ff, {tmp_path}/parts has {digest}" in capsys.readouterr().err
    written(tmp_path, {**PLAN, "hosts": hosts, "parts_digest": digest})
    assert main(command) == 0
    there = {host: sorted(each.name for each in (tmp_path / host).glob("data/part-*")) for host in ("h0", "h1", "h2")}
    assert there == {"h0": ["part-0000"], "h1": [], "h2": ["part-0001"]}


def test_a_machine_serves_what_it_is_told_to(tmp_path, monkeypatch):
    from gnnsys.session.open_parts import plan, survey

    partition_graph(sbm(500), 2, tmp_path / "parts")
    digest = read_listing(tmp_path / "parts").digest
    reports = []
    for text, folders in (
        (None, [0, 1]),
        ("1", [1]),
        (f"{digest:08x}:0", [0]),
        (f"{digest ^ 1:08x}:0", [0, 1]),
        ("", []),
    ):
        if text is not None:
            monkeypatch.setenv("GNNSYS_SERVE_PARTS", text)
        reports.append(survey(tmp_path / "parts"))
        assert reports[-1]["folders"] == folders
    assert plan(reports[1:3], ["parts"] * 2) == [1, 0]
    monkeypatch.setenv("GNNSYS_SERVE_PARTS", "all")
    assert survey(tmp_path / "parts") == {"error": "GNNSYS_SERVE_PARTS must be parts such as 0,1, got 'all'"}
