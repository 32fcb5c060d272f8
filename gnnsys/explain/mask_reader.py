"""Masks read from shared memory, and the table in which a machine's trainers learn where they are."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch

from gnnsys.explain.mailbox import Mailbox
from gnnsys.explain.masks import Masks, masks_from_arrays
from gnnsys.sampling import DistGraph

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.05
_ADDRESS = ("pid", "fd", "token", "capacity", "guide")


class MaskReader:
    """Reads masks of a machine's parts as they become newer, in any process of the machine.

    `addresses` are `Explaining.addresses()` of the trainer that explains: part -> where its masks are. A round may have
    explained a slice of the remote nodes: the others have what was read before, or else what `before` says.
    """

    def __init__(self, addresses: Mapping[int, Mapping[str, int]], before: Mapping[int, Masks] | None = None) -> None:
        self._boxes = {int(part): Mailbox.open(address) for part, address in addresses.items()}
        self._seen = dict.fromkeys(self._boxes, 0)
        self._known = dict(before or {})

    @classmethod
    def of(cls, boxes: Mapping[int, Mailbox], before: Mapping[int, Masks] | None = None) -> MaskReader:
        """Reads mailboxes that this process has already."""
        made = cls({}, before)
        made._boxes, made._seen = dict(boxes), dict.fromkeys(boxes, 0)
        return made

    def at(self, part: int, position: int) -> Masks | None:
        """Masks of a part that were made of the weights of `position`, the newest or those before; None without.

        Exact runs read those of every round, one after the other.
        """
        for back in (0, 1):
            found = self._boxes[part].read(back)
            if found is not None and (masks := masks_from_arrays(found[1])).position == position:
                return self._add(masks)
        return None

    def _add(self, masks: Masks) -> Masks:
        known = self._known[masks.requester] = masks.over(self._known.get(masks.requester))
        return known

    @property
    def is_left(self) -> bool:
        """Whether who explained has closed or ended: what follows, if anything does, is at other addresses."""
        return any(box.is_left for box in self._boxes.values())

    @property
    def torn(self) -> int:
        """Reads that met a message in the making."""
        return sum(box.torn for box in self._boxes.values())

    def take(self) -> Masks | None:
        """Masks of a part that are newer than those taken before; None where there are none. Never waits."""
        for part, box in self._boxes.items():
            unread = box.newest - self._seen[part]
            for back in (1, 0) if unread > 1 else (0,) if unread else ():  # a mailbox has the last two
                if (found := box.read(back)) is not None and found[0] > self._seen[part]:
                    self._seen[part] = found[0]
                    return self._add(masks_from_arrays(found[1]))
        return None


class MaskBoard:
    """Where the masks of each part are, said by the first trainer of its machine. One for each guide of a graph.

    `digest` is the guide's: trainers that share masks have the same guide.
    """

    def __init__(self, graph: DistGraph, digest: int) -> None:
        name = f"guide/{next(graph.guide_numbers)}"
        self._rows = graph.store.create(name, graph.parts.num_parts, (len(_ADDRESS),), torch.int64)
        self._digest = digest
        self._look_at = 0.0  # when to look again

    def tell(self, addresses: Mapping[int, Mapping[str, int]]) -> None:
        """Says where masks are, by part."""
        for part, address in addresses.items():
            told = {**address, "guide": self._digest}
            row = torch.tensor([[told[name] for name in _ADDRESS]], dtype=torch.int64, device="cpu")
            self._rows[torch.tensor([part], device="cpu")] = row

    def find(self, part: int, before: Mapping[int, Masks]) -> MaskReader | None:
        """Reads the masks of a part, if it was said where they are; looks every 50 ms at most.

        ValueError where they are of another guide.
        """
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + _LOOK_SECONDS
        try:
            (row,) = self._rows[torch.tensor([part], device="cpu")].tolist()
            address = dict(zip(_ADDRESS, row, strict=True))
            if not address["pid"]:
                return None
            reader = MaskReader({part: address}, before)
        except Exception as error:  # of a trainer or a server that was killed: those in their place will say so
            _log.debug("masks of part %s: %s", part, error)
            return None
        if address["guide"] != self._digest:
            raise ValueError(
                "the machine's first trainer has another guide than this one: make guides with the same options, in "
                "the same order, on every rank"
            )
        return reader
