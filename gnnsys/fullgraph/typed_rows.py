"""Rows by node type as the one tensor that a pass over a typed graph takes, and back.

Types whose rows are narrower than others' get columns of zeros, which the first layer does not read; types that it does
not read are zeros. Features that need no gradient are joined once and kept beside the user's, so that they travel once,
as those of other graphs do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnsys.fullgraph.keyed_dropout import Dropout
from gnnsys.fullgraph.modules import JoinKept
from gnnsys.fullgraph.plan.model_stages import ModelStage
from gnnsys.fullgraph.plan.rank_share import TypedPart
from gnnsys.fullgraph.run.typed_layer import TypedConv, TypedRowLayer, layer_name
from gnnsys.graph import NodeType, some
from gnnsys.nn import runs_as
from gnnsys.ops import STRUCTURES


class _FirstLayer(NamedTuple):
    """The first typed layer, what sees the rows of all types before it does, and whether a `Keep` marks them."""

    layer: TypedConv | TypedRowLayer
    before: str
    is_kept: bool

    @classmethod
    def of(cls, stages: Sequence[ModelStage]) -> _FirstLayer:
        before, is_kept = "", False
        for stage in stages:
            is_kept |= bool(stage.keep_as)
            for module in stage.modules:
                if isinstance(module, (TypedConv, TypedRowLayer)):
                    return cls(module, before or ("Keep" if is_kept else ""), is_kept)
                if not runs_as(module, Dropout):  # which leaves zeros as they are
                    before = before or layer_name(module)
        raise AssertionError("a typed graph's model has a typed layer")


def join_rows(x: Any, typed: TypedPart, stages: Sequence[ModelStage]) -> tuple[Tensor, dict[NodeType, int]]:
    """The rows of all types, one type after the other, [num_core, width of the widest], and whose they are: the widths
    of those types. The first layer is told them."""
    first = _FirstLayer.of(stages)
    if not isinstance(x, Mapping):
        raise ValueError(f"x must be rows by node type, as model.share.rows('x') gives them, got {type(x).__name__}")
    _check_rows(x, typed, first.layer)
    given = {t: x[t] for t in typed.types.node_types if t in x and (first.is_kept or t in first.layer.reads)}
    widths = {t: rows.shape[1] for t, rows in given.items()}
    _check_widths(widths, first)
    first.layer.input_widths = None if first.before else widths
    width = max(rows.shape[1] for rows in given.values())
    counts = dict(zip(typed.types.node_types, typed.counts, strict=True))
    one = next(iter(given.values()))

    def make() -> Tensor:
        parts = [
            F.pad(given[t], (0, width - given[t].shape[1])) if t in given else one.new_zeros(count, width)
            for t, count in counts.items()
        ]
        return torch.cat(parts)

    if any(rows.requires_grad for rows in given.values()):
        return make(), widths
    return STRUCTURES.get(make, *given.values(), key=("rows of types", *given, *counts.values())), widths


def split_rows(
    rows: Tensor, typed: TypedPart, stages: Sequence[ModelStage], given: Collection[NodeType]
) -> dict[NodeType, Tensor]:
    """Rows by node type: those that the last typed layer makes, and those that a `JoinKept` behind it brings back.

    `given` are the types that x had rows of.
    """
    there, kept = set(given), dict[str, set[NodeType]]()
    for stage in stages:
        kept |= dict.fromkeys(stage.keep_as, there)
        for module in stage.modules:
            if isinstance(module, (TypedConv, TypedRowLayer)):
                there = set(module.made)
            elif isinstance(module, JoinKept):
                there = there | kept[module.name]
    found = typed.types.split(rows, typed.counts)
    return {t: found[t] for t in typed.types.node_types if t in there}


def _check_rows(x: Mapping[NodeType, Any], typed: TypedPart, first: TypedConv | TypedRowLayer) -> None:
    node_types = typed.types.node_types
    unknown = [t for t in x if t not in node_types]
    if unknown:
        raise ValueError(f"x has rows of {unknown[0]!r}, and the graph has nodes of {some(node_types)}")
    missing = [t for t in first.reads if t not in x]
    if missing:
        raise ValueError(
            f"x has no rows of {missing[0]!r}, which the first layer reads: give its features, or rows of an embedding "
            f"of this rank's nodes, model.nodes[{missing[0]!r}]"
        )
    if not x:
        raise ValueError(f"x has no rows: give those of {some(node_types)}")
    for node_type, count in zip(node_types, typed.counts, strict=True):
        rows = x.get(node_type)
        if node_type in x and not (
            isinstance(rows, Tensor) and rows.dim() == 2 and rows.shape[0] == count and rows.is_floating_point()
        ):
            got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"x[{node_type!r}] must be float [{count}, width], a row for each of this rank's nodes, got {got}"
            )
    kinds = {(rows.dtype, rows.device) for rows in x.values()}
    if len(kinds) > 1:
        raise ValueError(f"x must have rows of one dtype on one device, got {some(sorted(map(str, kinds)))}")


def _check_widths(widths: Mapping[NodeType, int], first: _FirstLayer) -> None:
    differ, says = len(set(widths.values())) > 1, first.layer.widths
    if differ and first.before:
        raise ValueError(
            f"x has rows of different widths, {dict(widths)}, and {first.before}, which comes first, takes the rows of "
            "all types at once: begin the list with ByNodeType({node type: nn.Linear(...)})"
        )
    if differ and says is None:
        raise ValueError(
            f"x has rows of different widths, {dict(widths)}, and the first layer does not say which it takes: give it "
            "in_channels by node type, or begin the list with ByNodeType({node type: nn.Linear(...)})"
        )
    for node_type, width in widths.items() if not first.before else ():
        wanted = (says or widths).get(node_type, width)
        if wanted != width:
            raise ValueError(f"x[{node_type!r}] is {width} wide, and the first layer takes {wanted} of that type")
