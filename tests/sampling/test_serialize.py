"""Samples as arrays and files: every option makes the round trip, and whatever was cut or altered is refused."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnsys.comm import Kind, Reply, Request
from gnnsys.graph import EDGE, NODE, Graph
from gnnsys.sampling import (
    NeighborSampler,
    Sample,
    SampleKey,
    load_sample,
    sample_from_arrays,
    sample_from_blocks,
    sample_from_bytes,
    sample_neighbors,
    sample_to_arrays,
    sample_to_bytes,
    save_sample,
    to_block,
)
from tests.comm.endpoints import joined
from tests.sampling.machines import homogeneous, typed

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with replacement": {"replace": True},
    "all neighbours": {"num_neighbors": [-1, -1]},
    "disjoint": {"disjoint": True},
    "weighted": {"weight": "w"},
    "in time": {"time": "t"},
    "in time, the last": {"time": "et", "temporal_strategy": "last"},
    "blocks": {"expand": "frontier"},
    "blocks of weighted draws": {"expand": "frontier", "weight": "w"},
}


def sample_of(graph: Graph, num_neighbors: Any = (4, 3), *, seeds: Any = None, **options: Any) -> Sample:
    sampler = NeighborSampler(graph, list(num_neighbors), **options)
    seeds = {graph.node_types[0]: torch.arange(0, graph.num_nodes(graph.node_types[0]), 5)} if seeds is None else seeds
    seed_time = None if options.get("time") != "et" else {t: torch.full_like(ids, 20) for t, ids in seeds.items()}
    return sampler.sample(seeds, key=SampleKey(1, 2, 3), seed_time=seed_time)


def made_by_hand() -> Sample:
    graph, seeds = homogeneous(), {NODE: torch.tensor([3, 9, 60])}
    block, nodes = to_block(sample_neighbors(graph, seeds, 3), seeds)
    return sample_from_blocks(graph, [block], nodes, seeds)


def every_sample() -> dict[str, Sample]:
    out = {name: sample_of(homogeneous(), **options) for name, options in OPTIONS.items()}
    seeds = {"paper": torch.tensor([0, 3, 5])}
    for name, options in {
        "typed": {},
        "typed blocks": {"expand": "frontier"},
        "typed trees": {"disjoint": True},
    }.items():
        out[name] = sample_of(typed(), seeds=seeds, **options)
    narrow = sample_of(homogeneous())
    narrow.node = {t: ids.int() for t, ids in narrow.node.items()}
    return out | {
        "int32 ids": narrow,
        "a user's blocks": made_by_hand(),
        "no seeds": sample_of(homogeneous(), seeds={NODE: torch.empty(0, dtype=torch.int64)}),
    }


SAMPLES = every_sample()


def assert_same(ours: Sample, theirs: Sample) -> None:
    for name in ("node", "row", "col", "edge", "tree"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None) and list(mine or ()) == list(other or ())
        assert all(same(mine[t], other[t]) for t in mine or ()), name
    for name in ("num_sampled_nodes", "num_sampled_edges"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert list(mine) == list(other) and {t: list(c) for t, c in mine.items()} == {
            t: list(c) for t, c in other.items()
        }
    assert ours.by_destination == theirs.by_destination and len(ours.blocks) == len(theirs.blocks)
    for a, b in zip(ours.blocks, theirs.blocks, strict=True):
        assert list(a.num_src.items()) == list(b.num_src.items()) and list(a.num_dst.items()) == list(b.num_dst.items())
        assert list(a.csc) == list(b.csc)
        for t in a.csc:
            assert same(a.csc[t].indptr, b.csc[t].indptr) and same(a.csc[t].indices, b.csc[t].indices)
            assert a.csc[t].num_src == b.csc[t].num_src and same(a.csc[t].edge_ids, b.csc[t].edge_ids)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_of_every_option_comes_back_from_arrays_and_from_a_file(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    assert name.startswith("no ") or sum(ids.numel() for ids in sample.node.values()) > 5
    assert_same(sample_from_arrays(sample_to_arrays(sample)), sample)
    save_sample(sample, tmp_path / "batch")
    assert_same(load_sample(tmp_path / "batch"), sample)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_a_sample_travels_as_the_arrays_of_a_message() -> None:
    def handler(request: Request) -> Reply:
        return Reply(sample_to_arrays(sample_from_arrays(request.arrays)))

    with joined({Kind.SAMPLE: handler}) as (_, client):
        for name in ("plain", "typed blocks", "in time"):
            reply = client.request(0, Kind.SAMPLE, sample_to_arrays(SAMPLES[name])).result()
            assert_same(sample_from_arrays(reply.arrays), SAMPLES[name])


def test_a_sample_knows_its_device() -> None:
    assert all(sample.device == torch.device("cpu") for sample in SAMPLES.values())
    assert Sample({NODE: torch.empty(2, device="meta")}, {}, {}, {}, {}, {}).device.type == "meta"


def read_or_refuse(arrays: list[Tensor]) -> Sample | None:
    try:
        return sample_from_arrays(arrays)
    except ValueError:
        return None


def altered(arrays: list[Tensor], chance: random.Random) -> list[Tensor]:
    arrays = [array.clone() for array in arrays]
    at = chance.randrange(len(arrays)) if chance.random() < 0.5 else 0
    numbers = (-1, 0, 1, 2, 3, 7, 1 << 20, (1 << 31) - 1, (1 << 62), -(1 << 63), chance.randrange(1 << 40))
    what = chance.randrange(8)
    if what <= 3 and arrays[at].numel():
        for _ in range(chance.randrange(1, 4)):
            place, bits = chance.randrange(arrays[at].numel()), 8 * arrays[at].element_size()
            value = chance.choice(numbers)
            if chance.random() < 0.5:
                value = int(arrays[at][place]) + chance.choice((-1, 1))
            low = 0 if arrays[at].dtype == torch.uint8 else -(1 << (bits - 1))
            arrays[at][place] = max(low, min((1 << (bits - 1)) - 1, value))
    elif what == 4:
        arrays[at] = arrays[at][: chance.randrange(1 + arrays[at].numel())]
    elif what == 5:
        del arrays[at]
    elif what == 6:
        arrays[at] = chance.choice([arrays[at].float(), arrays[at].view(1, -1), arrays[at].int(), arrays[at].bool()])
    else:
        arrays.insert(at, arrays[chance.randrange(len(arrays))])
    return arrays


@pytest.mark.parametrize("name", ["plain", "typed", "typed blocks", "disjoint", "blocks", "a user's blocks"])
def test_altered_arrays_are_refused_or_are_another_sample_that_fits_together(name: str) -> None:
    chance = random.Random(name)
    arrays = sample_to_arrays(SAMPLES[name])
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(200):
            found = read_or_refuse(altered(arrays, chance))
            refused += found is None
            if found is not None:  # another batch perhaps, but one
                assert_same(sample_from_arrays(sample_to_arrays(found)), found)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert refused > 100, "most changes do not fit"


def test_a_file_that_was_cut_or_altered_is_refused_by_its_name(tmp_path: Path) -> None:
    chance, whole = random.Random(3), sample_to_bytes(SAMPLES["typed blocks"])
    for _ in range(300):
        data = bytearray(whole)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with pytest.raises(ValueError, match="sample"):
            sample_from_bytes(data)
    (tmp_path / "batch").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"batch': .*checksum"):
        load_sample(tmp_path / "batch")


def test_a_file_with_a_right_checksum_and_wrong_sizes_allocates_nothing_for_them() -> None:
    chance, whole = random.Random(4), sample_to_bytes(SAMPLES["plain"])
    (num_arrays,) = struct.unpack_from("<I", whole, 8)
    tracemalloc.start()
    try:
        for _ in range(300):
            data = bytearray(whole)
            at = 16 + 16 * chance.randrange(num_arrays) + 8 * chance.randrange(2)
            struct.pack_into("<q", data, at, chance.choice((-1, 0, 1, 99, 1 << 40, (1 << 63) - 1, -(1 << 63))))
            if chance.random() < 0.2:
                struct.pack_into("<I", data, 8, chance.choice((0, 1, 1 << 16, (1 << 32) - 1)))
            struct.pack_into("<I", data, 12, zlib.crc32(data[16:]))
            if bytes(data) != whole:
                with pytest.raises(ValueError, match="sample"):
                    sample_from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.col[EDGE].copy_(s.col[EDGE].flip(0)), "ascending col"),
        (lambda s: s.row[EDGE].__setitem__(0, s.node[NODE].numel()), "row of"),
        (lambda s: s.node[NODE].__setitem__(0, -1), "node ids"),
        (lambda s: s.num_sampled_nodes[NODE].__setitem__(0, 1), "num_sampled_nodes"),
        (lambda s: s.num_sampled_edges[EDGE].__setitem__(0, 1), "num_sampled_edges"),
        (lambda s: s.edge.__setitem__(EDGE, s.edge[EDGE][:-1]), "edge"),
    ],
)
def test_parts_of_a_sample_that_contradict_each_other_are_refused(change: Any, match: str) -> None:
    sample = sample_of(homogeneous())
    change(sample)
    with pytest.raises(ValueError, match=match):
        sample_from_arrays(sample_to_arrays(sample))
