"""`pytest.mark.usefixtures("one_epoch")`: for tests that read one epoch of each loader that they make.

By default a loader goes on with the next epoch while one ends, which here is two thirds of all its work. That it does
so, and that batches stay the same, is in tests/loader/test_neighbor_loader.py and tests/golden.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest


@pytest.fixture
def one_epoch() -> Iterator[None]:
    """`across_epochs` is False where it is not given."""
    from gnnsys.loader import LinkNeighborLoader, NeighborLoader, SubgraphLoader

    with pytest.MonkeyPatch.context() as patch:
        for kind in (NeighborLoader, LinkNeighborLoader, SubgraphLoader):
            patch.setitem(inspect.unwrap(kind.__init__).__kwdefaults__, "across_epochs", False)
        yield
