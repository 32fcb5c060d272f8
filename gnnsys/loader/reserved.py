"""Names that a batch sets itself: an array of the graph that is called so would be overwritten, or hidden by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gnnsys.loader.batch import Batch, TypeValues
from gnnsys.loader.negatives import NegativeSampling
from gnnsys.loader.sampled import FREE_THE_NAME

_ALWAYS = ("n_id", "e_id", "edge_index", "input_id", "num_sampled_nodes", "num_sampled_edges")
_OF_BATCH = frozenset(name for name in (*vars(Batch), *Batch.__annotations__) if not name.startswith("_"))
_OF_STORE = frozenset(name for name in dir(TypeValues) if not name.startswith("_"))  # batch["paper"].values is a method


def node_names(is_disjoint: bool, is_timed: bool) -> tuple[str, ...]:
    """What a batch of seed nodes sets; `is_timed` where the seeds' times were given."""
    return (*_ALWAYS, "batch_size", *(("batch",) if is_disjoint else ()), *(("seed_time",) if is_timed else ()))


def link_names(
    is_disjoint: bool, negatives: NegativeSampling | None, *, is_labelled: bool, is_timed: bool, is_weighted: bool
) -> tuple[str, ...]:
    """What a batch of links sets."""
    names = [*_ALWAYS, *(["batch"] if is_disjoint else []), *(["edge_label_weight"] if is_weighted else [])]
    if negatives is not None and negatives.is_triplet:
        names += ["src_index", "dst_pos_index", "dst_neg_index", *(["seed_time"] if is_timed else [])]
        return tuple(names)
    names += ["edge_label_index", *(["edge_label_time"] if is_timed else [])]
    return (*names, "edge_label") if is_labelled or negatives is not None else tuple(names)


def check_names_free(arrays: Mapping[Any, Sequence[str]], own: Iterable[str], is_homogeneous: bool) -> None:
    """ValueError for an array, by type, that batches could not have under its name."""
    taken = {*own, *(_OF_BATCH if is_homogeneous else _OF_STORE)}
    for key, names in arrays.items():
        for name in names:
            if name in taken:
                raise ValueError(f"{key!r} has an array {name!r}, a name that batches use themselves: {FREE_THE_NAME}")
