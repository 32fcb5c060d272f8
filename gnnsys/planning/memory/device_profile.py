"""What a kind of device takes beside tensors, as it was measured: its context, cuBLAS, and scratch inside of operators.

One JSON file per kind of device, with an entry for each version of torch. Those of the package lie beside this file;
`gnnsys estimate --calibrate` measures others into the user's cache, which come first.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.planning.memory.reduction_scratch import REDUCTIONS, bytes_inside_reduction

_SHIPPED = Path(__file__).parent / "device_profiles"
_VERSION = 1
_PUTS = frozenset(("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"))


@dataclass(frozen=True)
class ScratchCurve:
    """Bytes that an operator holds inside, by the number of values of its argument `argument` (the first tensor, where
    that is a list). Between measured points it is a straight line, past the last one the slope of the last two."""

    op: str
    argument: int
    dtype: str
    points: tuple[tuple[int, int], ...]

    def num_bytes(self, size: int) -> int:
        """At `size` values.

        >>> ScratchCurve("aten::sort", 0, "int64", ((1000, 8000), (2000, 16000))).num_bytes(3000)
        24000
        """
        place = bisect_left(self.points, (size, -1))
        if place < len(self.points) and (self.points[place][0] == size or place == 0):
            return self.points[place][1]
        if len(self.points) == 1:
            return self.points[0][1]
        place = min(max(place, 1), len(self.points) - 1)
        (left, low), (right, high) = self.points[place - 1], self.points[place]
        return max(0, int(low + (size - left) * (high - low) / (right - left)))


@dataclass(frozen=True)
class DeviceProfile:
    """Of one kind of device and one version of torch, in bytes.

    `product_workspace` is what cuBLAS is given at a thread's first product, and keeps; `backward_workspace` the same of
    the thread of backward passes. `linear_workspace` is kept by the first product that adds a bias,
    `linear_scratch` held during each. `context` is what a process takes before and outside of torch's allocator.
    `processors` (multiprocessors) and the threads of each say how reductions are parted.
    """

    kind: str
    name: str
    torch: str
    capacity: int | None = None
    context: int = 0
    product_workspace: int = 0
    backward_workspace: int = 0
    linear_workspace: int = 0
    linear_scratch: int = 0
    processors: int = 0
    threads_per_processor: int = 0
    curves: tuple[ScratchCurve, ...] = field(default=(), repr=False)

    @cached_property
    def _by_op(self) -> dict[str, list[ScratchCurve]]:
        found: dict[str, list[ScratchCurve]] = {}
        for curve in self.curves:
            found.setdefault(curve.op, []).append(curve)
        return found

    @property
    def ops(self) -> frozenset[str]:
        """The operators that hold something inside."""
        return frozenset(self._by_op) | (REDUCTIONS if self.processors else frozenset())

    def blocks(self, op: str, arguments: Any) -> list[int]:
        """Bytes of each block that a call holds inside."""
        if op in REDUCTIONS and self.processors:
            return bytes_inside_reduction(op, arguments, self.processors, self.threads_per_processor)
        num_bytes = self.scratch(op, arguments)
        return [num_bytes] if num_bytes else []

    def scratch(self, op: str, arguments: Any) -> int:
        """By the size of its arguments, as it was measured; of a dtype that was not, the most."""
        if op in _PUTS and not (_adds(arguments) or torch.are_deterministic_algorithms_enabled()):
            return 0  # nothing is sorted where the last one may win
        curves = self._by_op.get(op, [])
        told = [(curve, _tensor_at(arguments, curve.argument)) for curve in curves]
        found = [(curve, tensor) for curve, tensor in told if tensor is not None]
        same = [(curve, tensor) for curve, tensor in found if curve.dtype == _dtype_name(tensor)]
        return max((curve.num_bytes(tensor.numel()) for curve, tensor in same or found), default=0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> DeviceProfile:
        curves = tuple(
            ScratchCurve(each["op"], each["argument"], each["dtype"], tuple((n, b) for n, b in each["points"]))
            for each in given["curves"]
        )
        return cls(**{**given, "curves": curves})


def device_kind_of(name: str) -> str:
    """The kind of a device, as `--device` names it, from the name that torch shows.

    >>> device_kind_of("NVIDIA H200"), device_kind_of("NVIDIA A100-SXM4-80GB")
    ('h200', 'a100-sxm4-80gb')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ").strip()).strip("-")


def profile_folders() -> tuple[Path, Path]:
    """Where profiles lie: the user's cache, and the package."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return root / "gnnsys" / "memory", _SHIPPED


def known_kinds() -> list[str]:
    """The kinds of devices that have a profile."""
    return sorted({path.stem for folder in profile_folders() if folder.is_dir() for path in folder.glob("*.json")})


def load_device_profile(kind: str, version: str | None = None) -> DeviceProfile | None:
    """The profile of a kind for a version of torch, as it is here by default; else that of the nearest version."""
    wanted = _release(torch.__version__ if version is None else version)
    found: list[DeviceProfile] = []
    for folder in profile_folders():
        found += read_profiles(folder / f"{kind}.json")
    if not found:
        return None
    return min(found, key=lambda profile: _distance(_release(profile.torch), wanted))  # the first one of equals


def read_profiles(path: Path) -> list[DeviceProfile]:
    """Those of a file, one per version of torch; none where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        given = json.loads(text)
        if given["version"] != _VERSION:
            raise ValueError(f"it has version {given['version']}, and {_VERSION} is read here")
        return [DeviceProfile.from_json(each) for each in given["profiles"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no profile of a device: {error}. Remove it, or measure it again") from error


def save_device_profile(profile: DeviceProfile, path: Path | None = None) -> Path:
    """Puts a profile into a file, in the place of one of the same torch; the user's cache by default."""
    path = profile_folders()[0] / f"{profile.kind}.json" if path is None else path
    kept = [each for each in read_profiles(path) if each.torch != profile.torch]
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"version": _VERSION, "profiles": [each.as_json() for each in [*kept, profile]]}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(_compact(whole), encoding="utf-8")
    partial.replace(path)
    return path


def _compact(whole: Mapping[str, Any]) -> str:
    """JSON with a curve per line."""
    text = json.dumps(whole, indent=1)
    return re.sub(r"\[\s+(-?\d+),\s+(-?\d+)\s+\]", r"[\1, \2]", text) + "\n"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip((*one, 0, 0, 0)[:3], (*other, 0, 0, 0)[:3], strict=True))


def _adds(arguments: Any) -> bool:
    """Of `index_put` and its like: values of the same place are added."""
    return len(arguments) > 3 and bool(arguments[3])


def _tensor_at(arguments: Any, place: int) -> Tensor | None:
    value = arguments[place] if place < len(arguments) else None
    if isinstance(value, list | tuple):
        value = next((each for each in value if isinstance(each, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
