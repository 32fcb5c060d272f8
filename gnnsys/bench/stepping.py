"""Counts the instructions of a process by stepping it, where the processor's own counter cannot be had.

A second process (this file, run as a program: `Stepper` starts it) takes hold of every thread of the first by ptrace,
and lets each execute one instruction at a time: some hundred thousand per second, so count a few million.
Exact for one thread. Of several it counts one way in which they may meet; what a process does by the clock (timeouts)
comes more often in a stepped second, so the time is returned too. System calls count as one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable

_MARK = signal.SIGURG  # ends a region; nobody but who traces the process notices it
_CONT, _STEP, _DETACH, _SEIZE, _INTERRUPT = 7, 9, 17, 0x4206, 0x4207
_TRACE_CLONE = 1 << 3
_ALL = 0x40000000  # __WALL: threads too
_STEPPED = signal.SIGTRAP << 8 | 0x7F
_SET_PTRACER = 0x59616D61
_HWCAP, _HWCAP_ATOMICS = 16, 1 << 8


class Stepper:
    """Steps this process. `OSError` where that is not possible or not allowed.

    >>> Stepper().count(lambda: sum(range(1000)))  # instructions, seconds
    (61012, 0.53)
    """

    def __init__(self) -> None:
        if sys.platform != "linux" or not _can_step():
            raise OSError("stepping is not possible here")
        command = [sys.executable, "-S", os.path.abspath(__file__), str(os.getpid())]
        self._tracer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ctypes.CDLL(None).prctl(_SET_PTRACER, self._tracer.pid, 0, 0, 0)
        self._own = 0  # instructions of a region in which nothing is done
        self._own = min(self.count(lambda: None)[0] for _ in range(3))

    def count(self, call: Callable[[], object]) -> tuple[int, float]:
        """Instructions of all threads while `call` runs in this one, and the seconds that took."""
        self._say("begin")
        if self._hear() != "ready":
            raise OSError("this process may not be traced")
        try:
            call()
        finally:
            signal.raise_signal(_MARK)
            answer = self._hear()
        count, seconds = answer.split()
        return int(count) - self._own, float(seconds)

    def close(self) -> None:
        assert self._tracer.stdin is not None and self._tracer.stdout is not None
        self._tracer.stdin.close()
        self._tracer.wait()
        self._tracer.stdout.close()

    def _say(self, what: str) -> None:
        assert self._tracer.stdin is not None
        self._tracer.stdin.write(what + "\n")
        self._tracer.stdin.flush()

    def _hear(self) -> str:
        assert self._tracer.stdout is not None
        return self._tracer.stdout.readline().strip()


def _can_step() -> bool:
    """On Arm without LSE, atomic operations are loops of exclusive loads and stores, which stepping never lets end."""
    if platform.machine() != "aarch64":
        return platform.machine() == "x86_64"
    return bool(ctypes.CDLL(None).getauxval(ctypes.c_ulong(_HWCAP)) & _HWCAP_ATOMICS)


class _Tracer:
    """The other process's half."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._threads: set[int] = set()
        libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: that is faster
        self._ptrace, self._waitpid = libc.ptrace, libc.waitpid
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace.restype = ctypes.c_long
        self._waitpid.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        self._status = ctypes.c_int()
        self._marked = 0

    def begin(self) -> bool:
        """Stops every thread; whether that was allowed."""
        new = self._tasks()
        while new:  # threads that a thread made before it was stopped
            for tid in new:
                if self._ptrace(_SEIZE, tid, None, _TRACE_CLONE) == 0:
                    self._threads.add(tid)
                elif tid in self._tasks():
                    self.end()
                    return False
            new = self._tasks() - self._threads
        for tid in self._threads:
            self._ptrace(_INTERRUPT, tid, None, None)
        for tid in list(self._threads):
            self._await(tid)
        return True

    def run(self) -> int:
        """Steps all threads until one of them gives the mark; how many steps there were."""
        ptrace, waitpid, status = self._ptrace, self._waitpid, self._status
        where, count = ctypes.addressof(status), 0
        for tid in self._threads:
            ptrace(_STEP, tid, None, None)
        while True:
            tid = waitpid(-1, where, _ALL)
            state = status.value
            if state == _STEPPED:
                count += 1
                ptrace(_STEP, tid, None, None)
            elif tid < 0:
                raise ProcessLookupError(f"process {self._pid} has ended")
            elif not os.WIFSTOPPED(state):
                self._threads.discard(tid)
            elif os.WSTOPSIG(state) == _MARK:
                self._marked = tid
                return count
            else:
                self._threads.add(tid)
                ptrace(_STEP, tid, None, self._signal())

    def end(self) -> None:
        """Lets every thread go. A trap that waits for delivery is taken first: untraced, it would end the process."""
        for tid in list(self._threads):
            if tid != self._marked:  # that one has stopped, and was waited for
                self._ptrace(_INTERRUPT, tid, None, None)
                self._await(tid)
            while tid in self._threads and self._has_trap(tid):
                self._ptrace(_CONT, tid, None, None)
                self._await(tid)
            self._ptrace(_DETACH, tid, None, self._signal() if tid != self._marked else None)
        self._threads.clear()

    def _signal(self) -> int | None:
        """What the thread that was waited for last was about to be given, but for our own."""
        state = self._status.value
        is_ours = state >> 16 or os.WSTOPSIG(state) in (signal.SIGTRAP, _MARK)
        return None if is_ours else os.WSTOPSIG(state)

    def _await(self, tid: int) -> None:
        self._waitpid(tid, ctypes.addressof(self._status), _ALL)
        if not os.WIFSTOPPED(self._status.value):
            self._threads.discard(tid)

    def _has_trap(self, tid: int) -> bool:
        try:
            with open(f"/proc/{self._pid}/task/{tid}/status") as file:
                pending = next(line.split()[1] for line in file if line.startswith("SigPnd"))
        except OSError:
            return False
        return bool(int(pending, 16) & 1 << (signal.SIGTRAP - 1))

    def _tasks(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(f"/proc/{self._pid}/task")}
        except OSError:
            return set()


def _main(pid: int) -> None:
    tracer = _Tracer(pid)
    for _ in sys.stdin:
        if not tracer.begin():
            print("refused", flush=True)
            continue
        print("ready", flush=True)
        began = time.perf_counter()
        count = tracer.run()
        seconds = time.perf_counter() - began
        tracer.end()
        print(count, seconds, flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
