"""What ops say they take beside their outputs, against what a malloc that counts has seen them take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnnsys.ops import told_workspaces, workspace_bytes
from gnnsys.ops._workspace import SMALL_BYTES
from tests.native.build_native import build_counting_malloc, compiler
from tests.ops.measured_calls import calls

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300
# Graphs are partitioned and read by jobs of their own: they plan with gnnsys.partition.memory, or take a limit.
OF_PARTITIONING = {
    "partition_cluster", "partition_contract", "partition_refine", "mark_halo", "collect_halo", "local_columns",
    "mark_ids", "fingerprint_edges", "fingerprint_rows", "fingerprint_edge_rows", "stream_cluster", "stream_contract",
    "stream_refine", "stream_cut", "drop_pages", "communication_volume", "volume_changes", "refine_volume", "even_out",
    "parse_table",
}  # fmt: skip

OF_PLANNING = {"simulate_training", "longest_training_path"}  # jobs are planned where nothing else runs


@pytest.mark.skipif(sys.platform != "linux" or compiler() is None, reason="needs LD_PRELOAD and a C++ compiler")
@pytest.mark.skipif("GNNSYS_SANITIZER" in os.environ, reason="sanitizers have a malloc of their own")
def test_no_op_takes_more_than_it_says_and_none_says_twice_what_it_takes(tmp_path: Path):
    library = build_counting_malloc(tmp_path / "counting.so")
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.measured_calls", str(library)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if lines[0]["case"] == "none":
        pytest.skip(lines[0]["why"])
    assert [line["case"] for line in lines] == list(calls())
    for line in lines:
        assert line["measured"] <= line["stated"] + SMALL_BYTES, line
        assert line["stated"] <= 2 * line["measured"] + SMALL_BYTES, line


def test_every_op_of_the_cpu_that_tells_its_workspace_is_measured():
    of_cpu = {op for op, device_type in told_workspaces() if device_type == "cpu"}
    assert {case.split(":")[0] for case in calls()} == of_cpu


def test_every_op_tells_its_workspace_on_every_device_that_has_a_kernel_of_it():
    for folder in ("cpu", "cuda"):
        sources = [*(ROOT / "csrc" / folder).rglob("*.cpp"), *(ROOT / "csrc" / folder).rglob("*.cu")]
        kernels = {op for file in sources for op in re.findall(r'REGISTER_OP\(m, "(\w+)"', file.read_text())}
        assert len(kernels) > 20
        told = {op for op, device_type in told_workspaces() if device_type == folder}
        assert kernels - told <= OF_PARTITIONING | OF_PLANNING, folder
        assert told - kernels == set(), folder


def test_a_statement_needs_shapes_and_dtypes_alone():
    def shape_of(value: object) -> object:
        if isinstance(value, list):
            return [shape_of(each) for each in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    for case, call in calls().items():
        op, options = case.split(":")[0], {"device": "cpu", "num_threads": call.threads, **call.hints}
        assert workspace_bytes(op, *map(shape_of, call.arguments), **options) == workspace_bytes(
            op, *call.arguments, **options
        ), case


def test_an_op_without_a_statement_is_refused_and_so_is_a_call_without_a_device():
    with pytest.raises(ValueError, match="op 'parse_table' tells no workspace for 'cpu' devices; these do: bfs_order"):
        workspace_bytes("parse_table", torch.empty(1))
    with pytest.raises(ValueError, match="device must be given where no argument is on one"):
        workspace_bytes("degrees", torch.empty(1, device="meta"), 3)
