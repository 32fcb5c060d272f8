"""Native loops on machines that others use too: who waits takes no processor time, and holds nobody up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from gnnsys.ops import gather_rows

DEADLINE_SECONDS = 60
BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print('busy', flush=True)\nwhile True: pass"
# By numpy: torch's loops would leave threads that spin.
ROWS = torch.from_numpy(np.arange(400_000, dtype=np.float32)).view(-1, 16)
INDEX = torch.from_numpy(np.arange(0, 25_000, 2))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def gather() -> torch.Tensor:
    return gather_rows(ROWS, INDEX)


def status_of_fork(is_right: Callable[[], bool]) -> int:
    """0 if `is_right` in a process that is forked from this one."""
    child = os.fork()
    if child == 0:
        signal.alarm(DEADLINE_SECONDS)  # ends a loop that waits for threads which the fork left out
        status = 2
        try:
            status = int(not is_right())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_threads_that_wait_for_the_next_loop_take_no_processor_time():
    waiting, spent = threading.Event(), []
    with torch_threads(2):
        for _ in range(3):
            for _ in range(20):
                gather()
            began = time.process_time()
            waiting.wait(0.05)
            spent.append(time.process_time() - began)
    assert min(spent) < 0.002


def test_a_forked_process_loops_on_threads_of_its_own():
    with torch_threads(2):
        expected = gather()
        assert status_of_fork(lambda: gather().numpy().tobytes() == expected.numpy().tobytes()) == 0


def test_processes_that_are_forked_while_other_threads_loop_get_the_same_results():
    stop = threading.Event()
    wrong: list[threading.Thread] = []

    def loop() -> None:
        torch.set_num_threads(2)
        while not stop.is_set():
            if not torch.equal(gather(), expected):
                wrong.append(threading.current_thread())

    with torch_threads(2):
        expected = gather()
        others = [threading.Thread(target=loop) for _ in range(4)]
        for other in others:
            other.start()
        try:
            for _ in range(20):
                gather()
                assert status_of_fork(lambda: gather().numpy().tobytes() == expected.numpy().tobytes()) == 0
        finally:
            stop.set()
            for other in others:
                other.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a thread can be kept from its core on Linux only")
def test_loops_end_though_their_helper_has_no_core():
    """The helper shares its core with a process that never sleeps, and has the lowest priority of all."""
    num_loops = 200
    helper_turns: list[int] = []

    def loop() -> None:
        torch.set_num_threads(2)
        before = set(os.listdir("/proc/self/task"))
        gather()
        (helper,) = (int(task) for task in set(os.listdir("/proc/self/task")) - before)
        os.sched_setscheduler(helper, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(helper, {int(core)})
        began = num_turns(helper)
        for _ in range(num_loops):
            gather()
        helper_turns.append(num_turns(helper) - began)

    core = str(max(os.sched_getaffinity(0)))
    with subprocess.Popen([sys.executable, "-S", "-c", BUSY, core], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None and busy.stdout.readline() == b"busy\n"
            caller = threading.Thread(target=loop)
            caller.start()
            caller.join(timeout=DEADLINE_SECONDS)
        finally:
            busy.kill()
    assert helper_turns and helper_turns[0] < num_loops / 2


def num_turns(thread: int) -> int:
    """How often a thread of this process had a core."""
    with open(f"/proc/self/task/{thread}/schedstat") as file:
        return int(file.read().split()[2])
