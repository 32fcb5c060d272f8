"""What the arrays of an `.npz` must be before anything is made of them. Each refusal names the array.

Anybody's program may have written the file: types of numbers that torch does not have, names given twice, offsets that
do not fit. What is let through here is neither lost nor misread later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnsys.graph.names_in_errors import some
from gnnsys.graph.schema import EdgeType, NodeType

Arrays = dict[str, np.ndarray]

_OF_EDGES = ("weight", "time")  # as in a table of edges
_SPLIT = re.compile(r"(train|val|test)_(mask|masks|idx)")
_LISTED = re.compile(r"(train|val|test)_(idx(_\w+)?|masks)")  # become masks
_MASK = re.compile(r"(train|val|test)_mask(_\w+)?")


def check_kinds(arrays: Arrays) -> None:
    """Numbers that torch has as well, or text."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # a member of the archive that is no .npy
            raise ValueError(f"{name} is not an array")
        if array.dtype.kind == "U":
            continue
        try:
            torch.from_numpy(np.empty(0, array.dtype))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must hold numbers or text, got {array.dtype}") from error


def check_edge_index(edge_index: np.ndarray) -> None:
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}")
    if edge_index.dtype.kind not in "iu":
        raise ValueError(f"edge_index must hold integers, got {edge_index.dtype}")


def take(arrays: Arrays, name: str, because: str) -> np.ndarray:
    """Removes an array that another one cannot do without."""
    if name not in arrays:
        raise ValueError(f"has {because}, but no {name}")
    return arrays.pop(name)


def names_in(name: str, array: np.ndarray) -> list[str]:
    """The entries of an array of names, each there once."""
    if array.dtype.kind != "U" or array.ndim != 1:
        raise ValueError(f"{name} must be a list of names, got {array.dtype} {list(array.shape)}")
    names: list[str] = array.tolist()
    for i, entry in enumerate(names):
        if entry in names[:i]:
            raise ValueError(f"{name} has {entry!r} twice")
    return names


def edge_types_in(array: np.ndarray) -> list[EdgeType]:
    """`edge_type_names`, which look like "src|relation|dst"."""
    edge_types = []
    for name in names_in("edge_type_names", array):
        parts = name.split("|")
        if len(parts) != 3:
            raise ValueError(f"edge_type_names must look like 'src|relation|dst', got {name!r}")
        edge_types.append((parts[0], parts[1], parts[2]))
    return edge_types


def check_edge_type(edge_type: np.ndarray, num_edges: int, num_types: int) -> None:
    """Every edge has one of the types, so that none is left out when they are told apart."""
    if edge_type.dtype.kind not in "iu":
        raise ValueError(f"edge_type must hold integers, got {edge_type.dtype}")
    if edge_type.shape != (num_edges,):
        raise ValueError(f"edge_type must have an entry per edge, {num_edges}, got {list(edge_type.shape)}")
    if edge_type.size and not 0 <= int(edge_type.min()) <= int(edge_type.max()) < num_types:
        raise ValueError(f"edge_type must be in [0, {num_types}), the number of edge_type_names")


def offsets_in(offsets: np.ndarray, names: np.ndarray) -> dict[NodeType, tuple[int, int]]:
    """The range of ids of each node type: `node_type_offsets` with `node_type_names`."""
    types = names_in("node_type_names", names)
    if offsets.dtype.kind not in "iu" or offsets.shape != (len(types) + 1,):
        got = f"{offsets.dtype} {list(offsets.shape)}"
        raise ValueError(
            f"node_type_offsets must be {len(types) + 1} integers, one more than node_type_names, got {got}"
        )
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds):
        raise ValueError(f"node_type_offsets must start at 0 and ascend, got {bounds}")
    return {node_type: (bounds[i], bounds[i + 1]) for i, node_type in enumerate(types)}


def check_types(edge_types: Sequence[EdgeType], node_types: Sequence[NodeType], target: Any) -> None:
    """`target_type` and both ends of every edge type are node types."""
    for edge_type in edge_types:
        for end in (edge_type[0], edge_type[2]):
            if end not in node_types:
                name = "|".join(edge_type)
                there = some(node_types, near=end)
                raise ValueError(f"edge_type_names has {name!r}, but {end!r} is not one of the node types {there}")
    if target not in node_types:
        raise ValueError(f"target_type must be one of the node types {some(node_types)}, got {target!r}")


def is_per_edge(name: str, array: np.ndarray, num_nodes: int, num_edges: int) -> bool:
    """By the number of rows, and by the name where there are as many nodes as edges."""
    if array.ndim == 0 or array.shape[0] != num_edges:
        return False
    return num_nodes != num_edges or name in _OF_EDGES or name.startswith("edge_")


