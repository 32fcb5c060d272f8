"""A Sample as plain arrays and back: the one form in which the structure of a batch is sent and stored.

`sample_to_arrays` gives an int64 array of numbers (`head`), the names of types as UTF-8, and the tensors in the order
in which the head counts them: what a message of `gnnsys.comm` carries. A file (`save_sample`) is the same arrays behind
a table of their dtypes and sizes and a checksum. No pickle. Whatever does not add up is a ValueError, found before
anything of the size it claims is allocated; a sample that was read has no id that points outside it.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnsys.comm import DTYPE_OF, export_array
from gnnsys.graph import EdgeType, NodeType
from gnnsys.ops import CSC
from gnnsys.sampling.sample import Block, Sample

_FORMAT = 2
_BY_DESTINATION, _TREE, _EDGE_WEIGHT, _NODE_WEIGHT = 1, 2, 4, 8
_MAX_NUMBERS = 1 << 18  # in the head: types, hops and blocks, never nodes or edges
_MAX_ARRAYS = 1 << 16
_MAX_NAMES = 1 << 20  # bytes
_IDS = (torch.int64, torch.int32)
_WEIGHTS = (torch.float32,)

_FILE = struct.Struct("<8sII")  # magic, number of arrays, checksum of what follows
_ENTRY = struct.Struct("<qq")  # of each array: dtype, number of entries
_MAGIC = b"GNNSMPL\x01"


def sample_to_arrays(sample: Sample) -> list[Tensor]:
    """The arrays of a sample, on the host; ValueError for what no sampler of ours gives."""
    writer = _Writer()
    optional = ((_TREE, sample.tree), (_EDGE_WEIGHT, sample.edge_weight), (_NODE_WEIGHT, sample.node_weight))
    flags = _BY_DESTINATION * sample.by_destination + sum(flag for flag, rows in optional if rows is not None)
    writer.numbers += [_FORMAT, flags]
    if list(sample.row) != list(sample.col):
        raise ValueError(f"row and col must have the same edge types, got {list(sample.row)} and {list(sample.col)}")
    writer.put_tensors(sample.node, writer.node_type)
    writer.put_tensors(sample.row, writer.edge_type)
    writer.arrays += sample.col.values()
    writer.put_tensors(sample.edge, writer.edge_type)
    writer.put_counts(sample.num_sampled_nodes, writer.node_type)
    writer.put_counts(sample.num_sampled_edges, writer.edge_type)
    if sample.tree is not None:
        writer.put_tensors(sample.tree, writer.node_type)
    if sample.edge_weight is not None:
        writer.put_tensors(sample.edge_weight, writer.edge_type)
    if sample.node_weight is not None:
        writer.put_tensors(sample.node_weight, writer.node_type)
    writer.numbers.append(len(sample.blocks))
    for block in sample.blocks:
        writer.put_block(block)
    return writer.finish()


def sample_from_arrays(arrays: Sequence[Tensor]) -> Sample:
    """The sample that `sample_to_arrays` wrote; the arrays are used as they are, not copied."""
    reader = _Reader(arrays)
    version, flags = reader.take(2)
    if version != _FORMAT:
        raise ValueError(f"a sample must have format {_FORMAT}, got {version}")
    if flags & ~(_BY_DESTINATION | _TREE | _EDGE_WEIGHT | _NODE_WEIGHT):
        raise ValueError(f"a sample has flags {flags}, which are not known here")
    node = reader.tensors(reader.node_type, "node")
    row = reader.tensors(reader.edge_type, "row")
    col = {t: reader.tensor(f"col of {t}") for t in row}
    edge = reader.tensors(reader.edge_type, "edge")
    num_nodes = reader.counts(reader.node_type)
    num_edges = reader.counts(reader.edge_type)
    tree = reader.tensors(reader.node_type, "tree") if flags & _TREE else None
    edge_weight = reader.tensors(reader.edge_type, "edge_weight", _WEIGHTS) if flags & _EDGE_WEIGHT else None
    node_weight = reader.tensors(reader.node_type, "node_weight", _WEIGHTS) if flags & _NODE_WEIGHT else None
    blocks = [reader.block() for _ in range(reader.count())]
    reader.finish()
    by_destination = bool(flags & _BY_DESTINATION)
    sample = Sample(node, row, col, edge, num_nodes, num_edges, tree, blocks, by_destination, edge_weight, node_weight)
    check_sample(sample)
    return sample


def sample_to_bytes(sample: Sample) -> bytes:
    """The sample as a file has it."""
    table, body = b"", bytearray()
    arrays = sample_to_arrays(sample)
    for array in arrays:
        code, data = export_array(array)
        table += _ENTRY.pack(code, array.numel())
        body += data if isinstance(data, bytes) else data.tobytes()
        body += bytes(-len(body) % 8)
    return _FILE.pack(_MAGIC, len(arrays), zlib.crc32(body, zlib.crc32(table))) + table + body


def sample_from_bytes(data: bytes | bytearray | memoryview) -> Sample:
    """The sample that `sample_to_bytes` wrote; ValueError for anything else."""
    data = memoryview(data).cast("B")
    if len(data) < _FILE.size:
        raise ValueError(f"a stored sample has at least {_FILE.size} bytes, got {len(data)}: it was cut")
    magic, num_arrays, checksum = _FILE.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("this is no stored sample, or one of another version of gnnsys")
    at = _FILE.size + num_arrays * _ENTRY.size
    if num_arrays > _MAX_ARRAYS or at > len(data):
        raise ValueError(f"a stored sample says that it has {num_arrays} arrays: it was cut or altered")
    if zlib.crc32(data[_FILE.size :]) != checksum:
        raise ValueError("a stored sample does not have its checksum: it was cut or altered")
    arrays = []
    for code, count in _ENTRY.iter_unpack(data[_FILE.size : at]):
        dtype, itemsize = DTYPE_OF.get(code, (None, 0))
        if dtype is None or not 0 <= count * itemsize <= len(data) - at:
            raise ValueError(f"a stored sample has no room for {count} entries of dtype {code}")
        size = count * itemsize
        rows = bytearray(data[at : at + size])  # aligned, and the caller's memory may go
        arrays.append(torch.frombuffer(rows, dtype=dtype) if size else torch.empty(0, dtype=dtype, device="cpu"))
        at += size + -size % 8
    if at != len(data):
        raise ValueError(f"a stored sample of {len(data)} bytes describes {at}")
    return sample_from_arrays(arrays)


def save_sample(sample: Sample, path: str | os.PathLike[str]) -> None:
    """Writes a sample to a file, which is there whole or not at all."""
    path = Path(path)
    staging = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        staging.write_bytes(sample_to_bytes(sample))
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def load_sample(path: str | os.PathLike[str]) -> Sample:
    """The sample in a file; ValueError names the file where it is none."""
    try:
        return sample_from_bytes(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r}: {error}") from error


class _Writer:
    """Numbers, names and arrays of a sample in the making."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.arrays: list[Tensor] = []
        self._names: dict[str, int] = {}
        self._node_types: dict[NodeType, int] = {}
        self._edge_types: dict[EdgeType, int] = {}

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def node_type(self, node_type: NodeType) -> int:
        self._name(node_type)
        return self._node_types.setdefault(node_type, len(self._node_types))

    def edge_type(self, edge_type: EdgeType) -> int:
        src, relation, dst = edge_type
        self.node_type(src)
        self._name(relation)
        self.node_type(dst)
        return self._edge_types.setdefault(edge_type, len(self._edge_types))

    def put_tensors(self, tensors: Mapping[Any, Tensor], number: Any) -> None:
        self.numbers += [len(tensors), *(number(key) for key in tensors)]
        self.arrays += tensors.values()

    def put_counts(self, counts: Mapping[Any, Sequence[int]], number: Any) -> None:
        self.numbers.append(len(counts))
        for key, values in counts.items():
            self.numbers += [number(key), len(values), *(int(value) for value in values)]

    def put_block(self, block: Block) -> None:
        for sizes in (block.num_src, block.num_dst):
            self.numbers += [len(sizes), *(n for t, size in sizes.items() for n in (self.node_type(t), int(size)))]
        self.numbers.append(len(block.csc))
        for edge_type, csc in block.csc.items():
            if csc.whole is not None or csc.edge_data is not None:
                raise ValueError("a block of a piece of a graph, or with rows of edges, cannot be stored")
            edge_ids = csc.edge_ids
            weight = None if block.edge_weight is None else block.edge_weight.get(edge_type)
            has = [int(rows is not None) for rows in (edge_ids, weight)]
            self.numbers += [self.edge_type(edge_type), int(csc.num_src), *has]
            self.arrays += [csc.indptr, csc.indices, *(rows for rows in (edge_ids, weight) if rows is not None)]

    def finish(self) -> list[Tensor]:
        names = [name.encode() for name in self._names]
        types = [len(names), *(len(name) for name in names)]
        types += [len(self._node_types), *(self._names[t] for t in self._node_types)]
        types.append(len(self._edge_types))
        for src, relation, dst in self._edge_types:
            types += [self._node_types[src], self._names[relation], self._node_types[dst]]
        head = torch.tensor([*types, *self.numbers], dtype=torch.int64, device="cpu")
        text = torch.frombuffer(bytearray(b"".join(names) or b"\0"), dtype=torch.uint8)[: sum(map(len, names))]
        if head.numel() > _MAX_NUMBERS or text.numel() > _MAX_NAMES or len(self.arrays) + 2 > _MAX_ARRAYS:
            raise ValueError("a sample has too many types or hops to be stored")
        return [head, text, *(array.detach().cpu().contiguous() for array in self.arrays)]


