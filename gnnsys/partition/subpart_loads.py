"""What every subpart carries of each constraint, counted from the parts and not believed from their manifest.

Which constraints there are is what the writer recorded in `info["balance"]`: names as on the command line, or objects
with `name` and `allowed` (the heaviest subpart to the average), such as the fields of `Balance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import NodeType
from gnnsys.partition.constraints import EDGE_SPLITS, Balance, count_in_ranges, etype_label, first_column
from gnnsys.partition.part import Part
from gnnsys.partition.parts_directory import Parts

_SPLITS = ("train", "val", "test")
_BY_EDGE_TYPE = ("etype", *EDGE_SPLITS)


@dataclass(frozen=True)
class Load:
    """One constraint. `subparts` is the weight of every subpart; `allowed` None where nothing was asked.

    `method` is how the parts were made, empty where that is not recorded.
    """

    name: str
    subparts: tuple[int, ...]
    trainers_per_part: int
    heaviest_node: int
    allowed: float | None
    method: str = ""

    @property
    def parts(self) -> tuple[int, ...]:
        trainers = self.trainers_per_part
        return tuple(sum(self.subparts[i : i + trainers]) for i in range(0, len(self.subparts), trainers))

    @property
    def part_shares(self) -> list[float]:
        """Every part's weight to the average part's."""
        return _shares(self.parts)

    @property
    def subpart_shares(self) -> list[float]:
        return _shares(self.subparts)

    @property
    def balance(self) -> Balance:
        """Over subparts, which is what partitioners are asked to balance; any ratio is met where nothing was asked."""
        allowed = float("inf") if self.allowed is None else self.allowed
        total, heaviest = sum(self.subparts), max(self.subparts)
        return Balance(self.name, total, heaviest, len(self.subparts), allowed, self.heaviest_node, self.method)


def _shares(loads: Sequence[int]) -> list[float]:
    total = sum(loads)
    return [load * len(loads) / total if total else 1.0 for load in loads]


def loads_of(parts: Parts) -> tuple[list[Load], list[str]]:
    """Every recorded constraint, counted; and a sentence for each entry that cannot be."""
    asked, notes = _asked(parts)
    recorded = parts.info.get("method")
    method = recorded if isinstance(recorded, str) else ""
    loads = []
    for name, allowed in asked.items():
        subparts, heaviest_node = [0] * parts.book.num_subparts, 0
        for index in range(parts.num_parts):
            part = parts.part(index)
            for node_type in parts.schema.node_types:
                weight = _weight(parts, part, node_type, name)
                first = parts.book.part_range(index, node_type).start
                heaviest_node = max(heaviest_node, int(weight.max()) if weight.numel() else 0)
                for s in range(index * parts.trainers_per_part, (index + 1) * parts.trainers_per_part):
                    own = parts.book.subpart_range(s, node_type)
                    subparts[s] += int(weight[own.start - first : own.stop - first].sum())
        loads.append(Load(name, tuple(subparts), parts.trainers_per_part, heaviest_node, allowed, method))
    return loads, notes


def _weight(parts: Parts, part: Part, node_type: NodeType, name: str) -> Tensor:
    """int64 or bool [num_core]: what each core node of a type weighs in the constraint `name`."""
    num_core = part.num_core(node_type)
    kind, _, which = name.partition(":")
    if kind in _SPLITS:
        mask = part.node_data[node_type].get(f"{kind}_mask")
        if mask is not None:
            return mask if mask.dtype == torch.bool and mask.dim() == 1 else mask.reshape(num_core, -1)[:, 0].ne(0)
    if kind == "nodes" or (kind == "ntype" and which == node_type):
        return torch.ones(1, dtype=torch.int64, device="cpu").expand(num_core)
    total = torch.zeros(num_core, dtype=torch.int64, device="cpu")
    for edge_type in parts.schema.edge_types if kind in ("edges", "etype") else []:
        if edge_type[2] == node_type and name in ("edges", etype_label(edge_type)):
            total += part.csc(edge_type).indptr[: num_core + 1].diff()
    for edge_type, arrays in part.edge_data.items() if kind in EDGE_SPLITS else ():
        if edge_type[2] == node_type and name == etype_label(edge_type, kind):
            bounds = part.csc(edge_type).indptr[: num_core + 1].long()
            total += count_in_ranges(first_column(arrays[EDGE_SPLITS[kind]])[: int(bounds[-1])], bounds)
    return total


def _asked(parts: Parts) -> tuple[dict[str, float | None], list[str]]:
    """Names and what is allowed; where nothing was recorded, what can be counted anyway."""
    known, asked, notes = _countable(parts), dict[str, float | None](), list[str]()
    recorded = parts.info.get("balance")
    if not isinstance(recorded, list):
        typed = len(parts.schema.node_types) > 1
        return dict.fromkeys(
            [name for name in known if _kind(name) not in _BY_EDGE_TYPE and (typed or _kind(name) != "ntype")]
        ), notes
    imbalance = _number(parts.info.get("imbalance"))
    asked["nodes"] = None if imbalance is None else 1 + imbalance
    for entry in recorded:
        name, allowed = entry, asked["nodes"]
        if isinstance(entry, dict):
            name, allowed = entry.get("name"), _number(entry.get("allowed"))
        each = name == "ntype" or name in _BY_EDGE_TYPE  # one per type, which a graph without types has none of
        names = [label for label in known if label == name or (each and _kind(label) == name)]
        asked |= dict.fromkeys(names, allowed)
        if not names and not each:
            notes.append(f"the manifest records a balance of {name!r}, which these parts have nothing to count by")
    return asked, notes


def _countable(parts: Parts) -> list[str]:
    """Every constraint that these parts can be counted by."""
    masks = {name for arrays in parts.schema.node_data.values() for name in arrays}
    names = ["nodes", "edges", *(split for split in _SPLITS if f"{split}_mask" in masks)]
    names += [f"ntype:{node_type}" for node_type in parts.schema.node_types]
    names += map(etype_label, parts.schema.edge_types)
    of_edges = parts.schema.edge_data.items()
    return names + [etype_label(t, name) for name, mask in EDGE_SPLITS.items() for t, have in of_edges if mask in have]


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
