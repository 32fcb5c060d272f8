"""Who serves which part, and who trains where: a pure function of what the machines have on their disks.

A part is served by exactly one machine, which has its folder. A machine may serve several parts or none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """`machine_of_rank[r]` is where rank r trains, `machine_of_part[p]` who serves part p; `rank` is this process."""

    rank: int
    machine_of_rank: tuple[int, ...]
    machine_of_part: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.machine_of_rank)

    @property
    def machine(self) -> int:
        return self.machine_of_rank[self.rank]


def place_parts(num_parts: int, folders: Sequence[Collection[int]]) -> list[int]:
    """The machine of each part; `folders[m]` are the parts whose folders machine m has.

    Where all have all: contiguous blocks, part p to machine p * M // P. Else each part goes to a machine that has its
    folder, so that the fullest machine has as few as can be. ValueError names parts that nobody has.

    >>> place_parts(4, [{0, 1, 2, 3}, {0, 1, 2, 3}]), place_parts(3, [{0, 1}, {1, 2}])
    ([0, 0, 1, 1], [0, 0, 1])
    """
    num_machines = len(folders)
    missing = [part for part in range(num_parts) if not any(part in have for have in folders)]
    if missing:
        raise ValueError(f"no machine has part {', '.join(map(str, missing[:16]))} of {num_parts}")
    blocks = [part * num_machines // num_parts for part in range(num_parts)]
    if all(part in folders[machine] for part, machine in enumerate(blocks)):
        return blocks
    return _balanced(num_parts, folders)


def _balanced(num_parts: int, folders: Sequence[Collection[int]]) -> list[int]:
    """Fills machines up to the least number that suffices, moving parts along augmenting paths (bipartite matching)."""
    for most in range(-(-num_parts // len(folders)), num_parts + 1):
        served: list[list[int]] = [[] for _ in folders]
        if all(_serve(part, folders, served, most, set()) for part in range(num_parts)):
            return [next(m for m, parts in enumerate(served) if part in parts) for part in range(num_parts)]
    raise AssertionError("every part is on some machine, so one machine per part suffices")


def _serve(part: int, folders: Sequence[Collection[int]], served: list[list[int]], most: int, seen: set[int]) -> bool:
    """Finds `part` a machine, asking those that are full to hand one of theirs on."""
    able = [machine for machine, have in enumerate(folders) if part in have and machine not in seen]
    for machine in able:
        if len(served[machine]) < most:
            served[machine].append(part)
            return True
    for machine in able:
        seen.add(machine)
        for other in list(served[machine]):
            if _serve(other, folders, served, most, seen):
                served[machine].remove(other)
                served[machine].append(part)
                return True
    return False
