"""A way to make batches: where the graph lies, and how many threads load and compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

GIVEN = "as given"
DEVICE, PINNED, CACHED = "device", "pinned", "cached"
PLACES = {
    GIVEN: "the graph stays where it is",
    DEVICE: "structure and rows are copied to the device, which samples and gathers there",
    PINNED: "structure and rows are copied to pinned host memory, which the device reads over the bus",
    CACHED: "the same, and the device keeps the rows that batches will ask for most",
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """`place` is one of `PLACES`. `loading_threads`: None is the loader's own choice. `compute_threads`: torch's; None,
    as in every way of "auto", leaves them as they are, and with them the rounding of the training. `sums`: of batches
    in turn, whether the first layer's sums are made from the graph's rows, in place of a copy of these: by the host,
    where the graph is there, for a device. `products`: of batches in turn, whether the host multiplies rows by the
    first layer's weights for a device. `by_host`: of batches in turn, whether the host samples them, where the device
    samples the others. `device_bytes` and
    `host_bytes` are what it takes beyond what there is already; `predicted` are seconds a batch takes to load, None
    where nothing is known. These three are of a place and time: ways that differ in nothing else are the same."""

    place: str = GIVEN
    loading_threads: int | None = None
    compute_threads: int | None = None
    sums: tuple[bool, ...] = ()
    products: tuple[bool, ...] = ()
    by_host: tuple[bool, ...] = ()
    device_bytes: int = field(default=0, compare=False)
    host_bytes: int = field(default=0, compare=False)
    predicted: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise ValueError(f"a way's place is one of {', '.join(PLACES)}, got {self.place!r}")
        for name in ("sums", "products", "by_host"):
            object.__setattr__(self, name, tuple(map(bool, getattr(self, name))))  # JSON has lists
        if any(self.sums) and any(self.products):
            raise ValueError("a way has sums or products of the first layer made by the host, not both")

    @property
    def name(self) -> str:
        counts = {"loading": self.loading_threads, "computing": self.compute_threads}
        threads = [f"{count} {what}" for what, count in counts.items() if count is not None]
        sums = f", sums of {_share(self.sums)} made ahead" if any(self.sums) else ""
        products = f", products of {_share(self.products)} made by the host" if any(self.products) else ""
        by_host = f", {_share(self.by_host)} sampled by the host" if any(self.by_host) else ""
        return self.place + by_host + sums + products + (f", threads: {', '.join(threads)}" if threads else "")

    @property
    def has_patterns(self) -> bool:
        """Whether a loader must be told of some batches that they are made otherwise."""
        return any((*self.sums, *self.products, *self.by_host))

    def without_patterns(self) -> Way:
        return replace(self, sums=(), products=(), by_host=())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Way:
        unknown = set(value) - {one.name for one in fields(cls)}
        if unknown:
            raise ValueError(f"a way has no {', '.join(sorted(unknown))}")
        return cls(**value)


def _share(pattern: tuple[bool, ...]) -> str:
    return "all batches" if all(pattern) else f"{sum(pattern)} in {len(pattern)} batches"
