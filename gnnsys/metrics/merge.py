"""What all ranks have counted, together. Alone, or where torch.distributed has not begun, what this one has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(values: Tensor, group: Any = None) -> Tensor:
    """The 1-d arrays of all ranks, behind one another in the order of ranks; each may have another length."""
    group = _group(group)
    if group is None:
        return values
    device = _device(group)
    sizes = _all_gather(torch.tensor([values.numel()], device=device), group)
    padded = torch.zeros(max(map(int, sizes)), dtype=values.dtype, device=device)
    padded[: values.numel()] = values
    found = _all_gather(padded, group) if padded.numel() else [padded] * len(sizes)
    return torch.cat([each[: int(size)] for each, size in zip(found, sizes, strict=True)]).to(values.device)


def add_up(counts: Tensor, group: Any = None) -> Tensor:
    """The sum of whole numbers over all ranks, of one shape on each."""
    group = _group(group)
    if group is None:
        return counts
    total = counts.to(_device(group), copy=True)
    group.allreduce([total]).wait()
    return total.to(counts.device)


def _all_gather(values: Tensor, group: Any) -> list[Tensor]:
    found = [torch.empty_like(values) for _ in range(group.size())]
    group.allgather([found], [values]).wait()
    return found


def _group(group: Any) -> Any:
    """The process group given, or that of all ranks; None where there is nobody else."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return None if group is None or group.size() == 1 else group


def _device(group: Any) -> torch.device:
    """Where this group sends from: host memory where it can."""
    try:
        if isinstance(group, dist.ProcessGroup):
            group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return torch.device("cuda")
    return torch.device("cpu")
