"""Makes one mistake, by name, with the native core loaded: the sanitizer's runtime should end in a report.

Half of the mistakes are in planted.cpp, on memory of torch and threads of Python; the others are the caller's, and make
the core itself do wrong: it reads memory that torch was told about falsely, or writes rows from two threads at once.
`none` makes no mistake and must end without a report.
"""

from __future__ import annotations

import ctypes
import sys
import threading

import torch

import gnnsys.ops  # noqa: F401 - loads the core

native = torch.ops.gnnsys


def overflow(planted: ctypes.CDLL) -> None:
    rows = torch.zeros(16, dtype=torch.int64)
    planted.planted_overflow(ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(16))


def undefined(planted: ctypes.CDLL) -> None:
    planted.planted_undefined(ctypes.c_int64(2**63 - 1))


def race(planted: ctypes.CDLL) -> None:
    value = torch.zeros(1, dtype=torch.int64)
    on_two_threads(lambda: planted.planted_race(ctypes.c_void_p(value.data_ptr())))


def loop_race(planted: ctypes.CDLL) -> None:
    value = torch.zeros(1, dtype=torch.int64)
    planted.planted_loop_race(ctypes.c_void_p(value.data_ptr()))


def core_overflow(planted: ctypes.CDLL) -> None:
    memory = torch.zeros(32, dtype=torch.int64)
    longer = (ctypes.c_char * 512).from_address(memory.data_ptr())
    rows = torch.frombuffer(longer, dtype=torch.int64)  # says 64 values where there are 32
    native.gather_rows(rows.view(8, 8), torch.tensor([4]), None)


def core_race(planted: ctypes.CDLL) -> None:
    rows, index = torch.zeros(8, 64), torch.zeros(2000, dtype=torch.int64)
    src = torch.ones(2000, 64)
    on_two_threads(lambda: native.update_rows(rows, None, index, src, True))


def none(planted: ctypes.CDLL) -> None:
    rows = torch.arange(16)
    assert planted.planted_overflow(ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(15)) == 15
    versions = torch.zeros(1, dtype=torch.int32)
    table, index, src = torch.zeros(8, 64), torch.zeros(2000, dtype=torch.int64), torch.ones(2000, 64)
    on_two_threads(lambda: native.update_rows(table, versions, index, src, True))
    assert table[0, 0] == 4000


def on_two_threads(call) -> None:
    together = threading.Barrier(2)

    def run() -> None:
        together.wait(timeout=60)
        call()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)


if __name__ == "__main__":
    library = ctypes.CDLL(sys.argv[1])
    library.planted_overflow.restype = ctypes.c_int64
    library.planted_undefined.restype = ctypes.c_int64
    globals()[sys.argv[2]](library)
