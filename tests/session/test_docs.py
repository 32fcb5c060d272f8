"""The page about several machines names every option of `gnnsys serve`; every promise about failures names its test."""

from __future__ import annotations

from tests.support.docs import ROOT, options_missing


def test_every_option_of_the_command_is_on_the_page():
    assert options_missing(ROOT / "docs" / "distributed.md", "serve") == set()


def test_every_promise_about_failures_names_a_test():
    page = (ROOT / "docs" / "failure.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15 and all("`test_" in row for row in rows)