class _Reader:
    """Takes a sample apart again: every number in its range, every array a vector of ids."""

    def __init__(self, arrays: Sequence[Tensor]) -> None:
        if not 2 <= len(arrays) <= _MAX_ARRAYS:
            raise ValueError(f"a sample has from 2 to {_MAX_ARRAYS} arrays, got {len(arrays)}")
        head, text = arrays[:2]
        if head.dim() != 1 or head.dtype != torch.int64 or head.numel() > _MAX_NUMBERS:
            raise ValueError(f"a sample's head must be at most {_MAX_NUMBERS} int64 numbers, got {_kind(head)}")
        if text.dim() != 1 or text.dtype != torch.uint8 or text.numel() > _MAX_NAMES:
            raise ValueError(f"a sample's names must be at most {_MAX_NAMES} bytes, got {_kind(text)}")
        self._numbers, self._at = head.tolist(), 0
        self._arrays, self._next = arrays, 2
        names = self._read_names(bytes(text.tolist()))
        self._node_types = [names[self._below(len(names))] for _ in range(self.count())]
        if len(set(self._node_types)) != len(self._node_types):
            raise ValueError("a sample names a node type twice")
        self._edge_types = [self._read_edge_type(names) for _ in range(self.count())]
        if len(set(self._edge_types)) != len(self._edge_types):
            raise ValueError("a sample names an edge type twice")

    def _read_names(self, text: bytes) -> list[str]:
        lengths = self.take(self.count())
        if any(length < 0 for length in lengths) or sum(lengths) != len(text):
            raise ValueError("a sample's names are not as long as it says")
        ends = [0, *accumulate(lengths)]
        try:
            return [text[a:b].decode() for a, b in pairwise(ends)]
        except UnicodeDecodeError as error:
            raise ValueError(f"a sample's names are not UTF-8: {error}") from None

    def _read_edge_type(self, names: list[str]) -> EdgeType:
        src = self.node_type()
        relation = names[self._below(len(names))]
        return src, relation, self.node_type()

    def take(self, count: int) -> list[int]:
        if count > len(self._numbers) - self._at:
            raise ValueError("a sample's head ends before it says everything")
        self._at += count
        return self._numbers[self._at - count : self._at]

    def count(self) -> int:
        """How many entries follow: each takes a number or an array at least."""
        (count,) = self.take(1)
        if not 0 <= count <= len(self._numbers) - self._at + len(self._arrays) - self._next:
            raise ValueError(f"a sample says that {count} entries follow")
        return count

    def _below(self, end: int) -> int:
        (number,) = self.take(1)
        if not 0 <= number < end:
            raise ValueError(f"a sample names number {number} of {end}")
        return number

    def _size(self) -> int:
        (size,) = self.take(1)
        if size < 0:
            raise ValueError(f"a sample says a size of {size}")
        return size

    def node_type(self) -> NodeType:
        return self._node_types[self._below(len(self._node_types))]

    def edge_type(self) -> EdgeType:
        return self._edge_types[self._below(len(self._edge_types))]

    def tensor(self, what: str, dtypes: Sequence[torch.dtype] = _IDS) -> Tensor:
        if self._next >= len(self._arrays):
            raise ValueError(f"a sample lacks the array of {what}")
        array = self._arrays[self._next]
        self._next += 1
        if array.dim() != 1 or array.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{what} of a sample must be {names} in one dimension, got {_kind(array)}")
        return array

    def tensors(self, read_key: Any, what: str, dtypes: Sequence[torch.dtype] = _IDS) -> dict[Any, Tensor]:
        keys = [read_key() for _ in range(self.count())]
        return {key: self.tensor(f"{what} of {key}", dtypes) for key in _unique(keys)}

    def counts(self, read_key: Any) -> dict[Any, list[int]]:
        found = [(read_key(), [self._size() for _ in range(self.count())]) for _ in range(self.count())]
        _unique([key for key, _ in found])
        return dict(found)

    def block(self) -> Block:
        num_src, num_dst = ({self.node_type(): self._size() for _ in range(self.count())} for _ in range(2))
        csc: dict[EdgeType, CSC] = {}
        weights: dict[EdgeType, Tensor] = {}
        for _ in range(self.count()):
            edge_type, size, has_ids, has_weight = self.edge_type(), self._size(), self._below(2), self._below(2)
            indptr, indices = self.tensor(f"indptr of {edge_type}"), self.tensor(f"indices of {edge_type}")
            csc[edge_type] = CSC(indptr, indices, size, self.tensor(f"edge_ids of {edge_type}") if has_ids else None)
            if has_weight:
                weights[edge_type] = self.tensor(f"edge_weight of {edge_type}", _WEIGHTS)
        return Block(csc, num_src, num_dst, weights or None)

    def finish(self) -> None:
        if self._at != len(self._numbers) or self._next != len(self._arrays):
            raise ValueError("a sample has more numbers or arrays than it describes")


