"""Memory that this process has mapped and others have, too: it is there once for all of them.

Whoever counts what a job takes by itself (estimates, budgets) asks here which tensors are not the job's own.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

_keys = itertools.count()
_ranges: dict[int, tuple[int, int]] = {}  # of the process, as its address space is: by a number, first byte and end


def note_shared_memory(owner: object, address: int, num_bytes: int) -> None:
    """Says that so many bytes from `address` on are shared, for as long as `owner` lives."""
    key = next(_keys)
    _ranges[key] = address, address + num_bytes
    weakref.finalize(owner, _ranges.pop, key, None).atexit = False


def is_shared_memory(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that was noted so. Tensors without memory (fake, meta) do not."""
    if not _ranges or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return False
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a subclass that has none
        return False
    return any(begin <= address < end for begin, end in tuple(_ranges.values()))
