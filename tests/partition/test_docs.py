"""The page about partitioning names every option that the commands have."""

from __future__ import annotations

import pytest

from tests.support.docs import ROOT, options_missing

PAGE = ROOT / "docs" / "partitioning.md"


@pytest.mark.parametrize("command", ["partition", "inspect"])
def test_every_option_of_the_commands_is_on_the_page(command: str):
    assert options_missing(PAGE, command) == set()
