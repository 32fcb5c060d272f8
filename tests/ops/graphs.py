"""Small graphs for the tests of aggregation, and the dense matrices that are their oracle."""

from collections.abc import Callable, Sequence

import torch

from gnnsys.ops import CSC


def random_csc(num_src: int, num_dst: int, num_edges: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> CSC:
    """Multi-edges are likely, and the last destination has no in-edge."""
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_src, (num_edges,), generator=g)
    dst = torch.randint(0, max(num_dst - 1, 1), (num_edges,), generator=g)
    return CSC.from_edge_index(torch.stack([src, dst]).to(dtype), num_src, num_dst)


GRAPHS = {
    "several": lambda: random_csc(13, 9, 60),
    "int32": lambda: random_csc(7, 5, 25, torch.int32),
    "long rows": lambda: random_csc(40, 3, 700),
    "one row": lambda: CSC(torch.tensor([0, 4]), torch.tensor([2, 0, 2, 1]), 3),
    "no edges": lambda: CSC(torch.tensor([0, 0, 0]), torch.empty(0, dtype=torch.int64), 5),
    "no destinations": lambda: CSC(torch.tensor([0]), torch.empty(0, dtype=torch.int64), 5),
    "empty": lambda: CSC(torch.tensor([0]), torch.empty(0, dtype=torch.int64), 0),
}


def dense(csc: CSC, values: torch.Tensor) -> torch.Tensor:
    """The matrix [num_dst, num_src] whose entries add up `values` [num_edges] over parallel edges; differentiable."""
    flat = csc.dst() * csc.num_src + csc.indices.long()
    return values.new_zeros(csc.num_dst * csc.num_src).index_add(0, flat, values).view(csc.num_dst, csc.num_src)


def gradients_are_right(op: Callable[..., object], inputs: Sequence[torch.Tensor]) -> bool:
    """By finite differences: number by number, or, where there are many, along a random direction of each input."""
    return torch.autograd.gradcheck(op, inputs, fast_mode=sum(each.numel() for each in inputs) > 500)
