"""What was measured of a device: kept, found again, and counted in an estimate."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gnnsys.bench.jobs.table_four import GRAPHS, whole_graph_job
from gnnsys.planning import estimate_memory, load_device_profile, save_device_profile, training_device
from gnnsys.planning.memory.device_events import DeviceEvent, DeviceRun, difference_table, differences
from gnnsys.planning.memory.device_profile import DeviceProfile, ScratchCurve, device_kind_of
from gnnsys.planning.memory.reduction_scratch import ReducedRows, bytes_inside_reduction, partial_results
from gnnsys.planning.memory.scratch_probes import scratch_probes
from gnnsys.planning.memory.training_device import TrainingDevice
from tests.planning.memory import jobs

MIB = 1 << 20
PROFILE = DeviceProfile(
    "t1000", "NVIDIA T1000", "2.11.0+cu130", capacity=4 << 30, context=300 * MIB, product_workspace=8 * MIB,
    backward_workspace=16 * MIB,
    curves=(
        ScratchCurve("aten::sort", 0, "int64", ((1000, 10_000), (2000, 30_000))),
        ScratchCurve("aten::sort", 0, "float32", ((1000, 5_000), (2000, 15_000))),
    ),
)  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def traced(profile: DeviceProfile | None = None, job=jobs.gnn, **arguments):
    return estimate_memory(job, arguments, TrainingDevice("t1000", "cuda", profile=profile))


@pytest.mark.parametrize(("size", "num_bytes"), [(10, 10_000), (1000, 10_000), (1500, 20_000), (4000, 70_000)])
def test_scratch_is_a_line_between_sizes_and_goes_on_after_the_last(size, num_bytes):
    keys = torch.empty(size, dtype=torch.int64, device="meta")
    assert PROFILE.scratch("aten::sort", [keys]) == num_bytes
    assert PROFILE.scratch("aten::sort", [keys.to(torch.float32)]) == num_bytes // 2
    assert PROFILE.scratch("aten::sort", [keys.to(torch.int16)]) == num_bytes, "of an unknown dtype the most"
    assert PROFILE.scratch("aten::relu", [keys]) == 0


def test_places_are_sorted_only_where_values_are_added():
    curve = ScratchCurve("aten::index_put_", 1, "int64", ((1000, 10_000),))
    profile = DeviceProfile("t1000", "NVIDIA T1000", "2.11.0", curves=(curve,))
    rows, places = torch.zeros(10, 2), [torch.zeros(1000, dtype=torch.int64)]
    told = [profile.scratch("aten::index_put_", [rows, places, rows, *more]) for more in ([], [False], [True])]
    assert told == [0, 0, 10_000]


def test_segments_that_torch_gives_back_are_given_back_in_a_replay():
    """Four segments of which two lie where others lay before."""

    def event(size: int, at: int, frees: bool = False, is_segment: bool = False) -> DeviceEvent:
        return DeviceEvent(size * MIB, at * MIB, 0, frees, "", is_segment)

    events = [event(12, 0), event(12, 12), event(12, 0, True), event(12, 12, True)]
    events += [event(12, 0, True, True), event(12, 12, True, True)]
    events += [event(24, 0), event(24, 0, True), event(12, 0), event(12, 12), event(12, 24), event(12, 12, True)]
    memory = DeviceRun(0, 0, tuple(events)).replayed()
    assert (memory.peak_reserved, memory.reserved, memory.allocated) == (36 * MIB, 36 * MIB, 24 * MIB)


def test_a_profile_that_was_saved_is_a_device_from_then_on(cache):
    with pytest.raises(ValueError, match=r"device must be one of cpu, h200, got 't1000'.*--calibrate"):
        training_device("t1000")
    save_device_profile(PROFILE)
    assert load_device_profile("t1000") == PROFILE
    assert training_device("t1000") == TrainingDevice("t1000", "cuda", 4 << 30, PROFILE)


def test_the_profile_of_the_nearest_torch_is_taken_and_one_of_the_same_replaced(cache):
    for version, context in (("2.11.0+cu130", 1), ("2.13.0", 2), ("2.11.0+cu130", 3)):
        save_device_profile(DeviceProfile("t1000", "NVIDIA T1000", version, context=context))
    assert load_device_profile("t1000", "2.11.1").context == 3
    assert load_device_profile("t1000", "2.14.0+cpu").context == 2
    assert len(json.loads((cache / "gnnsys" / "memory" / "t1000.json").read_text())["profiles"]) == 2


def test_a_file_that_is_no_profile_is_named(cache):
    path = save_device_profile(PROFILE)
    path.write_text('{"version": 9}')
    with pytest.raises(ValueError, match=r"t1000.json is no profile of a device: .*version 9"):
        training_device("t1000")


def test_names_of_devices_become_kinds():
    assert [device_kind_of(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB")] == [
        "h200", "a100-sxm4-80gb", "tesla-v100-sxm2-32gb",
    ]  # fmt: skip


def test_the_package_has_a_profile_of_the_h200(cache):
    assert training_device("h200").profile.product_workspace > 0


def test_cublas_takes_a_workspace_for_the_forward_and_one_for_the_backward_pass():
    plain, with_cublas = traced(kind="GraphSAGE"), traced(PROFILE, kind="GraphSAGE")
    assert with_cublas.peak_bytes - plain.peak_bytes == 24 * MIB
    assert with_cublas.context_bytes == 300 * MIB


def test_scratch_inside_an_operator_is_there_while_it_runs():
    def sorting():
        job = jobs.mlp("sgd")
        loss = job.loss
        return type(job)(
            model=job.model, optimizer=job.optimizer, rows=job.rows,
            loss=lambda model, graph: loss(model, graph) + 0 * torch.sort(torch.arange(100_000)).values[0],
        )  # fmt: skip

    curves = (ScratchCurve("aten::sort", 0, "int64", ((100_000, 50 * MIB),)),)
    profile = DeviceProfile("t1000", "NVIDIA T1000", "2.11.0", curves=curves)
    with_scratch, without = traced(profile, sorting), traced(None, sorting)
    assert with_scratch.op == "aten::sort" and with_scratch.by_kind()["workspace"] == 50 * MIB
    assert with_scratch.peak_bytes > without.peak_bytes + 40 * MIB


def test_what_the_trace_missed_is_named_with_the_operator_before_it():
    from gnnsys.planning.memory.estimate import trace_job

    trace = trace_job(jobs.gnn, {"kind": "GCN"}, TrainingDevice("t1000", "cuda"), 2).trace
    records = [*trace.given, *(record for record, change in trace.changes if change > 0)]
    on_device = [record for record in records if not record.on_host]
    events = [DeviceEvent(record.num_bytes, at, 0, False, "") for at, record in enumerate(on_device)]
    assert differences(trace, DeviceRun(0, 0, tuple(events))) == []
    place = next(at for at, record in enumerate(on_device) if record.op == "gnnsys::transpose")
    events.insert(place + 1, DeviceEvent(7 * MIB, -1, 0, False, "sort_rows (x.py:3)"))
    (found,) = differences(trace, DeviceRun(0, 0, tuple(events)))
    assert (found.num_bytes, found.is_real, found.count) == (7 * MIB, True, 1)
    assert "gnnsys::transpose" in found.place
    assert "1 x 7,340,032 bytes only in the run, after" in difference_table([found])


def test_a_runs_own_events_go_through_the_model_of_the_allocator():
    events = (
        DeviceEvent(100, 1, 0, False, ""),
        DeviceEvent(30 * MIB, 2, 0, False, ""),
        DeviceEvent(30 * MIB, 2, 0, True, ""),
        DeviceEvent(30 * MIB, 2, 0, False, ""),
    )
    memory = DeviceRun(0, 0, events).replayed()
    assert (memory.peak_allocated, memory.peak_reserved) == (30 * MIB + 512, 32 * MIB)


def test_tensors_enter_the_allocator_in_the_order_in_which_the_job_made_them():
    from gnnsys.planning.memory.estimate import trace_job

    trace = trace_job(jobs.gnn, {"kind": "GCN"}, TrainingDevice("cpu", "cpu"), 2).trace
    first = [record.num_bytes for record in trace.given[:3]]
    assert first == [300 * 33 * 4, 2 * 2400 * 8, 300 * 8], "rows, edges, labels, and then weights"


@pytest.mark.parametrize("probe", scratch_probes("cpu"), ids=lambda probe: f"{probe.op} of {probe.dtype}")
def test_every_probe_calls_the_operator_it_names_with_an_argument_of_its_size(probe):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((f"{func.namespace}::{func._opname}", args))
            return func(*args, **(kwargs or {}))

    call = probe.make(640)
    with Watch():
        call()
    ((name, args),) = seen
    given = args[probe.argument]
    tensor = given[0] if isinstance(given, list) else given
    assert (name, tensor.numel(), tensor.dtype) == (probe.op, 640, probe.dtype)


@pytest.mark.parametrize(
    ("shape", "dims", "num_bytes"),
    [
        ((19_717, 64), {0}, 2_539_520),
        ((88_784, 64), {0}, 11_370_496),
        ((1_890_931, 64), {0}, 34_603_008),
        ((88_784, 39), {0}, 1_317_888),
        ((88_784, 8, 39), {0}, 112_459_776),  # 8 x 39 outputs are one dimension
        ((19_717, 8, 8), {2}, 0),
    ],
)
def test_sums_hold_what_an_h200_was_seen_to_allocate(shape, dims, num_bytes):
    strides = torch.empty(shape, device="meta").stride()
    partial, counters = partial_results(ReducedRows(shape, strides, 0, torch.float32), dims, 4, THREADS) or (0, 0)
    assert (partial, counters <= 512) == (num_bytes, True), "counters have a block of 512 bytes of their own"


def test_columns_of_wider_rows_are_read_one_by_one_where_rows_do_not_begin_evenly():
    rows = torch.empty(1_000_000, 67, device="meta")
    each = [inside("sum", part, [0])[0] for part in (rows[:, :64], torch.empty(1_000_000, 64, device="meta"))]
    assert 10 * each[0] < each[1]
    odd = torch.empty(1_000_001 * 64, device="meta")[1:-63].view(1_000_000, 64)
    assert inside("sum", odd, [0]) == [each[0], 4 * 2], "nor where the first does not"


THREADS = 132 * 2048


def inside(op: str, rows: torch.Tensor, *more) -> list[int]:
    return bytes_inside_reduction(f"aten::{op}", [rows, *more], 132, 2048)


@pytest.mark.parametrize(
    ("op", "times"), [("max", 4), ("argmin", 4), ("var", 4), ("amax", 1), ("mean", 1), ("all", 0.25)]
)
def test_partial_results_have_what_is_kept_of_each_value(op, times):
    rows = torch.empty(200_000, 64, device="meta")
    dims = 0 if op in ("max", "argmin") else [0]
    assert inside(op, rows, dims)[0] == times * inside("sum", rows, [0])[0] > 0


def test_values_that_are_summed_as_others_are_copied_first():
    truth = torch.empty(100_000, 64, dtype=torch.bool, device="meta")
    copied, partial, _ = inside("sum", truth, [0])
    assert copied == 8 * truth.numel() and partial == 2 * inside("sum", truth.float(), [0])[0]
    assert inside("sum", truth.half(), [0], False, torch.float32) == inside("sum", truth.float(), [0])
    assert inside("mean", truth.float(), torch.float64)[0] == 8 * truth.numel()
    assert inside("max", truth, truth) == [], "the larger of two is no reduction"


RECORDED = {  # Cora's size, four layers: two steps on an NVIDIA H200 with torch 2.11.0+cu130, by `gnnsys bench jobs`
    ("gnnsys", "GCN"): (89_356_288, 92_274_688),
    ("gnnsys", "GraphSAGE"): (91_798_016, 94_371_840),
    ("gnnsys", "GAT"): (94_981_632, 98_566_144),
    ("gnnsys", "GIN"): (132_077_568, 146_800_640),
    ("pyg", "GAT"): (119_678_976, 144_703_488),
}


@pytest.mark.parametrize(("library", "kind"), RECORDED)
def test_an_estimate_for_an_h200_is_what_one_took(library, kind, cache):
    """Allocated and reserved bytes; torch 2.13 traces what 2.11 ran."""
    arguments = {"library": library, "kind": kind, "layers": 4, **GRAPHS["CR"]._asdict()}
    found = estimate_memory(whole_graph_job, arguments, "h200")
    allocated, reserved = RECORDED[library, kind]
    assert found.allocated_bytes == pytest.approx(allocated, rel=1e-4)
    assert found.reserved_bytes == reserved