def _unique(keys: list[Any]) -> list[Any]:
    if len(set(keys)) != len(keys):
        raise ValueError("a sample has something twice for one type")
    return keys


def check_sample(sample: Sample) -> None:
    """ValueError unless the parts of a sample fit each other: lengths, counts per hop, ids within the sample."""
    num_nodes = {t: ids.numel() for t, ids in sample.node.items()}
    for node_type, ids in sample.node.items():
        _check_range(ids, None, f"node ids of {node_type!r}")
    for edge_type, row in sample.row.items():
        if edge_type[0] not in num_nodes or edge_type[2] not in num_nodes:
            raise ValueError(f"a sample has edges of {edge_type}, and no nodes of their types")
        _check_equal(sample.col[edge_type].numel(), row.numel(), f"col of {edge_type}")
        _check_range(row, num_nodes[edge_type[0]], f"row of {edge_type}")
        _check_range(sample.col[edge_type], num_nodes[edge_type[2]], f"col of {edge_type}")
    for edge_type, ids in sample.edge.items():
        _check_equal(ids.numel(), sample.row[edge_type].numel() if edge_type in sample.row else 0, f"edge {edge_type}")
        _check_range(ids, None, f"edge ids of {edge_type}")
    if sample.tree is not None:
        for node_type, tree in sample.tree.items():
            _check_equal(tree.numel(), num_nodes.get(node_type, 0), f"tree of {node_type!r}")
            _check_range(tree, None, f"tree of {node_type!r}")
    for edge_type, weight in (sample.edge_weight or {}).items():
        _check_equal(weight.numel(), sample.row[edge_type].numel() if edge_type in sample.row else 0, "edge_weight")
    for node_type, weight in (sample.node_weight or {}).items():
        _check_equal(weight.numel(), num_nodes.get(node_type, 0), "node_weight")
    for node_type, counts in sample.num_sampled_nodes.items():
        _check_equal(sum(counts), num_nodes.get(node_type, 0), f"num_sampled_nodes of {node_type!r}")
    _check_edge_counts(sample)
    for block in sample.blocks:
        _check_block(block, num_nodes)
    if sample.by_destination:
        for edge_type in sample.row:
            _check_by_destination(sample, edge_type)


