"""Who trains on what: `split` into shares, what `input_nodes` may be, and the rest of an epoch dealt anew."""

from gnnsys.seeds.elastic import Ranks
from gnnsys.seeds.input_nodes import (
    InputNodes,
    SeedsByType,
    check_alone,
    check_node_ids,
    check_share,
    read_mask,
    resolve_nodes,
    type_with_mask,
)
from gnnsys.seeds.leftover import InputIds, Leftover, ShareRecipe, deal, even_range, num_batches
from gnnsys.seeds.shares import Share, assign_shares, owners
from gnnsys.seeds.split import IdRange, Seeds, split
from gnnsys.seeds.split_links import LinkSplit, split_links

Recipe = ShareRecipe  # the old name, kept for one version

__all__ = [
    "IdRange",
    "InputIds",
    "InputNodes",
    "Leftover",
    "LinkSplit",
    "Ranks",
    "Recipe",
    "Seeds",
    "SeedsByType",
    "Share",
    "ShareRecipe",
    "assign_shares",
    "check_alone",
    "check_node_ids",
    "check_share",
    "deal",
    "even_range",
    "num_batches",
    "owners",
    "read_mask",
    "resolve_nodes",
    "split",
    "split_links",
    "type_with_mask",
]
