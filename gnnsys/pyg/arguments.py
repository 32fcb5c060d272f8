"""Checks a loader's arguments when it is made. Every error says what to write instead."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NodeSamplerInput

import gnnsys.loader
from gnnsys.graph import EDGE, NODE, Graph, as_integers, as_links, ids_or_mask, is_column, some, warn_of_unfit_rows
from gnnsys.loader import check_link_weights, check_times, edge_index_of, words_of
from gnnsys.pyg.sampler import NeighborSampler
from gnnsys.seeds import Share

_log = logging.getLogger(__name__)
_looked_at: Any = WeakTensorKeyDictionary()  # arrays of users' data

_OF_OURS = ("guide", "execution")  # which a user of our own loaders may well expect here
TORCH_WORDS = (*words_of(torch.utils.data.DataLoader.__init__), *_OF_OURS)
PYG_WORDS = (*TORCH_WORDS, "custom_cls", "input_id")
INSTEAD = {
    **dict.fromkeys(
        [*words_of(gnnsys.loader.NeighborLoader.__init__), *words_of(gnnsys.loader.LinkNeighborLoader.__init__)],
        "it is an argument of gnnsys's own loaders, gnnsys.NeighborLoader say, whose batches PyG's layers take as well",
    ),
    "device": "batches are made on the host: write batch.to(device), or use gnnsys.NeighborLoader, which takes device",
    "num_threads": "write num_workers, which is the number of threads",
    "prefetch": "write prefetch_factor",
}


def check_kwargs(kwargs: dict[str, Any]) -> None:
    for name in _OF_OURS:
        if name in kwargs:
            raise ValueError(
                f"PyG-style loaders take no {name}: use gnnsys.NeighborLoader or gnnsys.LinkNeighborLoader, whose "
                "batches PyG's layers take as well"
            )
    if "batch_size" in kwargs and kwargs["batch_size"] is None and kwargs.get("batch_sampler") is None:
        raise ValueError("batch_size=None turns batching off: give a number, or a batch_sampler that yields lists")


def check_share(share: Any, kwargs: dict[str, Any]) -> None:
    """A rank's share has the same number of batches on every rank, so a sampler of the user's cannot make them."""
    named = next((name for name in ("sampler", "batch_sampler") if kwargs.get(name) is not None), None)
    if named is not None:
        raise ValueError(f"{named} does not go with a rank's share, which has its batches: leave it away, or give ids")
    if len(share.ids) == 0:
        kwargs["shuffle"] = False  # torch shuffles no empty list


def checked_weights(given: Any, num_links: int) -> Tensor | None:
    """`edge_label_weight` on the host, one finite number >= 0 for each link; ValueError for anything else."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or not given.is_floating_point() or list(given.shape) != [num_links]:
        got = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise ValueError(
            f"edge_label_weight must be a floating point tensor with one entry per link, {num_links}, got {got}"
        )
    return check_link_weights(given.cpu(), "edge_label_weight")


def check_index(index: Tensor, num_inputs: int) -> None:
    """Checks positions among the inputs: a negative one would silently count from the end."""
    outside = index[(index < 0) | (index >= num_inputs)]
    if outside.numel() > 0:
        raise ValueError(f"index must be in [0, {num_inputs}), the loader's inputs, got {int(outside[0])}")


def check_exclusion(exclude_supervision: Any, sampler: BaseSampler | None) -> None:
    """ValueError for values that the face does not take, and for any beside a sampler that the user gave."""
    if exclude_supervision not in (None, True, False):
        raise ValueError(
            f"exclude_supervision must be True or False, got {exclude_supervision!r}: gnnsys.LinkNeighborLoader takes "
            "'self' and 'reverse' as well"
        )
    if sampler is not None and exclude_supervision is not None:
        raise ValueError(
            "exclude_supervision is an option of the sampler, and you gave one: write NeighborSampler(data, "
            f"num_neighbors, exclude_supervision={exclude_supervision})"
        )


def warn_of_unfit_features(data: Any) -> None:
    """Warns of features with NaN or infinite values, once for each array. Of large arrays a sample is looked at."""
    if isinstance(data, Data):
        stores = [("data", data._store)]
    elif isinstance(data, HeteroData):
        stores = [(f"data[{t!r}]", store) for t, store in (*data.node_items(), *data.edge_items())]
    else:
        return
    for where, store in stores:
        for name, rows in store.items():
            if type(rows) is not Tensor or rows.layout != torch.strided or rows.dim() < 2 or rows in _looked_at:
                continue
            _looked_at[rows] = True
            warn_of_unfit_rows(rows, f"{where}.{name}")


