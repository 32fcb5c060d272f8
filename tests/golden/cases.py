"""The table of golden cases, by name."""

from __future__ import annotations

from tests.golden import faces, loaders, parts, training
from tests.golden.case import Case

CASES: dict[str, Case] = {**loaders.CASES, **parts.CASES, **faces.CASES, **training.CASES}
