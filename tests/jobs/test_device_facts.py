"""What a device has, and by whose profile its jobs are estimated."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gnnsys.jobs import JobService, Queue, service
from gnnsys.jobs.device_facts import DeviceFacts
from gnnsys.planning import DeviceProfile, save_device_profile
from tests.jobs.queue_jobs import FOLDER, NAME

GIB, MIB = 1 << 30, 1 << 20
T1000 = DeviceFacts("cuda:0", 4 * GIB, "NVIDIA T1000 8GB")
PROFILE = DeviceProfile("t1000-8gb", "NVIDIA T1000 8GB", "2.11.0", capacity=4 * GIB, product_workspace=256 * MIB)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_host_has_its_memory_and_most_of_it_is_for_jobs():
    facts = DeviceFacts.ask("cpu")
    assert facts.num_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.kind() == ("cpu", "") and facts.choose_capacity(None, 2) == int(0.8 * facts.num_bytes)


def test_a_gpu_keeps_room_for_a_context_per_worker_and_gives_no_more_than_it_has():
    assert 4 * GIB - 2 * GIB < T1000.choose_capacity(None, 2) < 4 * GIB - GIB
    assert T1000.choose_capacity(GIB, 2) == GIB
    with pytest.raises(ValueError, match=r"at most the 4.0 GiB that cuda:0 has, got 5.0 GiB: give --capacity 4G or"):
        T1000.choose_capacity(5 * GIB, 2)


@pytest.mark.parametrize(
    ("gigabytes", "num_cores", "wanted"), [(140, 16, 4), (140, 6, 3), (140, 1, 2), (40, 16, 3), (4, 16, 2)]
)
def test_four_run_at_a_time_on_a_gpu_that_has_cores_and_memory_for_them(gigabytes: int, num_cores: int, wanted: int):
    assert DeviceFacts("cuda:0", gigabytes * GIB, "NVIDIA").choose_workers(num_cores) == wanted
    assert DeviceFacts("cpu", 500 * GIB).choose_workers(64) == 2


def test_who_serves_may_say_how_many_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "num_usable_cores", lambda: 16)
    large = DeviceFacts("cuda:0", 140 * GIB, "NVIDIA H200")
    monkeypatch.setattr(DeviceFacts, "ask", lambda device: large if device != "cpu" else DeviceFacts("cpu", 64 * GIB))
    for more, wanted in [
        ({}, 2), ({"policy": "bmc"}, 2), ({"workers": 3}, 3), ({"device": "cuda"}, 4),
        ({"device": "cuda", "policy": "bmc"}, 2), ({"device": "cuda", "uses_estimates": False}, 2),
    ]:  # fmt: skip
        assert JobService(tmp_path / "queue", **more).room.workers == wanted


def test_jobs_are_estimated_by_the_profile_of_their_gpu_or_by_another_one_and_that_is_said():
    assert DeviceFacts("cuda:0", 140 * GIB, "NVIDIA H200").kind() == ("h200", "")
    kind, said = T1000.kind()
    assert kind == "h200" and said.startswith("nobody has measured a NVIDIA T1000 8GB here") and "--calibrate" in said
    save_device_profile(PROFILE)
    assert T1000.kind() == ("t1000-8gb", "")


def test_who_submits_estimates_for_the_device_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_device_profile(PROFILE)
    monkeypatch.chdir(FOLDER)
    found = []
    with Queue(tmp_path / "queue") as queue:
        for number, kind in enumerate(["h200", "t1000-8gb"]):
            queue._database.set({"kind": kind, "capacity": 4 * GIB, "factor": 1.15})
            job = queue.submit(f"{NAME}:rows", {"num_rows": 1000 + number, "batch_size": 50})
            found.append(queue.show(job).estimated)
        queue._database.set({"kind": "t9", "capacity": 4 * GIB, "factor": 1.15})
        unknown = queue.show(queue.submit(f"{NAME}:rows", {"num_rows": 2000, "batch_size": 50}))
    assert found[0] and found[1] and found[1] - found[0] > 100 * MIB, "the workspaces of cuBLAS"
    assert (unknown.estimate, unknown.estimated) == ("", None), "the service does it, which has that profile"


def test_jobs_that_wait_are_estimated_anew_for_a_device_of_another_kind(tmp_path: Path, monkeypatch):
    save_device_profile(PROFILE)
    monkeypatch.chdir(FOLDER)
    rows = {"num_rows": 1000, "batch_size": 50}
    facts = {"cpu": DeviceFacts.ask("cpu"), "cuda:0": T1000}
    monkeypatch.setattr(DeviceFacts, "ask", classmethod(lambda cls, device: facts[device]))
    seen = []
    with Queue(tmp_path / "queue") as queue:
        for device in ("cuda", "cuda", "cpu"):
            made = JobService(tmp_path / "queue", device=device)
            made._queue.open()
            if not seen:
                queue.submit(f"{NAME}:rows", rows)
                queue.submit(f"{NAME}:rows", rows, memory="1G")
            seen.append([job.estimate for job in queue.list()])
            made._queue.close()
    assert seen == [["traced", "stated"]] * 2 + [["", "stated"]]


@pytest.mark.parametrize("problem", ["torch", "driver", None])
def test_the_default_is_a_gpu_that_answers_and_that_torch_is_built_for(problem, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if problem == "driver":
            raise subprocess.TimeoutExpired(command, 120.0)
        return subprocess.CompletedProcess(command, 0, json.dumps([T1000.num_bytes, T1000.name]), "")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: problem != "torch")
    monkeypatch.setattr(subprocess, "run", run)
    assert DeviceFacts.ask_default() == (DeviceFacts.ask("cpu") if problem else T1000)
    if problem == "driver":
        with pytest.raises(ValueError, match=r"cuda:0 cannot be used \(its driver does not answer within 120 s\)"):
            DeviceFacts.ask("cuda:0")


def test_devices_are_told_from_each_other_by_the_name_their_driver_gives():
    assert T1000.model == "NVIDIA T1000 8GB" == replace(T1000, device="cuda:1").model
    assert DeviceFacts.ask("cpu").model == "cpu"
