"""gnnsys serve: a server on its own, opened from another process; refused beyond loopback without a key."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gnnsys
from gnnsys.cli import main
from gnnsys.comm import CommError, Keys
from gnnsys.comm.key_file import make_key, read_key
from gnnsys.graph import NODE
from gnnsys.partition import write_parts
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.processes import module_code, processes

SERVE = module_code("gnnsys.cli")


@pytest.fixture(scope="module")
def graph():
    return homogeneous(80, 300)


@pytest.fixture(scope="module")
def parts(graph, tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "parts"
    write_parts(graph, random_assignment(graph, 2, 1), path)
    return path


def test_served_parts_are_opened_with_their_key_alone(graph, parts, tmp_path):
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    make_key(wrong)
    with processes() as running:
        arguments = ["serve", parts, "--key", key, "--bind", "localhost", "--parts"]
        running.start("server 0", [sys.executable, "-m", "gnnsys.cli", *arguments, 0])  # as users have it
        running.start_code("server 1", SERVE, *arguments, 1)
        servers = []
        for number in (0, 1):
            printed = running.await_output(number, "open it with")
            assert f"serving part {number} of {parts} at tcp://" in printed and f"key={str(key)!r}" in printed
            servers.append(printed.splitlines()[0].split()[-1])
        assert key.stat().st_mode & 0o777 == 0o600
        with gnnsys.init(process_group=False) as session:
            opened = gnnsys.open(parts, servers=servers, key=key)
            ids = torch.arange(80)
            assert torch.equal(opened.node_data[NODE]["x"][ids], graph.node_data[NODE]["x"][opened.original_ids(ids)])
            chosen = opened.original_ids(gnnsys.split(opened, "train").ids)
            assert sorted(chosen.tolist()) == graph.node_data[NODE]["train_mask"].nonzero().view(-1).tolist()
            with pytest.raises(ValueError, match="no server has part 1 of 2"):
                session.open(parts, servers=servers[:1], key=key)
        with gnnsys.init(process_group=False, timeout=0.5) as session, pytest.raises(CommError):
            session.open(parts, servers=servers, key=wrong)
        for _, process in running.processes:
            process.send_signal(signal.SIGINT)
        assert [ended.returncode for ended in running.wait()] == [0, 0]


def test_without_a_key_file_one_is_made_for_the_run_that_only_its_owner_reads(parts):
    with processes() as running:
        running.start_code("server", SERVE, "serve", parts)
        running.start_code("open server", SERVE, "serve", parts, "--no-key")
        first, second = (running.await_output(number, "open it with").splitlines() for number in (0, 1))
        key = Path(first[1].partition("key='")[2].partition("'")[0])
        assert key.stat().st_mode & 0o777 == 0o600 and "key=" not in second[1]
        with gnnsys.init(process_group=False, timeout=120) as session:
            for printed, has_key in ((first, key), (second, None)):
                opened = session.open(parts, servers=[printed[0].split()[-1]], key=has_key)
                assert opened.num_nodes() == 80
        with gnnsys.init(process_group=False, timeout=0.5) as session, pytest.raises(CommError):
            session.open(parts, servers=[first[0].split()[-1]])
        for _, process in running.processes:
            process.send_signal(signal.SIGTERM)
        assert [ended.returncode for ended in running.wait()] == [0, 0]
        assert not key.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bind", "0.0.0.0"], "--bind 0.0.0.0 is open to other machines: give --key FILE"),
        (["--bind", "0.0.0.0", "--no-key"], "--bind 0.0.0.0 is open to other machines: give --key FILE"),
        (["--bind", "[::]:0"], "is open to other machines: give --key FILE"),
        (["--bind", "localhost:port"], "--bind must be HOST or HOST:PORT, got 'localhost:port'"),
        (["--parts", "0,7"], "--parts must be in [0, 2), got '0,7'"),
        (["--parts", "all"], "--parts must be whole numbers with commas"),
        (["--key", "."], "is not a key file"),
    ],
)
def test_what_cannot_be_served_is_explained(parts, capsys, arguments, words):
    assert main(["serve", str(parts), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_key_file_keeps_its_key(tmp_path):
    keys = make_key(tmp_path / "key")
    assert make_key(tmp_path / "key") == read_key(tmp_path / "key") == keys
    assert Keys.from_json(json.loads((tmp_path / "key").read_text())) == keys


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_file_that_others_may_read_is_refused(tmp_path, mode):
    make_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    for use in (make_key, read_key):
        with pytest.raises(ValueError, match=rf"key is not a key file: .*mode {mode:o}.*chmod 600"):
            use(tmp_path / "key")


def test_those_who_make_one_key_at_a_time_get_the_same_and_never_meet_an_empty_file(tmp_path):
    for round in range(20):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(make_key, [tmp_path / f"key-{round}"] * 8))
        assert made == made[:1] * 8
    assert len(list(tmp_path.iterdir())) == 20
