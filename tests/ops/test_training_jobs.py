"""simulate_training and longest_training_path as ops: schemas, fake kernels, and arguments that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gnnsys.ops import longest_training_path, native, simulate_training

OF_PATHS = ("machine", "seconds", "source", "target", "lag", "mode", "volume")


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def job() -> dict[str, Tensor]:
    """Task 0 on machine 0 sends 4 bytes to task 1 on machine 1, twice."""
    return {
        "machine": longs(0, 1),
        "seconds": doubles(1, 2, 1, 2).view(2, 2),
        "threads": doubles(1, 1),
        "queued": longs(0, 0),
        "source": longs(0),
        "target": longs(1),
        "lag": longs(0),
        "mode": longs(0),
        "volume": doubles(4, 4).view(2, 1),
        "link_rates": doubles(4, 1, 1, 2),
        "uplink": longs(-1, -1),
        "cores": doubles(math.inf, math.inf),
        "server_threads": longs(1, 1),
    }


def test_a_flow_holds_up_the_next_one() -> None:
    done = simulate_training(job(), 0)
    ready, start, end = done.flow_times.squeeze(2).tolist()
    assert (ready, start, end) == ([1, 2], [1, 3], [3, 5])
    assert done.task_times[2].tolist() == [[1, 5], [2, 7]]
    assert done.limited[:, 0].tolist() == [[0, 2, 0, 0], [0, 2, 0, 0]]
    arrays = {name: value for name, value in job().items() if name in OF_PATHS}
    assert longest_training_path(arrays, doubles(2)) == 7


def test_it_has_a_schema_and_a_fake_kernel() -> None:
    for explain in (False, True):
        arguments = (*job().values(), 0, explain)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(native.simulate_training.default, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("machine", longs(0, 2), r"machine must be in \[0, 2\), got 2"),
        ("machine", longs(), "there must be a task"),
        ("seconds", doubles(1, 2, 1, math.nan).view(2, 2), "seconds must be at least 0 and finite"),
        ("seconds", doubles(1, 2), "seconds must have two dimensions"),
        ("volume", doubles(4, math.inf).view(2, 1), "volume must be at least 0 and finite"),
        ("volume", doubles(4).view(1, 1), "volume must have 2 entries, got 1"),
        ("volume", torch.ones(2, 1), "volume must be Double"),
        ("source", longs(-1), r"source must be in \[0, 2\), got -1"),
        ("lag", longs(2**63 - 1), "lag must be in"),
        ("mode", longs(3), r"mode must be in \[0, 3\), got 3"),
        ("target", longs(0), "form a cycle"),
        ("link_rates", doubles(1, 1, 1), "link_rates must have two entries per machine"),
        ("link_rates", doubles(1, 1, 1, 0), "link_rates must be more than 0"),
        ("uplink", longs(0, -1), r"uplink must be in \[-1, 0\), got 0"),
        ("cores", doubles(0, 1), "cores must be more than 0"),
        ("server_threads", longs(0, 1), "server_threads must be in"),
    ],
)
def test_what_makes_no_job_is_refused(name: str, value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_training({**job(), name: value}, 0)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="policy must be in"):
        simulate_training(job(), 7)
