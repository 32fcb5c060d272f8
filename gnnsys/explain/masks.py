"""Masks: what an explanation says, and its form as arrays. No pickle; whatever does not add up is a ValueError.

SN, a byte per remote node, and SF, a number per feature column, both larger where more is lost without it. They belong
to a requester, the part whose remote nodes they are, and to a version, which rises from one round to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnsys.sampling import NodeScores

_FORMAT = 1
_NUM_ARRAYS = 4
_MOST_VERSION = (1 << 62) - 1


@dataclass(frozen=True)
class Masks:
    """Importance of remote nodes and of columns, for one part.

    `sn` is in [1, 255], so that every node can be drawn; `sf` is in [0, 1]. Nodes that were never explained are not
    among `ids`: they have the median. `position` is the batch number whose weights were explained, `divergence` what
    the masks still cost, and `seconds` how long the round took.
    """

    version: int
    requester: int
    ids: Tensor  # int64 [num_nodes], global ids, ascending
    sn: Tensor  # uint8 [num_nodes]
    sf: Tensor  # float32 [num_features]
    position: int = -1
    divergence: float = 0.0
    seconds: float = 0.0

    @property
    def median(self) -> int:
        """SN of nodes that were never explained."""
        return int(self.sn.median()) if self.sn.numel() else 128

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in masks_to_arrays(self))

    def columns(self, share: float) -> Tensor:
        """The columns with the highest SF, a share of all and at least one: int64, ascending; ties by number."""
        if not 0 < share <= 1:
            raise ValueError(f"the share of columns must be in (0, 1], got {share}: write 1 for all of them")
        count = max(1, round(share * self.sf.numel()))
        best = torch.argsort(self.sf, descending=True, stable=True)[:count]
        return best.sort().values

    def better_columns(self, share: float, current: Tensor | None, gain: float) -> Tensor:
        """The best columns, or `current` where these are not worth `gain` more, as a share: frequent changes cost
        accuracy (§3.4.2), and rows that batches share."""
        best = self.columns(share)
        if current is None or current.numel() != best.numel():
            return best
        worth = [float(self.sf[columns].double().sum()) for columns in (best, current)]
        return best if worth[0] > (1 + gain) * worth[1] else current

    def node_scores(self) -> NodeScores:
        """SN as guided draws take it: `GuidedSampler.use(masks.node_scores())`."""
        return NodeScores(self.requester, self.ids.clone(), self.sn.clone())  # masks may be views of a whole message

    def over(self, before: Masks | None) -> Masks:
        """These masks, with what `before` says of nodes that these do not have.

        Of a column both say something: what `before` says counts as much as the nodes that it alone has.
        """
        if before is None or torch.equal(before.ids, self.ids):
            return self
        older = ~torch.isin(before.ids, self.ids)
        ids, order = torch.cat([self.ids, before.ids[older]]).sort()
        sf = self.sf.lerp(before.sf, int(older.sum()) / max(1, ids.numel()))
        return replace(self, ids=ids, sn=torch.cat([self.sn, before.sn[older]])[order], sf=sf.clamp_(0, 1))

    def of(self, version: int, position: int, seconds: float) -> Masks:
        """The same masks as a round of a process has them."""
        return replace(self, version=version, position=position, seconds=seconds)


def make_masks(
    requester: int, ids: Tensor, node_importance: Tensor, column_importance: Tensor, divergence: float = 0.0
) -> Masks:
    """Masks of version 0 from importances of any scale: what is at least as large as 99% of all becomes the largest."""
    sn = (_to_unit(node_importance) * 255).round_().clamp_(1, 255).to(torch.uint8)
    return Masks(0, requester, ids, sn, _to_unit(column_importance), divergence=divergence)


def _to_unit(values: Tensor) -> Tensor:
    values = values.detach().float().nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
    if not values.numel():
        return values
    top = values.kthvalue(math.ceil(0.99 * values.numel())).values
    top = top if top > 0 else values.max()
    return (values / top).clamp(max=1) if top > 0 else torch.ones_like(values)


def masks_to_arrays(masks: Masks) -> list[Tensor]:
    """Head (int64), ids, sn and sf: what a message or a buffer carries."""
    numbers = [_FORMAT, masks.version, masks.requester, masks.position, masks.ids.numel(), masks.sf.numel()]
    times = torch.tensor([masks.divergence, masks.seconds], dtype=torch.float64, device="cpu").view(torch.int64)
    head = torch.cat([torch.tensor(numbers, dtype=torch.int64, device="cpu"), times])
    return [head, masks.ids, masks.sn, masks.sf]


def masks_from_arrays(arrays: Sequence[Tensor]) -> Masks:
    """The masks that `masks_to_arrays` wrote."""
    if len(arrays) != _NUM_ARRAYS:
        raise ValueError(f"masks have {_NUM_ARRAYS} arrays, got {len(arrays)}")
    head, ids, sn, sf = arrays
    _check(head, torch.int64, 8, "head")
    version, wanted, requester, position, num_ids, num_columns = head[:6].tolist()
    if version != _FORMAT:
        raise ValueError(f"masks must have format {_FORMAT}, got {version}")
    if not 0 <= wanted <= _MOST_VERSION or requester < 0 or position < -1:
        raise ValueError(f"masks have version {wanted}, requester {requester} and position {position}")
    _check(ids, torch.int64, num_ids, "ids")
    _check(sn, torch.uint8, num_ids, "sn")
    _check(sf, torch.float32, num_columns, "sf")
    if num_ids and (int(ids[0]) < 0 or bool((ids[1:] <= ids[:-1]).any())):
        raise ValueError("ids of masks must be global ids that ascend")
    if num_ids and int(sn.min()) == 0:
        raise ValueError("sn of masks must be in [1, 255]")
    if not bool(((sf >= 0) & (sf <= 1)).all()):
        raise ValueError("sf of masks must be in [0, 1]")
    divergence, seconds = head[6:].clone().view(torch.float64).tolist()
    return Masks(wanted, requester, ids, sn, sf, position, divergence, seconds)


def _check(array: Tensor, dtype: torch.dtype, size: int, what: str) -> None:
    if array.dim() != 1 or array.dtype != dtype or array.numel() != size:
        raise ValueError(f"{what} of masks must be {dtype} [{size}], got {array.dtype} {list(array.shape)}")
