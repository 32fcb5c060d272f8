"""A rank that a nursery forked cannot tell that it was not started by itself, and neither can who waits for it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.nursery import Nursery, forks_ranks
from tests.support.processes import (
    HANGS_AFTER,
    alive,
    await_true,
    clean_environment,
    processes,
    run_ranks,
    start_ranks,
)

pytestmark = pytest.mark.skipif(not forks_ranks(), reason="ranks are started one by one here")

LOOK = """
import atexit, json, os, sys, threading
atexit.register(lambda: print("exit functions are called"))
threading.Timer(0.2, print, ("threads are waited for",)).start()
told = {
    "argv": sys.argv[1:], "main": __name__, "file": __file__ == sys.argv[0] == sys.modules["__main__"].__file__,
    "session": os.getsid(0) == os.getpid(), "rank": os.environ["RANK"], "given": os.environ.get("GIVEN"),
    "home": sys.path[0] == os.path.dirname(__file__), "input": sys.stdin.read(), "hash": hash("a name"),
    "files": sorted(os.readlink(f"/proc/self/fd/{n}").rpartition("/")[2] for n in (0, 1, 2)),
}
print(json.dumps(told))
"""


def test_a_rank_has_its_own_arguments_environment_output_and_session_and_ends_in_order():
    ranks = run_ranks(LOOK, [1, 1], "one", 2, environment={"GIVEN": "this"})
    told = [json.loads(rank.stdout.splitlines()[0]) for rank in ranks]
    for number, rank in enumerate(told):
        assert rank["argv"] == ["one", "2"] and rank["main"] == "__main__" and rank["input"] == ""
        assert rank["file"] and rank["session"] and rank["home"]
        assert (rank["rank"], rank["given"]) == (str(number), "this")
        assert rank["files"] == [f"{number}.err", f"{number}.out", "null"]
        last_words = ["threads are waited for", "exit functions are called"]
        assert ranks[number].stdout.splitlines()[1:] == last_words
    assert told[0]["hash"] != told[1]["hash"], "as in two processes that were started one by one"
    assert "GIVEN" not in os.environ


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no more')", 1, "no more"),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_the_end_of_a_rank_is_told_as_it_was(program, code, words):
    (ended,) = run_ranks(program, 1, check=False)
    assert ended.returncode == code and words in ended.stderr


def test_what_a_rank_has_started_ends_with_the_block():
    program = (
        "import signal, subprocess; print('child', subprocess.Popen(['sleep', '100']).pid, flush=True); signal.pause()"
    )
    with processes() as running:
        start_ranks(running, program, [1])
        child = int(running.await_output(0, "\n").split()[1])
        assert alive(child) and alive(running.pid(0))
        rank = running.pid(0)
    assert not alive(rank)
    await_true(lambda: not alive(child), "the end of the child")


LARGE = """
import json
from pathlib import Path
from tests.support.huge_pages import SIZE, use_huge_pages

def large_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))

inherited, block = large_bytes(), bytearray(bytes(range(256)) * (8 * SIZE // 256))
before, count = large_bytes(), use_huge_pages()
is_same = block == bytes(range(256)) * (8 * SIZE // 256)
print(json.dumps([inherited // SIZE, count, (large_bytes() - before) // SIZE, is_same]))
"""


def test_memory_moves_to_large_pages_and_is_what_it_was():
    (ended,) = run_ranks(LARGE, 1)
    inherited, count, num_more, is_same = json.loads(ended.stdout)
    assert is_same
    if count == 0:
        pytest.skip("this kernel has no large pages to move to")
    assert inherited > 0 and num_more >= 6, "of eight, whose first and last may be shared with others"


SHARES = """
import sys
from tests.support.nursery import Nursery
from tests.support.processes import clean_environment
nursery = Nursery(sys.argv[1], clean_environment())
print("starter" if nursery._process else "guest", nursery._process.pid if nursery._process else 0, flush=True)
sys.stdin = open(sys.argv[2])
sys.stdin.readline()
"""


@pytest.mark.long  # it imports torch once more, and every run of several workers shares
def test_who_names_a_nursery_shares_it_and_it_ends_with_the_last_of_them(tmp_path):
    """Workers of a run do. The one that started it may be the first to end."""
    name = f"gnnsys-nursery-test-{os.getpid()}"
    out, err = tmp_path / "out", tmp_path / "err"
    (tmp_path / "program.py").write_text("print('here', flush=True)")
    with processes() as running:
        for number in range(2):
            os.mkfifo(tmp_path / str(number))
            running.start_code(f"worker {number}", SHARES, name, tmp_path / str(number))
            running.await_output(number, "\n")
        (role, pid), (other, _) = (running.output(number).split() for number in range(2))
        assert (role, other) == ("starter", "guest")
        (tmp_path / "0").write_text("end\n")
        await_true(lambda: not alive(running.pid(0)), "the end of the one that started it")
        guest = Nursery(name, clean_environment())
        child = guest.start(tmp_path / "program.py", [], clean_environment(), out, err)
        assert child.wait(HANGS_AFTER) == 0 and out.read_text() == "here\n" and alive(int(pid))
        (tmp_path / "1").write_text("end\n")
        running.wait()
        assert alive(int(pid))
        guest._lines.close()
        guest._here.close()
        await_true(lambda: not alive(int(pid)), "the end of the nursery")
