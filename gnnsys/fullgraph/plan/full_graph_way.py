"""A way to compute passes over the whole graph: what is kept of the first layer, where rows lie, how many bins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gnnsys.planning import DEVICE, GIVEN

KEPT, ANEW, NARROW = "sums kept", "sums made anew", "dense half first"
FIRST = {
    KEPT: "the first layer's sums of rows that never change are made once and kept",
    ANEW: "the first layer's sums are made in every epoch",
    NARROW: "the first layer multiplies before it sums, and sums narrow rows in every epoch",
}
TAKEN_APART = "PyG's layers in halves"


@dataclass(frozen=True, kw_only=True)
class FullGraphWay:
    """Without arguments it is what is done without a plan. `first`, one of `FIRST`, is for a first layer that is linear
    and whose rows never change. `takes_apart`: PyG's layers in halves, instead of called. `place` of rows: where x is,
    or the device that computes. `num_bins` of a layer, None: as ever. `all_cores`: torch uses all of this rank's."""

    first: str = KEPT
    takes_apart: bool = False
    place: str = GIVEN
    num_bins: int | None = None
    all_cores: bool = False

    def __post_init__(self) -> None:
        if self.first not in FIRST:
            raise ValueError(f"the first layer has {', '.join(FIRST)}, got {self.first!r}")
        if self.place not in (GIVEN, DEVICE):
            raise ValueError(f"rows are {GIVEN!r} or on the {DEVICE!r}, got {self.place!r}")
        if self.num_bins is not None and self.num_bins < 1:
            raise ValueError(f"num_bins must be at least 1, got {self.num_bins}")

    @property
    def name(self) -> str:
        parts = [
            "rows on the device" if self.place == DEVICE else "",
            TAKEN_APART if self.takes_apart else "",
            "" if self.first == KEPT and not self.takes_apart else self.first,
            "" if self.num_bins is None else f"{self.num_bins} bin{'s' if self.num_bins > 1 else ''}",
            "all cores" if self.all_cores else "",
        ]
        return ", ".join(part for part in parts if part) or GIVEN

    @property
    def of_plan(self) -> tuple[bool, bool, int | None]:
        """What passes of one plan have in common, beside where rows lie."""
        return self.first == NARROW, self.takes_apart, self.num_bins

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FullGraphWay:
        unknown = set(value) - {one.name for one in fields(cls)}
        if unknown:
            raise ValueError(f"a way through the full graph has no {', '.join(sorted(unknown))}")
        return cls(**value)


AS_GIVEN = FullGraphWay()
