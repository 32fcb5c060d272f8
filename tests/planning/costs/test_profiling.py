"""Profiling this machine: real operators, and a file in the user's cache. What they take is not looked at."""

from __future__ import annotations

import itertools
import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from gnnsys.ops import CSC
from gnnsys.planning import (
    CostContext,
    DeviceProbes,
    HostProbes,
    machine_profile,
    profile_machine,
    sampling_threads,
)
from gnnsys.planning.costs import __main__ as command
from gnnsys.planning.costs import pairs, profile_cache, timing
from gnnsys.planning.costs.facts import _host_caches, facts_of
from gnnsys.planning.costs.host_probes import distinct_ids, is_either, random_block, random_graph, variants
from gnnsys.planning.costs.operators import OPERATORS
from gnnsys.planning.costs.shapes import halton
from gnnsys.planning.costs.timing import CostProbe, ProbeTimer, time_probes

HOST = {name for name in OPERATORS if name.endswith("/host")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gnnsys" / "profiles"


def test_a_profile_is_made_once_and_a_damaged_one_again(cache: Path, capsys: pytest.CaptureFixture[str]):
    before = torch.get_num_threads()
    made = machine_profile(None, 1, budget_seconds=0.3)
    assert torch.get_num_threads() == before, "threads are given back"
    assert set(made.costs.operators) == HOST and made.machine.threads == 1
    assert all(cost.terms and cost.points >= 6 for cost in made.costs.operators.values())
    assert {name for pair in made.pairs for name in pair} == {"sample/host", "spmm/host", "product/host"}
    (path,) = cache.glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert machine_profile(None, 1) == made, "measured again, although it was kept"
    assert command.main(["--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert made.report() in said and "multiply-adds in the time in which spmm moves one element, host: " in said
    path.write_text(path.read_text()[:100])
    again = machine_profile(None, 1, budget_seconds=0.3)
    assert again != made and machine_profile(None, 1) == again
    assert command.main(["--threads", "1", "--again", "--budget", "0.2", "--out", str(cache / "here.json")]) == 0
    newest = machine_profile(None, 1)
    assert newest != again and profile_cache.MachineProfile.load(cache / "here.json") == newest and newest.error > 0


def test_of_processes_that_ask_at_once_one_measures(cache: Path):
    """The second waits until the first, which is in the middle of it, has written its profile, and takes that."""
    facts = facts_of(None, 1)
    described = profile_cache.MachineProfile.from_rates(cores=1, host_gbs_per_core=1.0, host_gflops_per_core=1.0)
    theirs = replace(described, machine=facts)
    cache.mkdir(parents=True)
    found = []
    with profile_cache._alone(cache / "lock", 60.0):
        second = threading.Thread(target=lambda: found.append(machine_profile(None, 1)))
        second.start()
        theirs.save(profile_cache.profile_path(facts))
    second.join(60.0)
    assert found == [theirs]


def test_nobody_waits_for_ever(cache: Path):
    cache.mkdir(parents=True)
    with profile_cache._alone(cache / "lock", 60.0), profile_cache._alone(cache / "lock", 0.0):
        pass
    with profile_cache._alone(cache / "no such folder" / "lock", 60.0):
        pass


def test_a_kept_profile_of_another_machine_is_not_taken(cache: Path):
    facts = facts_of(None, 1)
    other = facts_of(None, 2)
    assert profile_cache.profile_path(facts) != profile_cache.profile_path(other)
    cache.mkdir(parents=True)
    profile = profile_cache.MachineProfile.from_rates(cores=1, host_gbs_per_core=1.0, host_gflops_per_core=1.0)
    profile.save(profile_cache.profile_path(facts))
    assert profile_cache.cached_profile(facts) is None
    assert profile_cache.cached_profile(other) is None


def test_a_profile_whose_quantities_meant_something_else_is_not_taken(cache: Path, monkeypatch: pytest.MonkeyPatch):
    facts = facts_of(None, 1)
    cache.mkdir(parents=True)
    described = profile_cache.MachineProfile.from_rates(cores=1, host_gbs_per_core=1.0, host_gflops_per_core=1.0)
    older = replace(described, machine=facts)
    older.save(profile_cache.profile_path(facts))
    assert profile_cache.cached_profile(facts) == older
    monkeypatch.setattr(profile_cache, "_CONTENTS", profile_cache._CONTENTS + 1)
    assert profile_cache.cached_profile(facts) is None


def test_without_a_folder_of_its_own_the_cache_is_in_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for said in ("", "relative"):  # which XDG's rules say to leave aside
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert profile_cache.profile_path(facts_of(None, 1)).parent == tmp_path / ".cache" / "gnnsys" / "profiles"


def test_threads_must_be_some_and_a_gpu_needs_kernels():
    with pytest.raises(ValueError, match="threads must be 1 or more, got 0"):
        profile_machine(None, 0)
    if not torch.cuda.is_available():
        for make in (profile_machine, machine_profile):
            with pytest.raises(ValueError, match="needs CUDA kernels"):
                make(torch.device("cuda", 0), 1)


def test_probes_have_the_sizes_of_what_they_call():
    context = CostContext(last_cache=1 << 16)
    with sampling_threads(2) as pool:
        host = HostProbes(context, pool, scale=0.01)
        block = random_block(500, 40, 300, host.generator)
        assert block.num_edges == 500 and block.num_dst == 40 and 200 < block.num_src <= 300
        _, at = block.indices.unique(return_inverse=True)
        assert torch.equal(at.to(torch.int32), block.indices), "every source has an edge"
        assert torch.equal(block.indices.cummax(0)[0].unique(), torch.arange(block.num_src, dtype=torch.int32))
        probe = host.spmm_of(block, 8)
        assert probe.sizes == {"edges": 500, "destinations": 40, "width": 8, "sources": block.num_src}
        assert probe.call().shape == (40, 8)
        gather = host.gather_of(100, 16)
        assert gather.sizes["rows"] == 100 and gather.sizes["row_bytes"] == 64 and gather.call().shape == (100, 16)
        assert host.product_of(10, 20, 30).call().shape == (10, 30)
        weight, rows = host.backward_of(10, 20, 30, True).call()
        assert weight.shape == (20, 30) and rows.shape == (10, 20)
        sample = host.sample_of(random_graph(1000, 8000, 2.0, host.generator), (3, 2), 10)
        assert 0 < sample.sizes["edges"] <= 10 * 3 + 30 * 2 and sample.sizes["hops"] == 2
        assert sample.share == pool.count == 2
        sample.call()
        assert {each.operator for each in host.all(6)} == HOST


def test_probes_of_a_device_can_be_called_on_the_host_too():
    """Without meaning, and without samples, which only a GPU draws in one call: every call is whole."""
    there = DeviceProbes(torch.device("cpu"), CostContext(), scale=0.002)
    probes = there.all(4, 2)
    named = {name for name in OPERATORS if not name.endswith("/host") and not name.startswith("sample/")}
    assert {probe.operator for probe in probes} == named
    for probe in probes:
        probe.call()
        OPERATORS[probe.operator].checked(probe.sizes)
    rows = there.cached_of(100, 8, 0.3)
    assert rows.sizes == {"rows": 100, "row_bytes": 32, "hit_rate": 0.3} and rows.call().shape == (100, 8)
    turned = there.compact_of(500, 40, 300)
    assert turned.call().num_edges == 500 and turned.call().num_dst == turned.sizes["nodes"]


def test_a_batch_asks_for_no_row_twice_and_the_next_one_for_others():
    draw = torch.Generator("cpu").manual_seed(0)
    for count, below in ((0, 10), (1, 1), (10, 10), (1000, 1003), (500, 10**9)):
        ids = distinct_ids(count, below, draw)
        assert ids.unique().numel() == ids.numel() == count
        assert count == 0 or (int(ids.min()) >= 0 and int(ids.max()) < below)
    assert not torch.equal(ids, ids.sort()[0]) and not torch.equal(ids, distinct_ids(500, 10**9, draw))
    assert [variants(count) for count in (10, 1 << 16, 1 << 17, 1 << 19, 1 << 30)] == [32, 32, 16, 4, 2]


def test_kinds_are_spread_over_all_sizes():
    """Were all large products without a gradient for their rows, nobody could tell the gradient from the size."""
    for first in (0, 100):
        for count in (14, 20):
            numbers = range(first, first + count)
            small = [is_either(number) for number in numbers if halton(number, 0) < 0.5]
            large = [is_either(number) for number in numbers if halton(number, 0) >= 0.5]
            for some in (small, large):
                assert 0.2 <= sum(some) / len(some) <= 0.8


def test_random_graphs_are_whole_and_their_sources_crowd_where_they_are_to():
    draw = torch.Generator("cpu").manual_seed(0)
    even, crowded = (random_graph(1000, 20_000, skew, draw) for skew in (1.0, 3.0))
    for csc in (even, crowded):
        CSC(csc.indptr, csc.indices, 1000).transpose()  # raises where it is none
        assert abs(csc.num_edges - 20_000) < 2000 and csc.num_dst == 1000
    assert torch.bincount(crowded.indices).max() > 3 * torch.bincount(even.indices).max()


def test_rounds_call_every_probe_and_a_figure_is_the_mean_of_the_faster_half():
    ticks = itertools.count()
    calls: list[int] = []
    probes = [CostProbe("copy/up", {"bytes": n}, lambda n=n: calls.append(n)) for n in range(3)]  # type: ignore[misc]
    seen = time_probes(probes, deadline=float("inf"), timer=ProbeTimer(clock=lambda: 1.0 * next(ticks)))
    assert [one.sizes["bytes"] for one in seen] == [0, 1, 2] and all(one.seconds == 1.0 for one in seen)
    assert len({calls.count(n) for n in range(3)}) == 1 and all(
        len(p.seconds) == len(probes[0].seconds) for p in probes
    )
    assert timing._figure([5.0, 1.0, 2.0, 9.0, 3.0]) == timing._figure([1.0, 2.0, 3.0, 70.0]) + 0.5 == 2.0
    assert timing._figure([5.0, 1.0, 2.0, 9.0, 3.0], True) == pytest.approx(10 / 3), "the middle half"
    assert timing._figure([7.0]) == timing._figure([7.0], True) == 7.0


def test_sizes_that_take_too_long_are_left_out_but_for_a_few():
    """The clock says a second a call, and there are none left: six sizes stay."""
    probes = [CostProbe("copy/up", {"bytes": n}, lambda: None) for n in range(20)]
    seen = time_probes(probes, deadline=0.0, timer=ProbeTimer())
    assert [one.sizes["bytes"] for one in seen] == list(range(6))
    assert all(len(probe.seconds) == 1 for probe in probes[:6])


def test_a_call_that_makes_many_at_once_is_long_enough_by_itself():
    """The clock says 3 ms for a call of 16: no measurement needs a second one; of a short call it takes several."""
    ticks = itertools.count()
    probes = [CostProbe("copy/up", {"bytes": n}, lambda: None, share=n) for n in (1, 16)]
    timer = ProbeTimer(clock=lambda: 3e-3 * next(ticks))
    assert [one.seconds for one in time_probes(probes, 0.0, timer)] == pytest.approx([3e-3, 3e-3 / 16])
    assert [probe.calls for probe in probes] == [1, 1]
    short = CostProbe("copy/up", {"bytes": 1}, lambda: None)
    ticks = itertools.count()
    time_probes([short], 0.0, ProbeTimer(clock=lambda: 1e-3 * next(ticks)))
    assert short.calls == 2


def test_pairs_are_called_alone_and_beside_each_other():
    """With no time at all, each is called once to warm up and three times to count: alone, and beside the other."""
    called: list[str] = []
    probes = {n: CostProbe(n, {}, partial(called.append, n)) for n in ("sample/host", "spmm/host")}
    found = pairs.measure_pairs(probes, pairs.HOST_PAIRS, 0.0, 1)
    assert set(found) == {("sample/host", "spmm/host"), ("spmm/host", "sample/host")}, "only what there are probes of"
    assert all(factor >= 1.0 for factor in found.values())
    assert called[:4] == ["sample/host"] * 4 and called[4:8] == ["spmm/host"] * 4
    assert min(called[8:].count(name) for name in probes) >= 4
    assert pairs._rate([0.0, 1.0, 2.0, 4.0]) == 0.75


def test_what_a_pair_raises_is_raised_here():
    def fails() -> None:
        raise MemoryError("no room")

    probes = {"sample/host": CostProbe("sample/host", {}, fails), "spmm/host": CostProbe("spmm/host", {}, lambda: None)}
    with pytest.raises(MemoryError, match="no room"):
        pairs.measure_pairs(probes, pairs.HOST_PAIRS, 0.01, 1)


def test_caches_are_those_of_the_cores_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two of four cores, each with 1 MB of its own; pairs of cores share 32 MB."""
    for cpu in range(4):
        for index, (kind, level, size, users) in enumerate(
            [("Data", 1, "64K", f"{cpu}"), ("Instruction", 1, "64K", f"{cpu}"), ("Unified", 2, "1024K", f"{cpu}"),
             ("Unified", 3, "32M", "0-1" if cpu < 2 else "2-3")]
        ):  # fmt: skip
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("type", kind), ("level", level), ("size", size), ("shared_cpu_list", users)):
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert _host_caches(tmp_path) == (1 << 20, 32 << 20)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 2}, raising=False)
    assert _host_caches(tmp_path) == (1 << 20, 64 << 20)
    assert _host_caches(tmp_path / "nothing") == (0, 0)
