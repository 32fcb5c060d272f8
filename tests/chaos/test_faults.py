"""Faults do what their line says, once, and the line is all that is needed to have them again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time

import pytest

from gnnsys.comm import Client, Kind, Reply, Server
from tests.support.faults import Fault, Injector, damage, filled, has_happened, is_full, small_disk
from tests.support.processes import processes, run_code
from tests.support.wires import SlowProxy

KILL = "seed=4 what=kill target={} machine=1 moment={} delay=0"
VICTIM = """
import sys
from pathlib import Path
from tests.support.faults import Fault, Injector
injector = Injector([Fault.parse(line) for line in sys.argv[2:]], Path(sys.argv[1]), machine=1, local_rank=1)
injector.reached("step:1")
print("lives", flush=True)
words = open(Path(sys.argv[1]) / "words")
words.readline()
injector.reached("step:2")
words.readline()
"""
LEADER = """
import sys
from pathlib import Path
from tests.support.faults import Fault, Injector
injector = Injector([Fault.parse(sys.argv[2])], Path(sys.argv[1]), machine=1, local_rank=0)
injector._carry_out(*injector._faults[0])
"""


def test_a_fault_is_the_line_it_is_written_as():
    line = KILL.format("shard", "step:7")
    assert str(Fault.parse(line)) == line
    for wrong in (line.replace("kill", "tickle"), line.replace("shard", "king")):
        with pytest.raises(ValueError, match="names no fault"):
            Fault.parse(wrong)


def test_a_process_dies_at_its_moments_each_once_however_often_it_lives(tmp_path):
    faults = [KILL.format("trainer", moment) for moment in ("step:2", "file:sign*")]
    os.mkfifo(tmp_path / "words")
    for life, code in enumerate((-9, -9, 0)):
        with processes() as running:
            running.start_code("victim", VICTIM, tmp_path, *faults)
            assert running.await_output(0, "lives\n") == "lives\n"
            if life == 1:
                (tmp_path / "sign").touch()
            words = os.open(tmp_path / "words", os.O_RDWR)  # to read as well: nobody else need have it open
            try:
                os.write(words, b"x\n" if code else b"x\nx\n")
                assert [ended.returncode for ended in running.wait()] == [code]
            finally:
                os.close(words)
        assert [has_happened(tmp_path, number) for number in range(2)] == [True, life > 0]


def test_a_kill_that_found_nobody_has_not_happened(tmp_path):
    ended = run_code(LEADER, tmp_path, KILL.format("shard", "step:1"))  # this process may have others' servers below it
    assert ended.returncode != 0 and "has no graph server" in ended.stderr
    assert not has_happened(tmp_path, 0)


def test_a_fault_of_another_process_is_left_to_it(tmp_path):
    faults = [Fault.parse(KILL.format(target, "step:1")) for target in ("shard", "trainer", "leader")]
    for machine, local_rank in ((0, 0), (0, 1), (1, 2)):
        Injector(faults, tmp_path, machine=machine, local_rank=local_rank).reached("step:1")
    assert not any(thread.name == "fault" for thread in threading.enumerate())


def test_damage_is_one_bit_or_a_cut_and_the_same_for_the_same_seed(tmp_path):
    done = set()
    for seed in range(8):
        results = []
        for name in ("a", "b"):
            (tmp_path / name).write_bytes(bytes(range(200)))
            done.add("cut" if "cut" in damage(tmp_path / name, seed) else "bit")
            results.append((tmp_path / name).read_bytes())
        assert results[0] == results[1] != bytes(range(200))
        bits = sum((a ^ b).bit_count() for a, b in zip(results[0], bytes(range(200)), strict=False))  # one may be cut
        assert (len(results[0]), bits) == (200, 1) or (len(results[0]) < 200 and bits == 0)
    assert done == {"bit", "cut"}


def test_a_full_disk_is_full_until_it_is_not():
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(small_disk(1 << 20))
        except subprocess.CalledProcessError:
            pytest.skip("a small file system cannot be mounted here")
        with filled(folder), pytest.raises(OSError) as told:
            (folder / "more").write_bytes(bytes(1 << 16))
        assert is_full(told.value) and not is_full(ValueError("no"))
        (folder / "more").write_bytes(bytes(1 << 16))
    assert not folder.exists()


def test_a_slow_wire_delays_what_is_said_over_it():
    with Server({Kind.STATUS: lambda request: Reply()}) as server:
        proxy = SlowProxy(server.endpoints[0])
        try:
            with Client({0: proxy.endpoint}, sender=0, incarnation=1, timeout=120) as client:
                client.request(0, Kind.STATUS).result()
                proxy.delay, began = 0.2, time.monotonic()
                client.request(0, Kind.STATUS).result()
                assert time.monotonic() - began >= 0.4
        finally:
            proxy.delay = 0.0
            proxy.close()
