"""Jobs that print more than anybody reads: no disk and no memory fills, nothing is lost, and nobody counts as dead."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gnnsys.launch.line_queue import LineQueue
from gnnsys.launch.rank_output import BEGIN, END, RankOutput
from tests.launch.test_printing import LAUNCHES
from tests.support.processes import HANGS_AFTER, ROOT, await_true

NUM_LINES, LENGTH = 40_000, 99  # several times what launcher, agent and pipes hold
LOST_AFTER = 4.0  # seconds; less is too little for a busy machine
FLOODS = f"""
import os, sys
for number in range({NUM_LINES}):
    print(str(number).rjust({LENGTH}, "."), flush=number % 100 == 99)
    if number % 1000 == 0:
        with open(sys.argv[1], "w") as file:
            file.write(str(number))
"""


def test_whatever_a_rank_prints_comes_as_its_lines():
    """However it is cut, between what torchrun itself says, and with letters that look like our own headers."""
    from gnnsys.launch.rank_pipes import _ATOMIC, records

    draw = random.Random(0)
    text = "".join(draw.choice(["a", "\n", "\u00e4\u2192\U0001f600", "x" * 5000, BEGIN, END]) for _ in range(300))
    expected = text.replace(BEGIN, "\\x1e").split("\n")
    for _ in range(4):
        output, found = RankOutput(), []
        begin = 0
        while begin < len(text):
            end = begin + draw.randrange(1, 2000)
            for record in records("3", text[begin:end]):
                assert len(record) <= _ATOMIC
                found += output.feed(record.decode())
                if draw.random() < 0.1:
                    found += output.feed("own\n")
            begin = end
        found += output.close()
        assert {rank for rank, _ in found} == {None, 3}
        assert [line for rank, line in found if rank == 3] == expected[: len(expected) - (not expected[-1])]
        assert {line for rank, line in found if rank is None} == {"own"}


def test_lines_wait_for_room_and_nothing_else_does():
    lines: LineQueue[object] = LineQueue(most_bytes=10)
    lines.put_line("first", 11)
    assert lines.is_full
    waiting = threading.Thread(target=lines.put_line, args=("second", 1))
    waiting.start()
    for number in range(100):
        lines.put(number)
    assert waiting.is_alive() and lines.get() == "first"
    waiting.join(HANGS_AFTER)
    assert [lines.get() for _ in range(101)] == [*range(100), "second"] and not lines.is_full
    with pytest.raises(queue.Empty):
        lines.get(timeout=0.0)
    lines.put_line("third", 11)
    waiting = threading.Thread(target=lines.put_line, args=("dropped", 1))
    waiting.start()
    lines.close_to_lines()
    waiting.join(HANGS_AFTER)
    assert lines.get() == "third"
    with pytest.raises(queue.Empty):
        lines.get(timeout=0.0)


def await_standstill(launcher: subprocess.Popen[str], file: Path, seconds: float) -> None:
    """Until a job has not got on for so long: it waits for whoever reads its lines."""
    last, since = "", time.monotonic()
    while time.monotonic() - since < seconds:
        assert launcher.poll() is None
        text = file.read_text() if file.exists() else ""
        if text != last or not text:
            last, since = text, time.monotonic()
        time.sleep(0.05)


def memory_of(pid: int) -> int:
    words = Path(f"/proc/{pid}/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


def read_all(launcher: subprocess.Popen[str], prefix: str) -> None:
    assert launcher.stdout is not None
    for number, line in enumerate(launcher.stdout):
        assert line == prefix + str(number).rjust(LENGTH, ".") + "\n"
    assert number == NUM_LINES - 1 and launcher.wait(HANGS_AFTER) == 0


def flooding(folder: Path) -> dict[str, Any]:
    """A launcher of one host whose job prints more than pipes hold, for Popen."""
    program = LAUNCHES.replace("connect_timeout=100", f"connect_timeout=100, lost_after={LOST_AFTER}")
    program = program.replace("[sys.argv[1]]", "[sys.argv[1], sys.argv[3]]")
    words = [str(folder / "floods.py"), str(ROOT / "tests" / "launch" / "plain_agent.py"), str(folder / "progress")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return {"args": [sys.executable, "-c", program, *words], "stdout": subprocess.PIPE, "text": True, "env": env}


def test_a_launcher_that_is_not_read_keeps_little_and_takes_no_host_for_dead(tmp_path):
    """As by a terminal that is stopped (Ctrl-S), or by `| less`, for longer than --lost-after."""
    (tmp_path / "floods.py").write_text(FLOODS)
    progress = tmp_path / "progress"
    with subprocess.Popen(**flooding(tmp_path)) as launcher:
        await_true(progress.exists, "the first line")
        before = memory_of(launcher.pid)
        await_standstill(launcher, progress, 1.25 * LOST_AFTER)
        assert 1000 < int(progress.read_text()) < NUM_LINES - 1000
        assert memory_of(launcher.pid) - before < 10 << 20
        read_all(launcher, "h1 | ")


def test_ctrl_c_ends_a_job_whose_lines_nobody_reads(tmp_path):
    (tmp_path / "floods.py").write_text(FLOODS)
    with subprocess.Popen(**flooding(tmp_path), stderr=subprocess.PIPE) as launcher:
        await_standstill(launcher, tmp_path / "progress", 0.5)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(HANGS_AFTER) == 130  # nothing has been read yet
    assert not list(tmp_path.glob("gnnsys-launch-*"))


@pytest.mark.long  # its two halves above; the same pipes in every test of torchrun
def test_a_job_that_prints_much_under_torchrun_keeps_nothing_on_the_disk_of_its_host(tmp_path):
    (tmp_path / "floods.py").write_text(FLOODS)
    command = [sys.executable, "-m", "gnnsys.cli", "launch", "--local", "1", "--lost-after", str(LOST_AFTER)]
    progress, env = tmp_path / "progress", {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command += [str(tmp_path / "floods.py"), str(progress)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as launcher:
        await_standstill(launcher, progress, 1.25 * LOST_AFTER)
        (folder,) = tmp_path.glob("gnnsys-launch-*")
        assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 10_000
        read_all(launcher, "localhost:0 | ")
