"""The progress bar, on a terminal and in a log."""

import io

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