def _check_edge_counts(sample: Sample) -> None:
    for edge_type, counts in sample.num_sampled_edges.items():
        if edge_type in sample.row:
            _check_equal(sum(counts), sample.row[edge_type].numel(), f"num_sampled_edges of {edge_type}")
        elif sample.blocks:
            found = [block.csc.get(edge_type) for block in reversed(sample.blocks)]
            sizes = [0 if csc is None else csc.indices.numel() for csc in found]
            if list(counts) != sizes:
                raise ValueError(f"num_sampled_edges of {edge_type} must be {sizes}, as in the blocks, got {counts}")
        else:
            _check_equal(sum(counts), 0, f"num_sampled_edges of {edge_type}")


def _check_block(block: Block, num_nodes: Mapping[NodeType, int]) -> None:
    for node_type, size in block.num_src.items():
        if size > num_nodes.get(node_type, 0) or block.num_dst.get(node_type, 0) > size:
            raise ValueError(f"a block has {size} sources of {node_type!r}: too many, or too few for its destinations")
    for (src, relation, dst), csc in block.csc.items():
        what = f"a block's edges {(src, relation, dst)}"
        _check_equal(csc.num_src, block.num_src.get(src, 0), f"{what}: num_src")
        _check_equal(csc.indptr.numel(), block.num_dst.get(dst, 0) + 1, f"{what}: indptr")
        if csc.indptr.dtype != torch.int64 or int(csc.indptr[0]) != 0 or int(csc.indptr[-1]) != csc.indices.numel():
            raise ValueError(f"{what}: indptr must be int64 from 0 to {csc.indices.numel()}")
        if bool((csc.indptr.diff() < 0).any()):
            raise ValueError(f"{what}: indptr must not decrease")
        _check_range(csc.indices, csc.num_src, f"{what}: indices")
        weight = (block.edge_weight or {}).get((src, relation, dst))
        if weight is not None:
            _check_equal(weight.numel(), csc.indices.numel(), f"{what}: edge_weight")
        if csc.edge_ids is not None:
            _check_equal(csc.edge_ids.numel(), csc.indices.numel(), f"{what}: edge_ids")
            _check_range(csc.edge_ids, None, f"{what}: edge_ids")


