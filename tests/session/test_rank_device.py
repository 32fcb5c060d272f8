"""Where a rank computes, and what its process group is made of: decided without a GPU, and tried in real processes."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import gnnsys
from gnnsys.checkpoint.generators import read_generators
from gnnsys.comm import DevicePlace
from gnnsys.nn import GATConv
from gnnsys.ops import ASK_DOCTOR
from gnnsys.partition import write_parts
from gnnsys.session.rank_device import GLOO, NCCL, choose_backend, choose_device, find_device
from tests.partition.part_graphs import homogeneous, random_assignment
from tests.support.processes import run_ranks


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8])
def test_local_ranks_take_gpus_by_turns(num_gpus):
    taken = [choose_device(None, rank, num_gpus) for rank in range(2 * num_gpus)]
    assert [device.index for device in taken] == [*range(num_gpus), *range(num_gpus)]
    assert [choose_device("cuda", rank, num_gpus) for rank in range(2 * num_gpus)] == taken


def test_without_a_gpu_ranks_compute_on_the_cpu():
    assert choose_device(None, 5, 0) == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["cpu", "cpu:0", torch.device("cpu"), "cuda:1", torch.device("cuda", 1)])
def test_a_given_device_overrules_the_local_rank(wanted):
    index = torch.device(wanted).index if torch.device(wanted).type == "cuda" else None
    assert choose_device(wanted, 0, 2) == torch.device(torch.device(wanted).type, index)


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "told"),
    [
        ("cuda", 0, f"device='cuda' does not exist here: torch finds no GPU, only 'cpu'. {ASK_DOCTOR}"),
        ("cuda:1", 1, "device='cuda:1' does not exist here: torch finds cuda:0"),
        ("cuda:7", 4, "device='cuda:7' does not exist here: torch finds cuda:0 to cuda:3"),
        ("gpu", 4, "device must be 'cpu', 'cuda' or one such as 'cuda:1', got 'gpu': torch finds cuda:0 to cuda:3"),
        ("mps", 0, "device must be 'cpu', 'cuda' or one such as 'cuda:1', got 'mps': torch finds no GPU, only 'cpu'"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_in_one_line_that_says_what_is_there(wanted, num_gpus, told):
    with pytest.raises(ValueError, match="torch finds") as refusal:
        choose_device(wanted, 0, num_gpus)
    assert str(refusal.value) == told


def places(*machines: list[str]) -> list[DevicePlace]:
    return [DevicePlace(f"host{number}", device) for number, found in enumerate(machines) for device in found]


# Two pods of one machine that call it by different names
PODS = [DevicePlace(machine, f"GPU-{uuid}") for machine, uuid in (("pod-a", 1), ("pod-a", 2), ("pod-b", 2))]


def test_nccl_is_for_jobs_whose_ranks_all_have_a_gpu_of_their_own():
    assert choose_backend(places(["a", "b"], ["a", "b"]), has_nccl=True) == (NCCL, None)
    assert choose_backend(places(["a"]), has_nccl=True) == (NCCL, None)
    assert choose_backend(PODS[:2], has_nccl=True) == (NCCL, None)
    assert choose_backend(places(["cpu", "cpu"], ["cpu"]), has_nccl=True) == (GLOO, None)
    assert choose_backend(places(["cpu"]), has_nccl=False) == (GLOO, None)


@pytest.mark.parametrize(
    ("found", "has_nccl", "told"),
    [
        (PODS, True, "ranks 1 and 2 share one GPU"),
        (places(["a", "b"], ["a", "b", "b"]), True, "ranks 3 and 4 share one GPU"),
        (places(["a", "a"]), False, "ranks 0 and 1 share one GPU"),
        (places(["a"], ["cpu"]), True, "rank 1 computes on the CPU and others on GPUs"),
        (places(["a"], ["a"]), False, "this torch has no NCCL"),
    ],
)
def test_where_nccl_cannot_serve_gpus_one_line_says_why(found, has_nccl, told):
    backend, why = choose_backend(found, has_nccl)
    assert backend == GLOO and why is not None
    assert why.startswith(told) and "the process group is gloo" in why and "\n" not in why


def test_a_session_alone_has_the_device_that_it_was_given():
    before = gnnsys.session.current()  # another test may have left one
    with gnnsys.init(process_group=False, device="cpu") as session:
        assert session.device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^device='cuda:99' does not exist here: torch finds [^\n]*$"):
        gnnsys.init(process_group=False, device="cuda:99")
    assert gnnsys.session.current() is before


SHARED = """
import json, logging, torch, torch.distributed as dist, gnnsys
from gnnsys.session import rank_device
rank_device.place_of = lambda device, is_alone: rank_device.DevicePlace("host", "its only GPU")
logging.basicConfig(format="%(message)s")
with gnnsys.init(timeout=30) as session:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((1, 3), 1.0 + session.rank)).sum().backward()
    print(json.dumps([str(session.device), dist.get_backend(), model.module.weight.grad.tolist()]))
