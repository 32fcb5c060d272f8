"""The generators that a process draws from: Python's, numpy's and torch's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def kept_generators(seed: int | None = None) -> Iterator[None]:
    """Puts every generator back after the block, whatever it draws. With `seed` they begin there inside the block.

    Generators of a GPU are included once CUDA has started in this process.
    """
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    tensors = [torch.default_generator, *devices]
    states = [each.get_state() for each in tensors]
    numpys: Any = np.random  # whose types leave these functions out
    bits, numbers, plain = numpys.get_bit_generator(), numpys.get_state(legacy=False), random.getstate()
    if seed is not None:
        for each in tensors:
            each.manual_seed(seed)
        numpys.set_bit_generator(np.random.MT19937(seed))
        random.seed(seed)
    try:
        yield
    finally:
        for each, state in zip(tensors, states, strict=True):
            each.set_state(state)
        numpys.set_bit_generator(bits)
        numpys.set_state(numbers)
        random.setstate(plain)
