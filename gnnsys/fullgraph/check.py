"""Whether layers may be computed bin by bin at all: each is tried on a small graph, whole and in pieces, before it runs.

A layer fits where a node's row depends on its own row and those of its in-neighbours alone. Some look further, divide by
degrees of what they happen to see, normalise over rows, draw random numbers or remember what they saw last. They would
run, and give other numbers than one process does: they are refused, with the reason. What is tried is a copy, with
parameters shaken so that one which begins at zero hides nothing; the user's modules and generators stay as they are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gnnsys.comm.peers import Peers
from gnnsys.fullgraph.bins import Bin, make_bins
from gnnsys.fullgraph.layers import Dropout, Join, Rows, Stage, call, working_on
from gnnsys.ops import CSC, WholeDegrees

_NODES, _EDGES = 40, 160
_BOUNDS = (0, 3, 4, 19, 40)  # of the pieces
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest value; in other types 0.05


def check_layers(stages: Sequence[Stage], width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError at the first module of `stages` that gives other rows on pieces; `width` is that of the input."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        with torch.autocast(device.type, enabled=False):
            torch.manual_seed(0)
            _check_layers(stages, torch.randn(_NODES, width, dtype=dtype, device=device))


def _check_layers(stages: Sequence[Stage], rows: Tensor) -> None:
    csc, bins = _sample(rows.device)
    kept: dict[str, Tensor] = {}
    for stage in stages:
        kept |= dict.fromkeys(stage.keep_as, rows)
        if stage.conv is not None:
            rows = _tried(stage.conv, rows, csc, bins)
        for module in stage.then:
            if isinstance(module, Join):
                rows = module(rows, kept[module.name])
            elif not isinstance(module, Dropout):  # ours is keyed by node
                rows = _tried(module, rows, None, bins)


def _tried(module: nn.Module, rows: Tensor, csc: CSC | None, bins: Sequence[Bin]) -> Tensor:
    """What a module makes of the whole, if pieces add up to it."""
    name = type(module).__name__
    try:
        tried = copy.deepcopy(module)
    except Exception as error:
        warnings.warn(f"{name} cannot be copied, so nobody knows whether it fits full-graph training: {error}", stacklevel=2)
        return _apply(module, rows, csc)
    _shake(tried)
    before = [buffer.clone() for buffer in tried.buffers()]
    drawn = _random_state(rows.device)
    try:
        whole = _apply(tried, rows, csc)
    except Exception as error:
        takes = "rows" if csc is None else "rows and a structure"
        raise ValueError(f"{name} cannot be applied to {takes}, {list(rows.shape)} {rows.dtype}: {error}") from error
    if not isinstance(whole, Tensor) or whole.dim() != 2 or len(whole) != len(rows):
        got = list(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ValueError(f"{name} must give one row per node, [{len(rows)}, width], it gave {got}")
    if not all(map(torch.equal, drawn, _random_state(rows.device))):
        raise ValueError(
            f"{name} draws random numbers while it trains, which would be others on other numbers of ranks: set its "
            "dropout to 0, and drop its output with nn.Dropout in the list of layers, whose mask is keyed by node"
        )
    if any(now.shape != was.shape or not torch.equal(now, was) for now, was in zip(tried.buffers(), before)):
        raise ValueError(
            f"{name} changes its buffers by the rows it sees, a bin's instead of the whole graph's: put what does (batch "
            "normalisation) into the list of layers itself, or switch it to eval()"
        )
    try:
        pieces = torch.cat([_apply(tried, each.inputs(rows), each.csc, each) for each in bins]) if csc is not None else (
            torch.cat([_apply(tried, rows[first:end], None) for first, end in pairwise(_BOUNDS)])
        )
    except Exception as error:
        raise ValueError(f"{_differs(name, csc)} ({type(error).__name__}: {error})") from error
    if pieces.shape != whole.shape or not _close(pieces, whole):
        raise ValueError(_differs(name, csc))
    return whole
