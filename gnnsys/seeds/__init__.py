"""Who trains on what: `split` into shares, what `input_nodes` may be, and the rest of an epoch dealt anew."""

from gnnsys.seeds.elastic import Ranks
from gnnsys.seeds.input_nodes import InputNodes, check_alone, read_mask, resolve_nodes, type_with_mask
from gnnsys.seeds.leftover import InputIds, Leftover, ShareRecipe, deal, even_range, num_batches
from gnnsys.seeds.shares import Share, assign_shares, owners
from gnnsys.seeds.split import IdRange, Seeds, split

Recipe = ShareRecipe  # the old name, kept for one version

__all__ = [
    "IdRange",
    "InputIds",
    "InputNodes",
    "Leftover",
    "Ranks",
    "Recipe",
    "Seeds",
    "Share",
    "ShareRecipe",
    "assign_shares",
    "check_alone",
    "deal",
    "even_range",
    "num_batches",
    "owners",
    "read_mask",
    "resolve_nodes",
    "split",
    "type_with_mask",
]
