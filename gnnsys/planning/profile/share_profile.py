"""One share of the seeds: what each of its first batches asks every part for, and what its own work costs.

Shares are ranges of the train ids in ascending order, as `gnnsys.split` cuts them whatever the placement is. Flows are
by owner part; those of parts that turn out to be on the trainer's own machine do not cross a link. How many rows are
asked for depends a little on the placement: a trainer keeps as many rows as its batches have remote ones. So rows are
counted for a trainer with no part on its machine, and for one with the parts that most of its seeds are in. Where
rows come late, more batches are under way, which share more of them: so each is counted for rows in time, and late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Amounts = npt.NDArray[np.float64]

HOME_SHARE = 0.25  # of a share's seeds: parts with as many are its home

PULLED = ("pull_out", "pull_in", "pull_seconds")  # what depends on where the trainer is, and on how late rows come

# By batch and owner part.
FLOWS = (
    "rows",  # that the batch needs; fewer are asked for, where others were in flight or were kept
    "edges",  # sampled there
    "sample_out",  # bytes of requests for neighbours
    "sample_in",  # of replies
    "pull_out",  # bytes of requests for rows
    "pull_in",  # of replies
    "sample_seconds",  # core-seconds of serving
    "pull_seconds",
    "home_pull_out",  # the same three where the parts of most seeds (`home`) are on the trainer's machine
    "home_pull_in",
    "home_pull_seconds",
    "late_pull_out",  # the same three, and those at home, where rows come late
    "late_pull_in",
    "late_pull_seconds",
    "home_late_pull_out",
    "home_late_pull_in",
    "home_late_pull_seconds",
    "requests",  # messages
)
# By batch.
WORK = (
    "seeds",
    "nodes",  # of the batch, all hops
    "batch_bytes",  # of the batch as it is trained on: rows and structure
    "sampling",  # core-seconds of the trainer's machine, without what parts serve
    "fetching",  # of putting rows in place
    "computing",  # seconds of the step, on the cores or on the device
)


@dataclass(frozen=True, kw_only=True)
class ShareProfile:
    """Arrays of `num_batches` x `num_parts` (`FLOWS`) and of `num_batches` (`WORK`), float64. `home`: the parts that
    most seeds of the share are in. `local_cost`: what the trainer's own threads take for a part on its machine, beside
    what serving it takes: there is no message."""

    rows: Amounts
    edges: Amounts
    sample_out: Amounts
    sample_in: Amounts
    pull_out: Amounts
    pull_in: Amounts
    sample_seconds: Amounts
    pull_seconds: Amounts
    home_pull_out: Amounts
    home_pull_in: Amounts
    home_pull_seconds: Amounts
    late_pull_out: Amounts
    late_pull_in: Amounts
    late_pull_seconds: Amounts
    home_late_pull_out: Amounts
    home_late_pull_in: Amounts
    home_late_pull_seconds: Amounts
    requests: Amounts
    seeds: Amounts
    nodes: Amounts
    batch_bytes: Amounts
    sampling: Amounts
    fetching: Amounts
    computing: Amounts
    home: tuple[int, ...] = ()
    local_cost: float = 1.0

    def __post_init__(self) -> None:
        for name in (*FLOWS, *WORK):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        shape = self.rows.shape
        for name in (*FLOWS, *WORK):
            wanted = shape if name in FLOWS else shape[:1]
            given = getattr(self, name)
            if len(shape) != 2 or given.shape != wanted:
                raise ValueError(f"{name} must have the shape {wanted}, has {given.shape}")
            if not np.isfinite(given).all() or (given < 0).any():
                raise ValueError(f"{name} must be finite and not negative")
        if not shape[0]:
            raise ValueError("a share needs at least one batch")
        if not 0 <= self.local_cost <= 1:
            raise ValueError(f"local_cost must be from 0 to 1, got {self.local_cost}")
        object.__setattr__(self, "home", tuple(int(part) for part in self.home))
        if any(not 0 <= part < shape[1] for part in self.home):
            raise ValueError(f"home must be parts from 0 to {shape[1] - 1}, got {list(self.home)}")

    @property
    def num_batches(self) -> int:
        return self.rows.shape[0]

    @property
    def num_parts(self) -> int:
        return self.rows.shape[1]

    @property
    def bytes_in(self) -> Amounts:
        """[num_batches, num_parts]: what the parts send."""
        return self.sample_in + self.pull_in

    @property
    def bytes_out(self) -> Amounts:
        return self.sample_out + self.pull_out

    @property
    def serving(self) -> Amounts:
        """[num_batches, num_parts]: core-seconds."""
        return self.sample_seconds + self.pull_seconds

    def at_home(self) -> ShareProfile:
        """As it is for a trainer that has the parts of `home` on its machine, and no others."""
        return self.seen_from(self.home)

    def seen_from(self, local: Sequence[int], late: float = 0.0) -> ShareProfile:
        """As it is for a trainer with the parts `local` on its machine: nothing of them crosses a link, but all of it
        is done. Rows are those that were counted at home where home is among them, else those without a part.
        `late`: the share of its batches whose rows come late."""
        away = np.ones(self.num_parts)
        away[list(local)] = 0.0
        at_home = bool(self.home) and set(self.home) <= set(local)
        prefix = "home_" if at_home else ""
        pulled = {
            name: away * ((1 - late) * getattr(self, f"{prefix}{name}") + late * getattr(self, f"{prefix}late_{name}"))
            for name in PULLED
        }
        pulled["pull_seconds"] = pulled["pull_seconds"] + self.local_cost * self.pull_seconds * (1 - away)
        sampled = {name: getattr(self, name) * away for name in ("sample_out", "sample_in")}
        cost = away + self.local_cost * (1 - away)
        return replace(self, **pulled, **sampled, sample_seconds=self.sample_seconds * cost)

    def to_json(self) -> dict[str, Any]:
        return {
            "home": list(self.home),
            "local_cost": self.local_cost,
            **{name: _plain(getattr(self, name)) for name in (*FLOWS, *WORK)},
        }

    @classmethod
    def from_json(cls, value: Any) -> ShareProfile:
        names = ["home", "local_cost", *FLOWS, *WORK]
        if not isinstance(value, Mapping) or sorted(value) != sorted(names):
            raise ValueError(f"a share has {', '.join(names)}, got {sorted(value) if value else value!r}")
        try:
            amounts = {name: np.array(value[name], dtype=np.float64) for name in (*FLOWS, *WORK)}
            return cls(**amounts, home=value["home"], local_cost=float(value["local_cost"]))
        except TypeError as error:
            raise ValueError(str(error)) from None


def mix(shares: list[tuple[float, ShareProfile]]) -> ShareProfile:
    """A share whose seeds are of several, in these proportions: every batch is the weighted sum of one of each.

    Where there are fewer batches of one, they are taken again from the first.
    """
    total = sum(weight for weight, _ in shares)
    if len(shares) == 1:
        return shares[0][1]
    num_batches = max(share.num_batches for _, share in shares)
    made: dict[str, Amounts] = {}
    for name in (*FLOWS, *WORK):
        parts = [
            weight / total * getattr(share, name)[np.arange(num_batches) % share.num_batches]
            for weight, share in shares
        ]
        made[name] = np.sum(parts, axis=0)
    home = {part for weight, share in shares if weight >= HOME_SHARE * total for part in share.home}
    cost = sum(weight / total * share.local_cost for weight, share in shares)
    return ShareProfile(**made, home=tuple(sorted(home)), local_cost=cost)


def _plain(values: Amounts) -> list[Any]:
    """Whole numbers as such, seconds with seven digits: files stay small."""
    if (values == np.rint(values)).all():
        return values.astype(np.int64).tolist()
    rounded: list[Any] = np.vectorize(lambda value: float(f"{value:.7g}"), otypes=[np.float64])(values).tolist()
    return rounded