def owner_of(
    name: str, array: np.ndarray, num_nodes: Mapping[NodeType, int], target: NodeType, num_edges: int
) -> tuple[NodeType | None, str]:
    """The node type that an array of a typed graph belongs to and its name there; None where it has a row per edge.

    `year_book` is `year` of books. What names no type is the target's, unless its number of rows says edges. ValueError
    for `book_year` and `first_book` that may be of either type by their rows.
    """
    whole = bool(_SPLIT.fullmatch(name))  # train_mask, though a type may be called mask
    ends = [t for t in num_nodes if name.endswith(f"_{t}") and name.removesuffix(f"_{t}").strip("_") and not whole]
    owner = max(ends, key=len, default=target)
    own_name = name.removesuffix(f"_{owner}").removesuffix("_") if ends else name
    if owner != target and not name.endswith(f"__{owner}"):
        _check_not_the_targets(name, own_name, array, num_nodes, owner, target, num_edges)
    is_list = bool(_LISTED.fullmatch(own_name))  # of ids, as many as there happen to be
    if not is_list and is_per_edge(name, array, num_nodes[owner], num_edges):
        begins = [t for t in num_nodes if name.startswith(f"{t}_") and array.shape[0] == num_nodes[t]]
        if not begins:
            return None, name
    if ends:
        return owner, own_name
    begins = [node_type for node_type in num_nodes if name.startswith(f"{node_type}_")]
    other = max(begins, key=len, default=target)
    if other != target:
        bare = name.removeprefix(f"{other}_")
        num_rows = array.shape[0] if array.ndim else 0
        fit = {each for each in (target, *begins) if num_nodes[each] == num_rows}
        if not is_list and len(fit) == 1 and num_rows != num_edges:  # only one of them has as many rows
            return (target, name) if target in fit else (fit.pop(), bare)
        raise ValueError(
            f"{name} begins with the node type {other!r}, but a name without a type at its end belongs to "
            f"{target!r}, the target_type: call it {bare}__{other} if it has a row per {other!r}, or "
            f"{name}_{target} if it has one per {target!r}"
        )
    return target, name


def _check_not_the_targets(
    name: str,
    own_name: str,
    array: np.ndarray,
    num_nodes: Mapping[NodeType, int],
    owner: NodeType,
    target: NodeType,
    num_edges: int,
) -> None:
    """ValueError for an array that ends in a type's name, but has as many rows as the target, whose it may be."""
    is_known = own_name in ("x", "y") or _SPLIT.fullmatch(own_name) is not None
    is_targets = array.ndim > 0 and array.shape[0] == num_nodes[target]
    if is_known or not is_targets or is_per_edge(name, array, num_nodes[target], num_edges):
        return
    raise ValueError(
        f"{name} ends in the node type {owner!r}, but its {array.shape[0]} rows may be of {target!r} as well, the "
        f"target_type: call it {name}_{target} if it has a row per {target!r}, or {own_name}__{owner}, with two "
        f"underscores, if it has one per {owner!r}"
    )


def check_once(names: Iterable[tuple[NodeType, str, str]]) -> None:
    """ValueError where two arrays would be one. Each is its node type, its name there and its name in the file."""
    seen: dict[tuple[NodeType, str], str] = {}
    for node_type, own_name, name in names:
        becomes = mask_name(own_name) or own_name
        other = seen.setdefault((node_type, becomes), name)
        if other != name:
            raise ValueError(
                f"has {becomes!r} of node type {node_type!r} twice, as {other} and as {name}: leave one of them away"
            )


def mask_name(name: str) -> str | None:
    """What a list of ids, or masks by split, are called once they are a mask with a row per node."""
    match = _LISTED.fullmatch(name)
    return f"{match[1]}_mask{match[3] or ''}" if match else None


def count_in(name: str, array: np.ndarray) -> int:
    """An array that is one number."""
    if array.dtype.kind not in "iu" or array.size != 1 or int(array.reshape(())) < 0:
        raise ValueError(f"{name} must be one integer >= 0, got {array.dtype} {list(array.shape)}")
    return int(array.reshape(()))


def check_has_rows(name: str, array: np.ndarray) -> None:
    if array.ndim == 0:
        raise ValueError(f"{name} must have a row per node, got a single number")


def check_mask(name: str, array: np.ndarray) -> None:
    """A mask has one column, or one per split."""
    if _MASK.fullmatch(name) and (array.ndim not in (1, 2) or 0 in array.shape[1:]):
        raise ValueError(f"{name} must have shape [num_nodes] or [num_nodes, num_splits], got {list(array.shape)}")


def check_masks(name: str, array: np.ndarray) -> None:
    if array.ndim != 2 or array.shape[0] == 0:
        raise ValueError(f"{name} must have shape [num_splits, num_nodes], got {list(array.shape)}")


def check_csr(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, shape: np.ndarray) -> tuple[int, int]:
    """The rows and columns of features in CSR form; ValueError where the four arrays do not fit."""
    for name, array, kinds in [
        ("x_data", data, "iufb"),
        ("x_indices", indices, "iu"),
        ("x_indptr", indptr, "iu"),
        ("x_shape", shape, "iu"),
    ]:
        if array.dtype.kind not in kinds or array.ndim != 1:
            wanted = "integers" if kinds == "iu" else "numbers"
            raise ValueError(f"{name} must be a list of {wanted}, got {array.dtype} {list(array.shape)}")
    if shape.size != 2 or int(shape.min()) < 0:
        raise ValueError(f"x_shape must be rows and columns, got {shape.tolist()}")
    num_rows, num_columns = (int(n) for n in shape)
    ends = indptr.astype(np.int64) if indptr.dtype.kind == "u" else indptr  # unsigned numbers never descend
    if ends.shape != (num_rows + 1,) or ends[0] != 0 or ends[-1] != len(data) or (np.diff(ends) < 0).any():
        raise ValueError("x_indptr does not fit x_shape and x_data")
    if len(indices) != len(data) or (len(indices) and not 0 <= indices.min() <= indices.max() < num_columns):
        raise ValueError("x_indices does not fit x_shape and x_data")
    return num_rows, num_columns


def as_float32(name: str, data: np.ndarray) -> Tensor:
    """Numbers as float32; ValueError for one that would only become infinite."""
    wide = torch.from_numpy(data)
    narrow = wide.float()
    lost = narrow.isinf() & ~wide.isinf()
    if bool(lost.any()):
        raise ValueError(f"{name} must fit in float32, got {wide[lost][0].item()}")
    return narrow
