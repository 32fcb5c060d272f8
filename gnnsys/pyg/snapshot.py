"""Which arrays of a user's data have changed since something made a copy of them.

Arrays are compared by content: a write through numpy counts, and moving the data to a device does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gnnsys.loader import checksum


class Snapshot:
    """Checksums of the arrays called `names` (None: of all) as they are now. Does not keep the data alive."""

    def __init__(self, data: Data | HeteroData, names: Collection[str] | None = None) -> None:
        self._data = weakref.ref(data)
        self._names = names
        self._before = {name: checksum(rows) for name, rows in _arrays(data, names)}

    def changed(self) -> str | None:
        """The first array that differs, as the user writes it, such as `data.x`. None if the data no longer exists.

        Arrays that were added or deleted are not looked at.
        """
        data = self._data()
        for name, rows in () if data is None else _arrays(data, self._names):
            if name in self._before and checksum(rows) != self._before[name]:
                return name
        return None

    def __reduce__(self) -> Any:
        """In another process there is no data of the user to compare with."""
        return Snapshot, (Data(),)


def _arrays(data: Data | HeteroData, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    for store in data.stores:
        where = "data" if store._key is None else f"data[{store._key!r}]"
        for name, rows in store.items():
            if isinstance(rows, np.ndarray) and rows.dtype.kind in "biuf":
                rows = torch.from_numpy(rows)
            if (names is None or name in names) and isinstance(rows, Tensor) and rows.layout == torch.strided:
                yield f"{where}.{name}", rows.as_subclass(Tensor)
