"""What a user says of bins: how large they are, and how computing and sending overlap."""

from __future__ import annotations

from dataclasses import dataclass

from gnnsys.fullgraph.plan.bins import Packing


@dataclass(frozen=True, kw_only=True)
class BinSchedule:
    """How computing and sending overlap (G3, 4.4.2, and the variants of 4.6.7).

    `intra_layer`: a bin's rows are sent while the next one is computed, instead of all when the layer is done.
    `inter_layer`: a bin begins when its own inputs are there, instead of when the whole layer's are. `order` is that of
    nodes, "boundary" (those that others need first, breadth first) or "ids". Bins: see `Packing`; by default six per
    layer where bins move, as many between ranks but of 1,500 nodes on average, and else one.
    """

    intra_layer: bool = True
    inter_layer: bool = True
    order: str = "boundary"
    packing: Packing | None = None