@functools.cache  # once per process
def suggest_exclusion() -> None:
    _log.warning(
        "LinkNeighborLoader: messages also pass over a batch's own links, as in PyG, so a model can read the answer "
        "off the edge. exclude_supervision=True leaves them and their reverses out; False keeps them without this line"
    )


def complete_nodes(data: Any, input_nodes: Any, sampler: BaseSampler) -> Any:
    """`input_nodes` as PyG takes them: resolves what PyG cannot (a rank's share, all nodes of a remote store)."""
    if isinstance(input_nodes, Share):
        ids = input_nodes.ids if isinstance(input_nodes.ids, Tensor) else input_nodes.ids[:]
        input_nodes = (input_nodes.type, ids) if isinstance(data, HeteroData) else ids
    is_pair = isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 and isinstance(input_nodes[0], str)
    if isinstance(data, HeteroData) or (not isinstance(data, Data) and _is_hetero(sampler)):
        if not isinstance(input_nodes, str) and not is_pair:
            raise ValueError(
                "input_nodes must name a node type, as 'type' or ('type', indices), for heterogeneous data"
            )
        node_type = input_nodes if isinstance(input_nodes, str) else input_nodes[0]
        num_nodes = _num_nodes(data, sampler, node_type)
        if num_nodes is None:
            known = sampler.graph.node_types if isinstance(sampler, NeighborSampler) else data.node_types
            raise ValueError(
                f"input_nodes: node type {node_type!r} does not exist, there are {some(known, near=node_type)}: write "
                "'type' or ('type', ids or a mask)"
            )
        if not is_pair or input_nodes[1] is None:
            return node_type
        return node_type, _check_mask(nodes_or_mask(input_nodes[1], num_nodes), num_nodes)
    if not isinstance(data, Data) and (is_pair or isinstance(input_nodes, str)):
        # Edges without a type connect nodes of one type, which the feature store may name, such as 'default'.
        group = input_nodes[0] if is_pair else input_nodes
        groups = {attr.group_name for attr in data[0].get_all_tensor_attrs()}
        if group not in groups:
            raise ValueError(f"input_nodes: node type {group!r} does not exist, the features have {some(groups)}")
        input_nodes = input_nodes[1] if is_pair else None
    if not isinstance(data, Data) and input_nodes is None:
        num_nodes = _num_nodes(data, sampler, None)
        if num_nodes is None:
            raise ValueError("input_nodes must be given for a (FeatureStore, GraphStore) with a sampler of your own")
        return torch.arange(num_nodes, device="cpu")
    if input_nodes is None:
        return None
    num_nodes = _num_nodes(data, sampler, None)
    return _check_mask(nodes_or_mask(input_nodes, num_nodes), num_nodes)


def nodes_or_mask(values: Any, num_nodes: int | None = None) -> Tensor:
    """`input_nodes` as a vector of ids, or a mask."""
    return ids_or_mask(flat_ids(values, "input_nodes"), "input_nodes", num_nodes)


def flat_ids(values: Any, name: str) -> Tensor:
    """Ids or a mask as a tensor. A column of ids, which `mask.nonzero()` is, becomes a vector: PyG takes both."""
    ids = as_integers(values, name)
    return ids.view(-1) if is_column(ids) else ids


def check_nodes(inputs: NodeSamplerInput, data: Any, sampler: BaseSampler, may_be_empty: bool = False) -> None:
    """Checks the seeds after PyG has turned them into ids."""
    if inputs.node.numel() == 0 and not may_be_empty:
        raise ValueError("input_nodes is empty: there are no seeds to sample from")
    _check_range("input_nodes", inputs.node, _num_nodes(data, sampler, inputs.input_type))
    check_times("input_time", inputs.time)
    if inputs.time is not None and inputs.time.shape != inputs.node.shape:
        raise ValueError(
            f"input_time must have one entry per seed, {inputs.node.numel()}, got {list(inputs.time.shape)}"
        )


