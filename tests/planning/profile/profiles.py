"""Job profiles made up for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from gnnsys.planning import FLOWS, PULLED, WORK, ByteWork, JobGradients, JobProfile, ShareProfile


def made_share(num_parts: int, home: int, num_batches: int = 4, seed: int = 0) -> ShareProfile:
    """Whole bytes and rows; more of them at home. Where rows come late, half of them are asked for."""
    rng = np.random.default_rng([seed, home])
    flows = {name: rng.integers(100, 1000, (num_batches, num_parts)).astype(float) for name in FLOWS}
    for name in FLOWS:
        flows[name][:, home] *= 3
        if name.endswith("seconds"):
            flows[name] *= 1e-6
    for name in PULLED:
        for prefix in ("", "home_"):
            flows[f"{prefix}late_{name}"] = flows[f"{prefix}{name}"] / 2
    work = {name: rng.integers(10, 100, num_batches) * (1e-4 if name.endswith("ing") else 1.0) for name in WORK}
    return ShareProfile(**flows, **work, home=(home,))


def made_profile(num_parts: int = 3, **changes: Any) -> JobProfile:
    values: dict[str, Any] = {
        "parts_digest": 0xABC,
        "num_parts": num_parts,
        "trainers_per_part": 1,
        "subpart_seeds": (100,) * num_parts,
        "batch_size": 10,
        "shares": tuple(made_share(num_parts, part) for part in range(num_parts)),
        "gradients": JobGradients(dense=4000.0),
        "byte_work": ByteWork(seal=1e-9, carry=2e-9),
        "part_bytes": (1000,) * num_parts,
    }
    return JobProfile(**{**values, **changes})
