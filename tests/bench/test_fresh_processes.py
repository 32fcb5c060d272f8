"""Processes that have run nothing before, and a device's room that they share."""

import os
import threading

import pytest

from gnnsys.bench.case import NotHere
from gnnsys.bench.jobs.fresh_processes import DeviceRoom, call_in_fresh_process


def fails():
    raise ValueError("it was asked to")


@pytest.mark.long  # a process that imports torch
def test_each_call_has_a_process_of_its_own_and_errors_come_back():
    mine, theirs = os.getpid(), {call_in_fresh_process(os.getpid) for _ in range(3)}
    assert len(theirs) == 3 and mine not in theirs
    with pytest.raises(RuntimeError, match="ValueError: it was asked to"):
        call_in_fresh_process(fails)
    with pytest.raises(RuntimeError, match="a process of _exit ended with 7"):
        call_in_fresh_process(os._exit, 7)


def test_who_asks_for_more_than_is_left_waits_and_who_asks_for_too_much_is_told():
    room, entered = DeviceRoom(10), threading.Event()

    def second() -> None:
        with room.taken(5):
            entered.set()

    other = threading.Thread(target=second)
    with room.taken(6):
        other.start()
        assert not entered.wait(0.05), "five are not left"
    other.join(60)
    assert entered.is_set()
    with room.taken(10), pytest.raises(NotHere, match="GB are needed"), room.taken(11):
        pass
