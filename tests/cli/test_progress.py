"""The progress bar, on a terminal and in a log."""

import io
import itertools
from types import SimpleNamespace

import pytest

from gnnsys.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_log_it_writes_a_line_per_quarter_and_ends_full():
    log = io.StringIO()
    with Progress(100, "epoch 1", log) as bar:
        for step in range(100):
            bar.advance(note=f"loss {step}")
    lines = log.getvalue().splitlines()
    assert [line.split("] ")[1].split()[0] for line in lines] == ["25/100", "50/100", "75/100", "100/100"]
    assert lines[-1].endswith("loss 99") and "." * 5 not in lines[-1].split("]")[0]
    assert "\r" not in log.getvalue()


def test_on_a_terminal_it_redraws_one_line():
    terminal = Terminal()
    with Progress(10, "epoch 1", terminal) as bar:
        for _ in range(10):
            bar.advance()
    assert terminal.getvalue().count("\n") == 1
    assert "10/10" in terminal.getvalue().split("\r")[-1]


def test_a_loop_that_stops_early_shows_how_far_it_came():
    log = io.StringIO()
    with pytest.raises(KeyError), Progress(100, "epoch 1", log) as bar:
        bar.advance(7)
        raise KeyError
    assert "7/100" in log.getvalue()


def test_a_total_of_zero_is_refused():
    with pytest.raises(ValueError, match="total must be at least 1, got 0"):
        Progress(0, "epoch 1")


@pytest.fixture
def quick(monkeypatch):
    """All that a test does passes within a second, however long it takes."""
    clock = itertools.count(100.0, 0.0001)
    monkeypatch.setattr("gnnsys.cli.progress.time", SimpleNamespace(perf_counter=lambda: next(clock)))


def test_what_reports_itself_shows_nothing_before_a_second_has_passed(quick):
    for stream in (io.StringIO(), Terminal()):
        with Progress.reported("verify", stream) as progress:
            for done in range(1, 11):
                progress(done, 10, "part 0")
        assert stream.getvalue() == ""


def test_what_reports_itself_shows_where_it_is_and_ends_where_it_ended():
    terminal = Terminal()
    with Progress.reported("write", terminal, patience=0.0) as progress:
        progress(1 << 20, 1 << 21, "part 0")
        progress(1 << 21, 1 << 21, "part 1")
    frames = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert " 50% " in frames[0] and frames[0].endswith("part 0")
    assert "100% " in frames[-1] and frames[-1].endswith("part 1\n")


def test_in_a_log_what_reports_itself_writes_a_line_per_stage_and_no_more_than_one_a_second(quick):
    log = io.StringIO()
    with Progress.reported("partition", log, patience=0.0) as progress:
        for done in range(1000):
            progress(done, 1000, "coarsening")
        progress(0, 7, "refining")
    lines = log.getvalue().splitlines()
    assert "0/1000" in lines[0] and lines[0].endswith("coarsening")
    assert len(lines) <= 3 and "0/7" in lines[-1] and lines[-1].endswith("refining")
