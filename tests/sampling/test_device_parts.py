"""Sampling by a device on parts, with the host as the device: the same joining and stitching, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gnnsys.partition import relabel
from gnnsys.sampling import DistGraph, NeighborSampler
from gnnsys.sampling.device_structure import DeviceStructure, structure_bytes
from tests.sampling.device_parts import (
    LAYOUTS,
    check_deep_halos,
    check_every_kind,
    check_exclusions,
    check_labor,
    check_subgraphs,
    check_typed_kinds,
    check_walks,
)
from tests.sampling.machines import assert_same_sample, homogeneous, machines, to_global
from tests.sampling.test_dist import KEY, SEEDS

HOST = torch.device("cpu")


def place(graph: DistGraph) -> None:
    graph.use_device(HOST, DeviceStructure(graph.parts, graph.parts_here, HOST), {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_samples_what_one_process_samples_wherever_parts_lie(tmp_path: Path, layout: str) -> None:
    check_every_kind(tmp_path / "p", layout, place)


@pytest.mark.parametrize(("num_parts", "owner"), [(1, [0]), (3, [0, 0, 0]), (3, [0, 1, 0])])
def test_a_device_samples_typed_parts_as_one_process_does(tmp_path: Path, num_parts: int, owner: list[int]) -> None:
    check_typed_kinds(tmp_path / "p", num_parts, owner, place)


# Where parts lie is one code for all samplers: all layouts above, and for each other sampler some that differ most.
FEW = ("not neighbours", "a machine without parts", "empty parts on one machine")
SOME_LAYOUTS = [pytest.param(layout, marks=[] if layout in FEW else [pytest.mark.long]) for layout in LAYOUTS]


@pytest.mark.parametrize("layout", ["a machine each", "all on one machine", "not neighbours"])
def test_a_device_excludes_the_same_edges(tmp_path: Path, layout: str) -> None:
    check_exclusions(tmp_path / "p", layout, place)


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_a_device_draws_by_labor_what_one_process_draws(tmp_path: Path, layout: str) -> None:
    check_labor(tmp_path / "p", layout, place)


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_a_device_walks_as_one_process_does(tmp_path: Path, layout: str) -> None:
    check_walks(tmp_path / "p", layout, place)


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_a_device_makes_the_subgraphs_of_one_process(tmp_path: Path, layout: str) -> None:
    check_subgraphs(tmp_path / "p", layout, place)


def test_a_deeper_halo_changes_no_sample_of_a_device(tmp_path: Path) -> None:
    check_deep_halos(tmp_path, place)


def test_ids_beyond_32_bits_are_joined_as_64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relabel, "INT32_END", 50)  # as if no more than 50 numbers fitted
    graph = homogeneous()
    with machines(graph, tmp_path / "p", 3, machine_of_part=[0, 0, 1]) as graphs:
        for mine in graphs:
            place(mine)
            for options in ({}, {"weight": "w"}, {"time": "t"}):
                expected = NeighborSampler(graph, [4, 3], **options).sample(SEEDS, key=KEY)
                ours = NeighborSampler(mine, [4, 3], **options)
                assert_same_sample(ours.sample(to_global(mine, SEEDS), key=KEY), expected, mine)


def test_a_copy_of_the_structure_takes_the_bytes_that_were_foretold(tmp_path: Path) -> None:
    with machines(homogeneous(), tmp_path / "p", 4, machine_of_part=[0, 0, 0, 1]) as graphs:
        for mine in graphs:
            place(mine)
            mine.neighborhoods()
            assert mine.structure is not None
            foretold = structure_bytes(mine.parts, mine.parts_here)
            assert abs(mine.structure._device_bytes() - foretold) <= 8 * len(mine.parts_here)
