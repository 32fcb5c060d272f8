"""What hosts say of themselves becomes findings: one line each, with host, problem and remedy."""

from __future__ import annotations

import pytest

from gnnsys.launch import Host, judge_host, judge_versions
from gnnsys.launch.host_group import LaunchOptions, traceback_of
from gnnsys.launch.preflight import MOST_SKEW, served_parts
from gnnsys.launch.rank_output import BEGIN, END, RankOutput

FACTS = {
    "versions": {"gnnsys": "1", "torch": "2", "python": "3"},
    "memory_free": 8 << 30,
    "gpus": 0,
    "limits": {"open_files": 65536, "locked": None},
    "workdir": "/work",
    "python": "/opt/python",
    "has_script": True,
}


def judged(*, clock: float = 0.0, ranks: int = 2, host: Host | None = None, **changed) -> list[str]:
    return [str(each) for each in judge_host(host or Host(name="h1"), {**FACTS, **changed}, ranks, 8, clock)]


def test_a_host_that_has_all_it_needs_has_no_findings():
    assert judged() == [] and judge_versions({"h1": FACTS, "h2": FACTS}) == []
    assert judged(clock=MOST_SKEW, gpus=2, limits={"open_files": None, "locked": None}) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"has_script": False}, "h1: the script is not there: copy the script there"),
        ({"memory_free": 100 << 20}, "h1: 100.0 MiB of memory are free, 1.0 GiB are needed: end other programs"),
        ({"host": Host(name="h1", memory=16 << 30)}, "16.0 GiB are needed"),
        ({"host": Host(name="h1", gpus=4)}, "h1: 0 GPUs are there, the hosts file says 4: check nvidia-smi"),
        ({"gpus": 1}, "h1: 2 ranks for 1 GPUs: set slots to 1"),
        ({"clock": 6.25}, "h1: its clock is 6.2 s ahead of the launcher's: set the clocks by NTP"),
        ({"clock": -7.0}, "h1: its clock is 7.0 s behind the launcher's"),
        ({"limits": {"open_files": 256, "locked": None}}, "h1: at most 256 open files, 640 are needed: ulimit -Hn 640"),
        ({"gpus": 2, "limits": {"open_files": None, "locked": 1 << 16}}, "of locked memory: GPUs cannot read"),
    ],
)
def test_each_thing_that_is_wrong_is_one_line_with_its_remedy(changed, said):
    (found,) = judged(**changed)
    assert said in found and "\n" not in found


def test_the_odd_one_out_has_the_wrong_version():
    odd = {**FACTS, "versions": {**FACTS["versions"], "torch": "2.1"}}
    (found,) = judge_versions({"h1": odd, "h2": FACTS, "h3": FACTS})
    assert str(found).startswith("h1: torch is 2.1, and 2 on h2: install the same torch there")
    own = {**FACTS["versions"], "gnnsys": "0", "torch": "1"}
    assert judge_versions({"h1": FACTS}, FACTS["versions"]) == []
    (found,) = judge_versions({"h1": FACTS}, own)  # torch may be another one: the launcher does not train
    assert str(found).startswith("the launcher: gnnsys is 0, and 1 on h1: install the same gnnsys here")
    none = {**FACTS, "versions": {**FACTS["versions"], "torch": "missing"}}
    assert [str(each) for each in judge_versions({"h1": none})] == [
        "h1: torch is not installed for /opt/python: install torch"
    ]


def test_parts_are_served_as_open_will_decide():
    everywhere = [{"parts": [0, 1, 2, 3]}] * 2
    hosts = [Host(name="h1"), Host(name="h2")]
    assert served_parts(4, hosts, everywhere) == [[0, 1], [2, 3]]
    assert served_parts(2, hosts, [{"parts": [1]}, {"parts": [0]}]) == [[1], [0]]
    assert served_parts(2, hosts, [{"parts": [1]}, {"parts": []}]).problem == "no machine has part 0 of 2"
    promised = [Host(name="h1"), Host(name="h2", parts=(1,))]
    assert served_parts(2, promised, [{"parts": [0, 1]}, {"parts": [0]}]).problem == "part 1 is not there"


def test_pieces_of_lines_become_lines_of_their_ranks():
    output = RankOutput()
    text = f"own\n{BEGIN}0{END}he{BEGIN}1{END}one\n{BEGIN}0{END}llo\nwarning\n{BEGIN}1{END}last"
    for cuts in range(1, len(text)):  # wherever the pipe cuts it
        output = RankOutput()
        found = [*output.feed(text[:cuts]), *output.feed(text[cuts:]), *output.close()]
        assert sorted(found, key=str) == sorted(
            [(None, "own"), (1, "one"), (0, "hello"), (None, "warning"), (1, "last")], key=str
        ), cuts
    assert [len(line) for _, line in output.feed(f"{BEGIN}0{END}" + "x" * 200_000)] == [1 << 16] * 3


def test_the_last_traceback_is_what_a_rank_failed_with():
    lines = ["noise", "Traceback (most recent call last):", "  a", "E: 1", "Traceback (most recent call last):", "E: 2"]
    assert traceback_of(lines) == ("Traceback (most recent call last):", "E: 2")
    assert traceback_of(["killed"]) == ("killed",) and traceback_of([]) == ()


@pytest.mark.parametrize(("option", "value"), [("restarts", -1), ("lost_after", 0.0), ("grace", -1.0)])
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} must be .*, got {value}"):
        LaunchOptions(**{option: value})
