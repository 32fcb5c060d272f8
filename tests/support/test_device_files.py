"""Files of tests/cuda are not collected where there is no device; that they can be is seen everywhere."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FILES = sorted(path.stem for path in (Path(__file__).parents[1] / "cuda").glob("test_*.py"))


def test_tests_for_a_device_import_what_there_is():
    assert len(FILES) > 10
    for name in FILES:
        module = importlib.import_module(f"tests.cuda.{name}")
        assert any(each.startswith("test_") for each in vars(module)), name
        assert isinstance(module.pytestmark, pytest.MarkDecorator), f"{name} runs on a device alone"
