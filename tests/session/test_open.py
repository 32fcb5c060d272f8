"""Opening parts over several machines: who serves what, and that what is wrong on one is the same error on all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from gnnsys.comm import CommError
from gnnsys.comm.rendezvous import Group
from gnnsys.partition import write_parts
from gnnsys.session import open_parts
from gnnsys.session.graph_server import GraphServer
from gnnsys.session.open_parts import plan, survey
from tests.partition.part_graphs import homogeneous, random_assignment, stored_name
from tests.support.processes import run_ranks


def make_parts(path: Path, num_parts: int = 2, seed: int = 0) -> Path:
    graph = homogeneous(60, 200, seed)
    write_parts(graph, random_assignment(graph, num_parts, 1), path)
    return path


def test_a_survey_tells_the_parts_that_are_there(tmp_path):
    path = make_parts(tmp_path / "parts", 3)
    whole = survey(path)
    shutil.rmtree(path / "part-0001")
    assert whole["folders"] == [0, 1, 2] and survey(path) == whole | {"folders": [0, 2], "on_disk": [0, 2]}


def test_a_survey_tells_what_is_wrong(tmp_path):
    assert "is not a directory" in survey(tmp_path / "nothing")["error"]
    assert "has no manifest.json" in survey(tmp_path)["error"]
    (make_parts(tmp_path / "parts") / "manifest.json").write_text("{")
    assert "manifest.json is cut or altered" in survey(tmp_path / "parts")["error"]


def report(folders, digest="a", num_parts=4):
    return {"digest": digest, "num_parts": num_parts, "folders": folders, "path": "/data/parts"}


@pytest.mark.parametrize(
    ("reports", "paths", "words"),
    [
        ([report([0, 1, 2, 3]), {"error": "/data/parts is gone"}], ["p", "p"], "machine 1: /data/parts is gone"),
        (
            [report([0, 1]), report([2, 3], "b")],
            ["p", "p"],
            r"machine 1 has other parts than machine 0: .*manifest",
        ),
        ([report([0, 1]), report([1, 3])], ["p", "p"], "no machine has part 2 of 4: /data/parts/part-0002 is missing"),
        ([report([0, 1, 2, 3])], ["p", "q"], "different directories: rank 0 'p', rank 1 'q'"),
    ],
)
def test_reports_that_do_not_add_up_name_the_machine_and_the_file(reports, paths, words):
    with pytest.raises(ValueError, match=words):
        plan(reports, paths)


@pytest.mark.parametrize(
    ("folders", "placed"),
    [([[0, 1, 2, 3]] * 2, [0, 0, 1, 1]), ([[2, 3], [0, 1]], [1, 1, 0, 0]), ([[0, 1, 2, 3]] * 8, [0, 2, 4, 6])],
)
def test_parts_go_where_their_folders_are(folders, placed):
    assert plan([report(have) for have in folders], ["p"] * len(folders)) == placed


ATTEMPTS = """
import json, os, sys, gnnsys
os.chdir(os.path.join(sys.argv[1], "machine-" + os.environ["GROUP_RANK"]))
session = gnnsys.init(timeout=120)
told = []
for path in sys.argv[2:]:
    try:
        graph = gnnsys.open(path)
        told.append([graph.parts_here, graph.original_ids(__import__("torch").arange(60)).sum().item()])
    except ValueError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_a_server_that_was_started_again_still_checks_what_it_is_asked_to(tmp_path):
    path = make_parts(tmp_path / "parts", 1)
    damaged = path / stored_name(path, 0, "edges", 0, "indices")
    content = bytearray(damaged.read_bytes())
    content[-4] ^= 1  # another node, which is one
    damaged.write_bytes(content)
    server = GraphServer()
    try:
        server.open(str(path), [0], verify=False)  # as the next life of a server does
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(str(damaged))):
                server.open(str(path), [0], verify=True)
        server.open(str(path), [0], verify=False)
    finally:
        server.close()


def test_what_cannot_be_undone_does_not_hide_what_went_wrong(monkeypatch):
    class Gone:
        def request(self, *_, **__):
            raise CommError("it has gone")

    def refuse(*_, **__):
        raise ValueError("a file is damaged")

    monkeypatch.setattr(open_parts, "plan", lambda *_: [0])
    monkeypatch.setattr(open_parts, "_serve", refuse)
    remembered = []
    with pytest.raises(ValueError, match="a file is damaged"):
        open_parts.open_in_group(
            Group(), Gone(), "parts", verify=True, timeout=1, remember=lambda *what: remembered.append(what)
        )
    assert remembered[-1] == (None, ())


def test_what_is_wrong_on_one_machine_is_the_same_error_on_every_rank(tmp_path):
    first, second = tmp_path / "machine-0", tmp_path / "machine-1"
    for folder in (first, second):
        folder.mkdir()
    make_parts(first / "here only")
    for folder, seed in ((first, 0), (second, 1)):
        make_parts(folder / "different", seed=seed)
        make_parts(folder / "missing", 3)
        shutil.rmtree(folder / "missing" / "part-0001")
        make_parts(folder / "damaged")
        make_parts(folder / "good", 1)
    damaged = second / "damaged" / stored_name(second / "damaged", 1, "edges", 0, "indices")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    names = ["nowhere", "here only", "different", "missing", "damaged", "good", "different"]
    told = [json.loads(rank.stdout) for rank in run_ranks(ATTEMPTS, [1, 2], tmp_path, *names)]
    assert [t[:5] for t in told[1:]] == [told[0][:5]] * 2
    nowhere, here_only, different, missing, damage = told[0][:5]
    assert "machine 0: 'nowhere' is not a directory" in nowhere
    assert "machine 1: 'here only' is not a directory" in here_only
    assert "machine 1 has other parts than machine 0" in different and str(second / "different") in different
    assert "no machine has part 1 of 3" in missing and "missing/part-0001 is missing" in missing
    assert damage.startswith("machine 1: ") and str(damaged) in damage
    assert [t[5] for t in told] == [[[0], 60 * 59 // 2], [[], 60 * 59 // 2], [[], 60 * 59 // 2]]
    assert all("begin another with gnnsys.init()" in t[6] for t in told)
