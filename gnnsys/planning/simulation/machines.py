"""The machines of a cluster as the simulator sees them: rates of their links, and what their processors can do.

With `cores`, `server_threads` and `uplink` left out this is §III of the paper: a machine has a link in and a link out,
and a task takes as long as it takes, whatever else runs beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gnnsys.planning.simulation.tasks import TASK_KINDS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClusterMachines:
    """M machines. Rates are bytes per second.

    `rate_in`, `rate_out`  [M]: B_in and B_out, links of each machine.
    `cores`                [M] or None: threads of work that run at full speed at once. More than that share them
                           equally. None is the paper's: every task runs as if alone.
    `server_threads`       [M] or None: how many requests of the machine's graph server are worked on at once. Others
                           wait, first come first served. None: no limit.
    `speeds`               [M], or by kind of task, [M]: a task of so many seconds takes seconds / speed there. 1 where
                           absent.
    `uplink`               [M] or None: the number of the uplink that a machine is behind, -1 for none. A flow between
                           machines of different uplinks passes both, one out and one in.
    `uplink_in`, `uplink_out`  [U]: rates of the uplinks.
    `names`                [M]: for reports.

    >>> ClusterMachines([1.25e9, 1.25e9], [1.25e9, 6e9], names=["a", "b"]).num_links
    4
    """

    rate_in: Floats
    rate_out: Floats
    cores: Floats | None = None
    server_threads: Ints | None = None
    speeds: Mapping[str, npt.ArrayLike] | npt.ArrayLike = field(default_factory=dict)
    uplink: Ints | None = None
    uplink_in: Floats | None = None
    uplink_out: Floats | None = None
    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        rate_in = _positive("rate_in", self.rate_in, None)
        if not len(rate_in):
            raise ValueError("machines: rate_in is empty; give the rate of at least one machine")
        num = len(rate_in)
        set_(self, "rate_in", rate_in)
        set_(self, "rate_out", _positive("rate_out", self.rate_out, num))
        if self.cores is not None:
            set_(self, "cores", _positive("cores", self.cores, num))
        if self.server_threads is not None:
            threads = np.asarray(self.server_threads, dtype=np.int64)
            _positive("server_threads", threads, num)
            set_(self, "server_threads", threads)
        speeds = self.speeds if isinstance(self.speeds, Mapping) else dict.fromkeys(TASK_KINDS, self.speeds)
        if unknown := [kind for kind in speeds if kind not in TASK_KINDS]:
            raise ValueError(f"machines: speeds of {unknown[0]!r}: kinds are {', '.join(TASK_KINDS)}")
        set_(self, "speeds", {kind: _positive(f"speeds of {kind}", v, num) for kind, v in speeds.items()})
        if self.uplink is not None:
            self._set_uplinks(num)
        elif self.uplink_in is not None or self.uplink_out is not None:
            raise ValueError("machines: uplink_in and uplink_out need uplink, the number of each machine's uplink")
        names = [f"machine {m}" for m in range(num)] if self.names is None else [str(name) for name in self.names]
        if len(names) != num or len(set(names)) != num:
            raise ValueError(f"machines: {len(names)} names ({len(set(names))} different) for {num} machines")
        set_(self, "names", tuple(names))

    def _set_uplinks(self, num: int) -> None:
        uplink = np.asarray(self.uplink, dtype=np.int64)
        if self.uplink_in is None or self.uplink_out is None:
            raise ValueError("machines: uplink needs uplink_in and uplink_out, the rates of each uplink")
        rate_in = _positive("uplink_in", self.uplink_in, None)
        rate_out = _positive("uplink_out", self.uplink_out, len(rate_in))
        if uplink.shape != (num,) or uplink.min() < -1 or uplink.max() >= len(rate_in):
            raise ValueError(
                f"machines: uplink must be {num} numbers from -1 (none) to {len(rate_in) - 1}, got {uplink.tolist()}"
            )
        object.__setattr__(self, "uplink", uplink)
        object.__setattr__(self, "uplink_in", rate_in)
        object.__setattr__(self, "uplink_out", rate_out)

    @property
    def num_machines(self) -> int:
        return len(self.rate_in)

    @property
    def num_uplinks(self) -> int:
        return 0 if self.uplink_in is None else len(self.uplink_in)

    @property
    def num_links(self) -> int:
        """Links are numbered: out of each machine, into each machine, out of each uplink, into each uplink."""
        return 2 * self.num_machines + 2 * self.num_uplinks

    def link_rates(self) -> Floats:
        """[num_links] bytes per second."""
        parts = [self.rate_out, self.rate_in]
        if self.uplink_in is not None and self.uplink_out is not None:
            parts += [self.uplink_out, self.uplink_in]
        return np.concatenate(parts)

    def link_names(self) -> list[str]:
        assert self.names is not None
        names = [f"link out of {name}" for name in self.names] + [f"link into {name}" for name in self.names]
        ups = range(self.num_uplinks)
        return names + [f"uplink {u} out" for u in ups] + [f"uplink {u} in" for u in ups]

    def links(self, source: int, target: int) -> tuple[int, ...]:
        """Numbers of the links that a flow from one machine to another passes; none within a machine."""
        if source == target:
            return ()
        num = self.num_machines
        passed = [source, num + target]
        if self.uplink is not None and self.uplink[source] != self.uplink[target]:
            if self.uplink[source] >= 0:
                passed.append(2 * num + int(self.uplink[source]))
            if self.uplink[target] >= 0:
                passed.append(2 * num + self.num_uplinks + int(self.uplink[target]))
        return tuple(passed)

    def speed(self, kind: str) -> Floats:
        """[M]: how many times faster than the reference a task of that kind runs."""
        speeds: Mapping[str, Floats] = self.speeds  # type: ignore[assignment]
        return speeds[kind] if kind in speeds else np.ones(self.num_machines)


def _positive(name: str, values: npt.ArrayLike, size: int | None) -> Floats:
    given = np.array(values, dtype=np.float64, ndmin=1)
    if given.ndim != 1 or (size is not None and len(given) != size):
        raise ValueError(f"machines: {name} must be {size or 'a list of'} numbers, got an array of shape {given.shape}")
    bad = np.flatnonzero(~(np.isfinite(given) & (given > 0)))
    if len(bad):
        raise ValueError(f"machines: {name} of machine {bad[0]} is {given[bad[0]]}; it must be finite and more than 0")
    return given
