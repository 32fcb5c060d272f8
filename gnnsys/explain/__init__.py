"""DGS (thesis, chapter 3): what of other parts a model needs, explained beside training.

For users: `Guide`, which a loader is given; `Explaining`, which makes `Masks` of the parts of a machine in a process of
its own; `MaskReader`, which reads them in the machine's other trainers.

For other rooms: the explanation graph of a part (`pool_part`, `explain_part`), what makes masks of it (`Explainer`:
`TrainedMasks`, `GradientInput`, `MixedMasks`, `ColumnNorms`, `Degrees`, `RandomMasks`), masks as arrays
(`masks_to_arrays`, `masks_from_arrays`), and `Mailbox`, messages in shared memory.
"""

from gnnsys.explain.explained_sampler import ExplainedSampler
from gnnsys.explain.explainers import (
    ColumnNorms,
    Degrees,
    Explainer,
    GradientInput,
    MixedMasks,
    RandomMasks,
    TrainedMasks,
)
from gnnsys.explain.explaining import Explaining, check_guided, remote_ids
from gnnsys.explain.explanation_graph import ExplanationGraph, PooledPart, explain_part, pool_part
from gnnsys.explain.guide import EXPLAINERS, Guide
from gnnsys.explain.mailbox import Mailbox
from gnnsys.explain.mask_reader import MaskReader
from gnnsys.explain.masks import Masks, make_masks, masks_from_arrays, masks_to_arrays

__all__ = [
    "EXPLAINERS",
    "ColumnNorms",
    "Degrees",
    "ExplainedSampler",
    "Explainer",
    "Explaining",
    "ExplanationGraph",
    "GradientInput",
    "Guide",
    "Mailbox",
    "MaskReader",
    "Masks",
    "MixedMasks",
    "PooledPart",
    "RandomMasks",
    "TrainedMasks",
    "check_guided",
    "explain_part",
    "make_masks",
    "masks_from_arrays",
    "masks_to_arrays",
    "pool_part",
    "remote_ids",
]
