"""What convolutions and LSTMs hold on the CPU beside their results: copies that oneDNN, or torch itself, makes of rows.

oneDNN wants channels in blocks of 16, so it copies what it reads and writes. Where torch computes a convolution itself,
it lays out all patches as columns first. Bytes are at most what is said here; a test compares them with real runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

CONVOLUTION, CONVOLUTION_BACK = "aten::convolution", "aten::convolution_backward"
LSTM, LSTM_BACK = "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"
ONEDNN = frozenset({CONVOLUTION, CONVOLUTION_BACK, LSTM, LSTM_BACK})
_BLOCK = 16  # channels
_FEW = (1, 3)  # channels of a first layer, which is read as it is
_PER_CALL = 32 << 10
_GATES = 4
_LEARNED = (16, 48)  # steps of a sequence that are run, to know what a longer one keeps


def onednn_scratch(name: str, arguments: Sequence[Any]) -> int:
    """Bytes that one of `ONEDNN` holds at its peak beside what it returns."""
    if name in (LSTM, LSTM_BACK):
        return _of_lstm(name, arguments)
    if name == CONVOLUTION:
        rows, weight, bias, *options = arguments
        return _of_convolution(rows, weight, None if bias is None else list(bias.shape), options, None)
    grad, rows, weight, bias_shape, *options = arguments
    return _of_convolution(rows, weight, bias_shape, options, grad)


def lstm_workspace(arguments: Sequence[Any]) -> int:
    """Bytes of the workspace that a forward pass keeps for the backward pass: torch's fake kernel gives none.

    It grows by as much with each step of the sequence, so of a long one a few steps are run.
    """
    rows, hidden, cell, is_train = arguments[0], arguments[5], arguments[6], arguments[15]
    if not is_train:
        return 0
    length, batch, width = rows.shape
    sizes = tuple((tuple(arguments[place].shape), arguments[place].dtype) for place in range(1, 5))
    learn = functools.partial(_learned, batch, width, rows.dtype, sizes, tuple(hidden.shape), cell.dtype)
    if length <= _LEARNED[1]:
        return learn(length)
    short, long = map(learn, _LEARNED)
    return long + -(-(long - short) * (length - _LEARNED[1]) // (_LEARNED[1] - _LEARNED[0]))


@functools.lru_cache(maxsize=64)
def _learned(
    batch: int, width: int, dtype: torch.dtype, weights: tuple[Any, ...], state: tuple[int, ...],
    of_cell: torch.dtype, length: int,
) -> int:  # fmt: skip
    zeros = functools.partial(torch.zeros, device="cpu")
    with _disable_current_modes(), torch.enable_grad():  # without gradients there is no workspace
        given = [zeros(shape, dtype=kind) for shape, kind in weights]
        states = zeros(state, dtype=dtype), zeros(state, dtype=of_cell)
        made = torch.ops.aten.mkldnn_rnn_layer(
            zeros(length, batch, width, dtype=dtype), *given, *states, False, [], 2, state[-1], 1, True, False, False,
            True,
        )  # fmt: skip
        return int(made[3].untyped_storage().nbytes())


def _of_lstm(name: str, arguments: Sequence[Any]) -> int:
    rows, from_rows, from_hidden, bias, hidden = *arguments[:4], arguments[5]
    length, batch, size = rows.shape[0], rows.shape[1], hidden.shape[-1]
    padded = -(-size // _BLOCK) * _BLOCK
    gates = (length + 3) * batch * _GATES * padded * rows.element_size()
    weights = (_bytes(from_rows) + _bytes(from_hidden)) * (_BLOCK + 1) // _BLOCK + _bytes(bias)
    results = length * batch * size * rows.element_size() + 2 * _bytes(hidden) if name == LSTM_BACK else 0
    return gates + weights + results + _PER_CALL


def _of_convolution(
    rows: Tensor, weight: Tensor, bias_shape: list[int] | None, options: Sequence[Any], grad: Tensor | None
) -> int:
    stride, padding, dilation, is_transposed, output_padding, groups = options[:6]
    backend = str(
        torch._C._select_conv_backend(  # type: ignore[attr-defined]
            rows, weight, None, stride, padding, dilation, is_transposed, output_padding, groups, bias_shape
        )
    ).rpartition(".")[2]
    ends = _ends(rows, weight, stride, padding, dilation, is_transposed, output_padding) if grad is None else None
    out_shape = [rows.shape[0], *(ends or grad.shape[2:])]  # type: ignore[union-attr]
    out_channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
    out = prod(out_shape) * out_channels * rows.element_size()
    if backend.startswith("Slow"):
        patches = rows.shape[2:] if is_transposed else out_shape[1:]
        channels = out_channels if is_transposed else rows.shape[1]
        num_rows = 1 if "Dilated" in backend or "Transpose" in backend else rows.shape[0]
        return int(num_rows * channels * prod(weight.shape[2:]) * prod(patches) * rows.element_size())
    if not backend.startswith(("Mkldnn", "?")):
        return 0
    blocked_rows = _blocked(_bytes(rows), rows.shape[1])
    blocked_out = _blocked(out, out_channels)
    blocked_weight = _blocked(_blocked(_bytes(weight), weight.shape[0]), weight.shape[1])
    if rows.shape[1] in _FEW and (grad is None or not options[6][0]):
        blocked_rows = 0
    if grad is None:
        return max(blocked_rows + blocked_weight + blocked_out - out, blocked_out)
    copied = 0 if grad.is_contiguous() else _bytes(grad)
    # With strides, gradients of rows are copied once more.
    kept = max(blocked_out, blocked_rows) if max(stride) > 1 and options[6][0] else blocked_out
    return copied + kept + blocked_rows + (1 + torch.get_num_threads()) * blocked_weight + _PER_CALL


def _ends(
    rows: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    is_transposed: bool, output_padding: Sequence[int],
) -> list[int]:  # fmt: skip
    found = []
    for at, size in enumerate(rows.shape[2:]):
        s, p, d, kernel = (_at(each, at) for each in (stride, padding, dilation, weight.shape[2:]))
        reach = d * (kernel - 1) + 1
        if is_transposed:
            found.append((size - 1) * s - 2 * p + reach + _at(output_padding, at))
        else:
            found.append((size + 2 * p - reach) // s + 1)
    return found


def _at(values: Sequence[int], at: int) -> int:
    """One for each dimension, or one for all."""
    return int(values[at] if len(values) > 1 else values[0])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocked(num_bytes: int, channels: int) -> int:
    return num_bytes * (-(-channels // _BLOCK) * _BLOCK) // max(1, channels)