def _check_by_destination(sample: Sample, edge_type: EdgeType) -> None:
    """What `Sample.by_destination` promises: layers rely on it without looking."""
    col = sample.col[edge_type]
    nodes, edges = sample.num_sampled_nodes.get(edge_type[2]), sample.num_sampled_edges.get(edge_type)
    if nodes is None or edges is None or len(nodes) != len(edges) + 1:
        raise ValueError(f"a sample by destination must say its nodes and edges per hop, {edge_type} does not")
    if bool((col.diff() < 0).any()):
        raise ValueError(f"a sample by destination must have ascending col, {edge_type} has not")
    for num_dst, end in sample.ends(edge_type).items():
        if int(torch.searchsorted(col, num_dst)) != end:
            raise ValueError(f"a sample by destination must end hops where destinations end, {edge_type} does not")


def _check_equal(got: int, expected: int, what: str) -> None:
    if got != expected:
        raise ValueError(f"{what} of a sample must count {expected}, got {got}")


def _check_range(ids: Tensor, end: int | None, what: str) -> None:
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (end is not None and high >= end):
        raise ValueError(f"{what} of a sample must be in [0, {'...' if end is None else end}), got {low} to {high}")


def _kind(array: Tensor) -> str:
    return f"{list(array.shape)} {array.dtype}"
