"""A batch on its way from a sampler elsewhere to its trainer: the question, and the answer in chunks.

BATCH asks for one: the loader's digest, epoch and batch in the options, the seeds of each type as arrays, behind them
their times and trees where there are any. The answer is the arrays of the structure (`sample_to_arrays`), then the rows
of each array of each type in the loader's order, a few megabytes a chunk. Everything that is read is compared with what
was asked for: ids, shapes, dtypes, order and number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import Message, Reply, Request
from gnnsys.graph import NodeType
from gnnsys.loader.described_loader import AnyType, is_whole
from gnnsys.loader.sampled import Sampled
from gnnsys.sampling import Sample, SampleKey, sample_from_arrays, sample_to_arrays

CHUNK_BYTES = 4 << 20
MOST_ARRAYS = 256  # of a message of structure
MOST_SEEDS = 1 << 24
MOST_STRUCTURE = 1 << 16  # arrays
_KEYS = ("loader", "epoch", "batch", "types", "times", "trees")

Expected = list[tuple[AnyType, str, tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class WantedBatch:
    """What a batch is made of: seeds by type, with their times and trees where sampling needs them."""

    epoch: int
    batch: int
    seeds: Mapping[NodeType, Tensor]
    times: Mapping[NodeType, Tensor] | None = None
    trees: Mapping[NodeType, Tensor] | None = None

    def key(self, seed: int) -> SampleKey:
        return SampleKey(seed, self.epoch, self.batch)

    def question(self, loader: str) -> tuple[list[Tensor], dict[str, Any]]:
        """Arrays and options of a BATCH request."""
        parts = [self.seeds, self.times, self.trees]
        arrays = [part[t].long().contiguous() for part in parts if part is not None for t in self.seeds]
        has = {"times": self.times is not None, "trees": self.trees is not None}
        return arrays, {"loader": loader, "epoch": self.epoch, "batch": self.batch, "types": list(self.seeds), **has}

    @classmethod
    def from_request(cls, request: Request) -> tuple[str, WantedBatch]:
        """The loader's digest, and what is wanted; ValueError for what no trainer of ours asks."""
        options, arrays = request.options, request.arrays
        if sorted(options) != sorted(_KEYS):
            raise ValueError(f"BATCH has the options {', '.join(_KEYS)}, got {', '.join(map(str, options))[:200]}")
        loader, types = options["loader"], options["types"]
        if not isinstance(loader, str) or not all(is_whole(options[name], 0, 1 << 31) for name in ("epoch", "batch")):
            raise ValueError("BATCH names a loader, an epoch and a batch")
        if not isinstance(types, list) or not all(isinstance(t, str) for t in types) or len(set(types)) != len(types):
            raise ValueError("BATCH names each type of its seeds once")
        flags = [options["times"], options["trees"]]
        if not types or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError("BATCH has seeds of one type at least, and says whether they have times and trees")
        if len(arrays) != len(types) * (1 + sum(flags)):
            raise ValueError(f"BATCH for {len(types)} types of seeds has {len(arrays)} arrays")
        for array in arrays:
            if array.dtype != torch.int64 or array.dim() != 1 or array.numel() > MOST_SEEDS:
                raise ValueError(f"BATCH has int64 vectors of at most {MOST_SEEDS}, got {list(array.shape)}")
        groups = [
            dict(zip(types, arrays[at : at + len(types)], strict=True)) for at in range(0, len(arrays), len(types))
        ]
        if any(group[t].numel() != groups[0][t].numel() for group in groups for t in types):
            raise ValueError("BATCH has times or trees that are not as many as its seeds")
        behind = iter(groups[1:])
        times, trees = (next(behind) if flag else None for flag in flags)
        for numbers in (trees or {}).values():
            if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < MOST_SEEDS:
                raise ValueError(f"BATCH has trees from 0 to {MOST_SEEDS - 1}")
        return loader, cls(options["epoch"], options["batch"], groups[0], times, trees)


def row_arrays(sample: Sample) -> Iterator[tuple[AnyType, Tensor]]:
    """Types whose rows a batch has, with their ids, in the order in which they are sent."""
    yield from sample.node.items()
    for edge_type, ids in sample.edge.items():
        if edge_type in sample.row:
            yield edge_type, ids


def answer(sampled: Sampled, names: Mapping[AnyType, Sequence[str]], request: Request | None = None) -> Iterator[Reply]:
    """The chunks of a reply, smaller where `request` is answered at a rate."""
    chunk_bytes = CHUNK_BYTES if request is None else request.chunk_bytes(CHUNK_BYTES)
    structure = sample_to_arrays(sampled.sample)
    for at in range(0, len(structure), MOST_ARRAYS):
        yield Reply(structure[at : at + MOST_ARRAYS], {"structure": len(structure)})
    number = 0
    for key, _ in row_arrays(sampled.sample):
        for name in names.get(key, ()):
            rows: Tensor = sampled.rows[key][name]
            step = max(1, chunk_bytes // max(1, rows[:1].nbytes))
            for first in range(0, rows.shape[0], step):
                yield Reply([rows[first : first + step]], {"rows": number, "first": first})
            number += 1


def read_answer(
    chunks: Iterable[Message],
    wanted: WantedBatch,
    expected: Callable[[Sample], Expected],
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor],
) -> tuple[Sample, dict[AnyType, dict[str, Tensor]], int]:
    """Structure, rows and the bytes of both; ValueError where they are not an answer to `wanted`.

    `expected(sample)` are the arrays that must come, `empty` is memory for their rows.
    """
    arriving = iter(chunks)
    sample, num_bytes = _structure(arriving)
    for node_type, seeds in wanted.seeds.items():
        ids = sample.node.get(node_type)
        if ids is None or not torch.equal(ids[: seeds.numel()].long(), seeds.long()):
            raise ValueError(f"a sampler sent a batch of other seeds of {node_type!r} than it was asked for")
    rows: dict[AnyType, dict[str, Tensor]] = {key: {} for key, _ in row_arrays(sample)}
    left = []
    for key, name, shape, dtype in expected(sample):
        rows[key][name] = out = empty(shape, dtype)
        left.append(out)
    number, first = 0, 0
    for message in arriving:
        while number < len(left) and first == left[number].shape[0]:
            number, first = number + 1, 0
        came = message.arrays[0] if len(message.arrays) == 1 else None
        if came is None or number == len(left) or message.options != {"rows": number, "first": first}:
            raise ValueError("a sampler sent rows that were not asked for, or in another order")
        out = left[number]
        count = came.shape[0] if came.dim() else 0
        if came.dtype != out.dtype or came.shape[1:] != out.shape[1:] or not 0 < count <= out.shape[0] - first:
            raise ValueError(
                f"a sampler sent rows of {list(came.shape)} {came.dtype}, not of {list(out.shape)} {out.dtype}"
            )
        out[first : first + count] = came
        first, num_bytes = first + count, num_bytes + came.nbytes
    while number < len(left) and first == left[number].shape[0]:
        number, first = number + 1, 0
    if number < len(left):
        raise ValueError(f"a sampler sent the rows of {number} of {len(left)} arrays")
    return sample, rows, num_bytes


def _structure(arriving: Iterator[Message]) -> tuple[Sample, int]:
    arrays: list[Tensor] = []
    total = 1
    while len(arrays) < total:
        message = next(arriving, None)
        if message is None or not message.arrays or not is_whole(message.options.get("structure"), 2, MOST_STRUCTURE):
            raise ValueError("a sampler sent no structure of a batch")
        total = message.options["structure"]
        arrays += message.arrays
    return sample_from_arrays(arrays), sum(array.nbytes for array in arrays)
