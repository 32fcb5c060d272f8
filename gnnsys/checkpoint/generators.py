"""The random generators of a rank: torch's on the CPU and on its GPU, numpy's and Python's own.

A checkpoint holds their states as tensors and numbers. A rank that did not exist when it was saved gets new seeds, a
function of the saved states and its rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def read_generators() -> dict[str, Any]:
    """The states of this process's generators."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, values, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(values, dtype=torch.int64, device="cpu"), next_gauss],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def write_generators(states: dict[str, Any]) -> None:
    """Sets this process's generators to what `read_generators` gave."""
    torch.set_rng_state(states["torch"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, values, next_gauss = states["python"]
    random.setstate((version, tuple(values.tolist()), next_gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_generators(saved: Sequence[dict[str, Any]], rank: int) -> None:
    """Seeds the generators of a new rank: a function of the saved states and its rank."""
    digest = hashlib.sha256(f"rank {rank}".encode())
    for states in saved:
        digest.update(states["torch"].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:8], "little") >> 1
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