def complete_links(data: Any, edge_label_index: Any, sampler: BaseSampler) -> Any:
    """`edge_label_index` as PyG takes it: resolves what PyG cannot (a rank's share, links of a remote store)."""
    if isinstance(edge_label_index, Share):
        share = edge_label_index
        if not isinstance(data, (Data, HeteroData)) or isinstance(share.type, str):
            raise ValueError(f"edge_label_index is a share of {share.type!r}: give the links themselves")
        ids = share.ids if isinstance(share.ids, Tensor) else share.ids[:]
        edge_label_index = (
            data.edge_index[:, ids] if isinstance(data, Data) else (share.type, data[share.type].edge_index[:, ids])
        )
    if isinstance(data, HeteroData) or (not isinstance(data, Data) and _is_hetero(sampler)):
        if not isinstance(edge_label_index, (tuple, list)):
            raise ValueError(
                "edge_label_index must name an edge type, as a type or (type, links), for heterogeneous data"
            )
        is_type = all(isinstance(each, str) for each in edge_label_index)
        if not is_type and len(edge_label_index) != 2:
            raise ValueError(
                f"edge_label_index must be an edge type or (type, links), got {len(edge_label_index)} values that are "
                "not names"
            )
        edge_type, links = (edge_label_index, None) if is_type else edge_label_index
        if isinstance(data, HeteroData):
            edge_type = _edge_type(data, edge_type, may_be_new=links is not None)
        if links is None:
            return edge_type if isinstance(data, HeteroData) else edge_label_index
        return edge_type, as_links(links, "edge_label_index")
    if isinstance(data, Data):
        return None if edge_label_index is None else as_links(edge_label_index, "edge_label_index")
    if edge_label_index is None and isinstance(sampler, NeighborSampler) and isinstance(sampler.graph, Graph):
        return (None, edge_index_of(sampler.graph, EDGE))
    return (None, edge_label_index) if isinstance(edge_label_index, Tensor) else edge_label_index


def _edge_type(data: HeteroData, given: Any, *, may_be_new: bool) -> Any:
    """An edge type in full. PyG takes (source, destination) and (name,) as well; links may be of a type that has no
    edges, between types of nodes that are there."""
    names = (given,) if isinstance(given, str) else tuple(given)
    if all(isinstance(name, str) for name in names) and 1 <= len(names) <= 3:
        found = data._to_canonical(*names)
        is_whole = isinstance(found, tuple) and len(found) == 3  # two names without edges are ('a', 'to', 'b')
        is_new = is_whole and {found[0], found[2]} <= set(data.node_types)
        if found in data.edge_types or (is_new and may_be_new):
            return found
    known = data.edge_types
    raise ValueError(f"edge_label_index: there is no edge type {given!r}, only {some(known, near=given)}")


def check_links(inputs: EdgeSamplerInput, data: Any, sampler: BaseSampler, may_be_empty: bool = False) -> None:
    """Checks the links after PyG has resolved them."""
    if inputs.row.numel() == 0 and not may_be_empty:
        raise ValueError("edge_label_index is empty: there are no links to sample from")
    src, dst = (None, None) if inputs.input_type is None else (inputs.input_type[0], inputs.input_type[-1])
    _check_range("edge_label_index[0]", inputs.row, _num_nodes(data, sampler, src))
    _check_range("edge_label_index[1]", inputs.col, _num_nodes(data, sampler, dst))
    check_times("edge_label_time", inputs.time)
    for name, values in (("edge_label", inputs.label), ("edge_label_time", inputs.time)):
        if values is not None and values.shape[0] != inputs.row.numel():
            raise ValueError(f"{name} must have one entry per link, {inputs.row.numel()}, got {values.shape[0]}")


def check_seeds(name: str, ids: Tensor, num_nodes: int) -> None:
    """ValueError for no seeds at all, and for some that are no nodes."""
    if ids.numel() == 0:
        raise ValueError(f"{name} is empty: there are no seeds to sample from")
    _check_range(name, ids, num_nodes)


def _is_hetero(sampler: BaseSampler) -> bool:
    return isinstance(sampler, NeighborSampler) and sampler.is_hetero


def _num_nodes(data: Any, sampler: BaseSampler, node_type: str | None) -> int | None:
    """None if it is not known."""
    if isinstance(sampler, NeighborSampler):
        known = node_type or NODE
        return sampler.graph.num_nodes(known) if known in sampler.graph.node_types else None
    if isinstance(data, HeteroData):
        return data[node_type].num_nodes if node_type in data.node_types else None
    return data.num_nodes if isinstance(data, Data) else None


def _check_range(name: str, ids: Tensor, num_nodes: int | None) -> None:
    if ids.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {list(ids.shape)}")
    if num_nodes is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
        raise ValueError(f"{name} must be in [0, {num_nodes}), got {int(ids.min())} to {int(ids.max())}")


def _check_mask(nodes: Tensor, num_nodes: int | None) -> Tensor:
    if nodes.dtype == torch.bool and num_nodes is not None and nodes.numel() != num_nodes:
        raise ValueError(f"input_nodes: a mask must have {num_nodes} entries, one per node, got {nodes.numel()}")
    return nodes
