"""A model's state as one array of bytes, and back into a model of the same layout, which is compared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.graph import some


def plain_model(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and what torch.compile made of it."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def layout_of(model: nn.Module) -> list[list[Any]]:
    """Name, shape and dtype of every tensor of the state, as JSON has them."""
    return [[name, list(value.shape), str(value.dtype)] for name, value in _tensors(model)]


def check_layout(given: Sequence[Any], made: Sequence[Any], model: str) -> None:
    """ValueError unless the function makes a model of the layout that is trained."""
    if list(given) == list(made):
        return
    wrong = [entry for entry in given if entry not in made] or [entry for entry in made if entry not in given]
    raise ValueError(
        f"model={model!r} makes another model than the one that is trained: they differ in {some(wrong, most=3)}. "
        "Make the trained model by the same function"
    )


def state_to_bytes(model: nn.Module) -> Tensor:
    """All tensors of the state one after the other, uint8, on the host."""
    values = [value.detach().contiguous().reshape(-1).view(torch.uint8) for _, value in _tensors(model)]
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    return torch.cat(values).cpu() if values else torch.empty(0, dtype=torch.uint8, device="cpu")  # one wait


@torch.no_grad()
def load_state_bytes(model: nn.Module, data: Tensor) -> None:
    """Puts what `state_to_bytes` gave into a model of the same layout."""
    at = 0
    for name, value in _tensors(model):
        piece = data[at : at + value.nbytes]
        if piece.numel() != value.nbytes:
            raise ValueError(f"a state of {data.numel()} bytes ends before {name}")
        value.copy_(piece.clone().view(value.dtype).view(value.shape))
        at += value.nbytes
    if at != data.numel():
        raise ValueError(f"a state has {data.numel()} bytes, the model takes {at}")


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
