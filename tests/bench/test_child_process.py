"""A process beside the benchmark is waited for with a deadline, and never outlives it."""

import os

import pytest

from gnnsys.bench.child_process import Child


def test_a_child_that_ends_before_it_is_ready_is_told(capfd):
    with (
        Child("no_such_module_of_gnnsys") as child,
        pytest.raises(RuntimeError, match="ended with 1 before it was ready"),
    ):
        child.answer(30.0)


def test_a_child_that_says_nothing_runs_into_the_deadline_and_is_gone_when_closed():
    with Child("json.tool") as child, pytest.raises(RuntimeError, match=r"json\.tool said nothing within 0\.1 s"):
        child.answer(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
