"""What each task has to do and each edge has to carry, iteration by iteration: counted, drawn or constant.

A demand is given by kind: seconds by kind of task, bytes by kind of edge. A value is a number, an array of the shape
of the kind's block (see `tasks.py`), `DrawnAmount` or `CountedAmount`. Kinds left out need nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnsys.planning.simulation.machines import Floats
from gnnsys.planning.simulation.tasks import EDGE_KINDS, SIGNAL, TASK_KINDS, TrainingTasks


@dataclass(frozen=True)
class DrawnAmount:
    """Amounts drawn anew for each iteration, with a mean and a largest value of `peak_to_mean` times the mean.

    Up to 2 they are uniform between (2 - peak_to_mean) and peak_to_mean times the mean. Above, small ones are more
    frequent: peak_to_mean x Beta(1, peak_to_mean - 1), from 0 up. `mean` is a number or has the shape of the block.
    """

    mean: npt.ArrayLike
    peak_to_mean: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.peak_to_mean < np.inf:
            raise ValueError(f"demands: peak_to_mean is {self.peak_to_mean}; it must be finite and at least 1")

    def rows(self, iterations: int, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
        ratio = self.peak_to_mean
        if ratio <= 2:
            factors = rng.uniform(2 - ratio, ratio, (iterations, *shape))
        else:
            factors = ratio * rng.beta(1, ratio - 1, (iterations, *shape))
        return np.asarray(self.mean, dtype=np.float64) * factors


@dataclass(frozen=True)
class CountedAmount:
    """Amounts that were counted: `counted` [K, ...block], one row per batch. Used in turn, again from the first.

    With `shuffle` each iteration takes a row at random instead.
    """

    counted: npt.ArrayLike
    shuffle: bool = False

    def rows(self, iterations: int, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
        counted = np.asarray(self.counted, dtype=np.float64)
        if counted.ndim == 0 or not len(counted):
            raise ValueError("demands: counted amounts need at least one row")
        num = len(counted)
        picked = rng.integers(num, size=iterations) if self.shuffle else np.arange(iterations) % num
        return _in_shape(counted[picked], (iterations, *shape))


Amount = Any  # a number, an array, DrawnAmount or CountedAmount


@dataclass(frozen=True)
class Demands:
    """Work and traffic of N iterations.

    `seconds`  [N, num_tasks]: p of each task, on a machine of speed 1. With cores: core-seconds / threads.
    `volume`   [N, num_edges]: bytes of each edge, in the sender's iteration.
    `threads`  [num_tasks]: cores a task uses at full speed. 0: none of them (its work is on a device of its own).
    """

    seconds: Floats
    volume: Floats
    threads: Floats

    def __post_init__(self) -> None:
        for name in ("seconds", "volume", "threads"):
            values = np.ascontiguousarray(getattr(self, name), dtype=np.float64)
            if not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError(f"demands: {name} must be finite and at least 0, got {values.min()} to {values.max()}")
            object.__setattr__(self, name, values)
        if self.seconds.ndim != 2 or self.volume.ndim != 2 or len(self.seconds) != len(self.volume):
            raise ValueError(
                f"demands: seconds [iterations, tasks] and volume [iterations, edges] are needed, "
                f"got {self.seconds.shape} and {self.volume.shape}"
            )
        if not len(self.seconds):
            raise ValueError("demands: no iterations; at least 1 is needed")
        if self.threads.shape != self.seconds.shape[1:]:
            raise ValueError(f"demands: threads of {self.seconds.shape[1]} tasks needed, got {self.threads.shape}")

    @property
    def iterations(self) -> int:
        return len(self.seconds)

    def mean(self) -> Demands:
        """One iteration of the mean: what costs of placements are made of."""
        return Demands(self.seconds.mean(0)[None], self.volume.mean(0)[None], self.threads)

    def check(self, tasks: TrainingTasks) -> None:
        wanted = (tasks.num_tasks, tasks.num_edges)
        given = (self.seconds.shape[1], self.volume.shape[1])
        if given != wanted:
            raise ValueError(f"demands: made for {given} tasks and edges, but the job has {wanted}")

    @classmethod
    def of(
        cls,
        tasks: TrainingTasks,
        iterations: int,
        *,
        seconds: Mapping[str, Amount],
        volume: Mapping[str, Amount],
        threads: Mapping[str, npt.ArrayLike] | None = None,
        seed: int = 0,
    ) -> Demands:
        """Demands by kind. `threads` is 1 where it is not given.

        >>> tasks = TrainingTasks.of_job(parts=2, workers=1, samplers_per_worker=2)
        >>> demands = Demands.of(tasks, 3, seconds={"worker": 0.1}, volume={"graph": DrawnAmount(1e6, 1.2)})
        >>> demands.volume[:, tasks.edges("graph")].shape
        (3, 2, 2)
        """
        if iterations < 1:
            raise ValueError(f"demands: iterations is {iterations}; at least 1 is needed")
        _check_kinds("seconds", seconds, TASK_KINDS)
        _check_kinds("volume", volume, tuple(kind for kind in EDGE_KINDS if kind != SIGNAL))
        _check_kinds("threads", threads or {}, TASK_KINDS)
        rng = np.random.default_rng(seed)
        all_seconds = _by_kind(seconds, tasks.tasks_of, iterations, tasks.num_tasks, rng)
        all_volume = _by_kind(volume, tasks.edges_of, iterations, tasks.num_edges, rng)
        all_threads = np.ones(tasks.num_tasks)
        for kind, value in (threads or {}).items():
            if kind in tasks.tasks_of:
                first, shape = tasks.tasks_of[kind]
                all_threads[first : first + int(np.prod(shape))] = _in_shape(value, shape).reshape(-1)
        return cls(all_seconds, all_volume, all_threads)


def _by_kind(
    amounts: Mapping[str, Amount],
    blocks: Mapping[str, tuple[int, tuple[int, ...]]],
    iterations: int,
    size: int,
    rng: np.random.Generator,
) -> Floats:
    """[iterations, size]. Kinds are drawn in their own order, so that the order of the mapping does not matter."""
    filled = np.zeros((iterations, size))
    for kind, (first, shape) in blocks.items():
        if kind not in amounts:
            continue
        amount = amounts[kind]
        if isinstance(amount, DrawnAmount | CountedAmount):
            rows = amount.rows(iterations, shape, rng)
        else:
            rows = np.broadcast_to(_in_shape(amount, shape), (iterations, *shape))
        filled[:, first : first + int(np.prod(shape))] = rows.reshape(iterations, -1)
    return filled


def _in_shape(values: npt.ArrayLike, shape: tuple[int, ...]) -> Floats:
    given = np.asarray(values, dtype=np.float64)
    try:
        return np.broadcast_to(given, shape)
    except ValueError:
        raise ValueError(f"demands: an amount of shape {given.shape} does not fit {shape}") from None


def _check_kinds(name: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for kind in given:
        if kind not in known:
            raise ValueError(f"demands: {name} of {kind!r}: kinds are {', '.join(known)}")