"""


def test_ranks_that_share_a_gpu_train_together_over_gloo_and_rank_0_says_so():
    first, second = run_ranks(SHARED, [2], timeout=90)
    assert json.loads(first.stdout) == json.loads(second.stdout)
    assert json.loads(first.stdout)[1:] == ["gloo", [[1.5] * 3] * 2]
    assert first.stderr.count("ranks 0 and 1 share one GPU") == 1 and "share one GPU" not in second.stderr


SEEN = """
import json, os, torch, gnnsys
from gnnsys.comm import device_place
from gnnsys.loader.batch_memory import room_for_groups
from gnnsys.session import rank_device
from gnnsys.store import MemoryBudget

seen, uuids = json.loads(os.environ["SEEN"])[int(os.environ["RANK"])], []
if seen is not None:  # the GPUs of this rank, on a machine without any
    os.environ["CUDA_VISIBLE_DEVICES"] = seen
    rank_device.find_device = lambda wanted, local_rank: torch.device("cuda", local_rank % len(seen.split(",")))
    torch.cuda.device_count = lambda: len(seen.split(","))
    torch.cuda.get_device_properties = lambda device: object()  # as of a torch that knows no UUIDs
if "|" in os.environ["SEEN"]:  # in containers, which name the machine otherwise
    device_place._machine = lambda: os.environ["RANK"]
    torch.cuda.get_device_properties = lambda device: type("", (), {"uuid": seen.split("|")[device.index]})
with gnnsys.init(timeout=30, process_group=False, device="cpu" if seen is None else None) as session:
    budget = MemoryBudget.of(session.device)
    told = budget.num_ranks, budget.share(), room_for_groups(session.device)
print(json.dumps([*told, budget.num_ranks]))
"""


@pytest.mark.parametrize(
    ("seen", "sharing"),
    [
        (["0", "1", "2"], [1, 1, 1]),  # each its own, which all call cuda:0
        (["0,1,2"] * 3, [1, 1, 1]),  # all see all, and take them by turns
        (["0", "0", "0"], [3, 3, 3]),
        (["0", "0", "1"], [2, 2, 1]),
        (["0", "0", None], [2, 2, None]),  # the third computes on the CPU
        (["a|", "b|", "a|"], [2, 1, 2]),
    ],
)
def test_ranks_share_the_memory_of_the_gpu_that_they_have_and_not_of_what_they_call_it(seen, sharing):
    environment = {"SEEN": json.dumps(seen), "GNNSYS_MEMORY_CAP": "cuda=1200,cpu=1200"}
    for ended, count in zip(run_ranks(SEEN, [3], environment=environment, timeout=90), sharing, strict=True):
        num_ranks, share, groups, afterwards = json.loads(ended.stdout)
        count = 3 if count is None else count  # host memory is for all ranks of the machine
        assert (num_ranks, share, groups) == (count, 1200 // count, 1200 // count // 4), (seen, ended)
        estimated = 3 if "," not in (seen[0] or "") else 1
        assert afterwards == estimated, "without a session torchrun's word is all there is"


REFUSED = """
import os, gnnsys
try:
    gnnsys.init(timeout=30, device="cuda:99" if os.environ["RANK"] == "1" else "cpu")
except ValueError as error:
    print(error)
"""


def test_a_device_that_one_rank_lacks_is_the_same_error_on_every_rank():
    first, second = run_ranks(REFUSED, [2], timeout=90)
    assert first.stdout == second.stdout
    assert first.stdout.startswith("rank 1: device='cuda:99' does not exist here: torch finds ")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_job_on_the_cpu_never_asks_cuda_for_anything(device, tmp_path, monkeypatch):
    """On a machine with GPUs a question starts the driver, and most start a context, which takes memory of the GPU."""
    asked = []

    def watched(owner, name):
        before = getattr(owner, name)

        def call(*args, **kwargs):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.split(".")[0] == "gnnsys":
                asked.append((caller, name))
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner in (torch.cuda, torch.accelerator):
        names = [name for name in vars(owner) if callable(getattr(owner, name)) and not name.startswith("_")]
        for name in names:
            if not isinstance(getattr(owner, name), type) and name != "is_initialized":
                watched(owner, name)
    assert find_device(device, 0) == torch.device("cpu")
    assert asked == []
    find_device(None, None)
    assert ("gnnsys.session.rank_device", "is_available") in asked, "the watch works"
    asked.clear()
    parts, graph = tmp_path / "parts", homogeneous(60, 200, 0)
    write_parts(graph, random_assignment(graph, 2, 1), parts)
    with gnnsys.init(process_group=False, device=device) as session:
        opened = session.open(parts)
        loader = gnnsys.NeighborLoader(
            opened, [3, 2], input_nodes=opened.from_global(range(60)), batch_size=20, num_threads=2
        )
        model = GATConv(4, 2, dropout=0.5)
        for batch in loader:
            model(torch.ones(batch.n_id.numel(), 4), batch.edge_index).sum().backward()
        loader.close()
        read_generators()
    assert asked == []
