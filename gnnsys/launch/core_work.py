"""How fast a core of this machine is at what jobs do: core-seconds of a fixed amount of serving, sampling, encrypting.

The amounts are the same on every machine and say nothing by themselves; the ratio to another machine's is a speed. Time
is that of the processor, so that neither a quota nor other programs count. The least of some turns is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from gnnsys.comm import sealing_seconds
from gnnsys.graph import rmat
from gnnsys.planning import compute_threads
from gnnsys.sampling import NeighborSampler, SampleKey
from gnnsys.store import Pull, Shard, Store, TableSpec

NUM_ROWS, WIDTH, NUM_ASKED = 1 << 18, 64, 1 << 14  # 64 MB of rows: more than a core's own caches
NUM_NODES, NUM_EDGES, NUM_SEEDS, FANOUTS = 1 << 16, 1 << 20, 256, (15, 10)
SEALED_BYTES = 1 << 20
LEAST_TURNS, MOST_TURNS = 3, 40


def core_work(seconds: float = 0.5) -> dict[str, float]:
    """Core-seconds of one turn of each kind of work; `seconds` of the wall clock go to each, and three turns at the
    least."""
    with compute_threads(1):
        return {
            "serving": _least(_serving(), seconds),
            "sampling": _least(_sampling(), seconds),
            "encrypting": SEALED_BYTES * sealing_seconds(turns=3 * LEAST_TURNS),
        }


def core_speed(own: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """How fast a core is beside another one: the geometric mean over all kinds of work.

    >>> core_speed({"serving": 2.0, "sampling": 0.5}, {"serving": 4.0, "sampling": 1.0})
    2.0
    """
    if own.keys() != reference.keys() or not all(told > 0 for told in (*own.values(), *reference.values())):
        raise ValueError(f"works of two machines must be of the same kinds and above 0, got {own} and {reference}")
    return math.exp(math.fsum(math.log(reference[kind] / own[kind]) for kind in own) / len(own))


def _least(call: Callable[[int], object], seconds: float) -> float:
    least, deadline = math.inf, time.monotonic() + seconds
    call(0)  # what is made or read for the first time
    for turn in range(1, MOST_TURNS + 1):
        begin = time.thread_time()
        call(turn)
        least = min(least, time.thread_time() - begin)
        if turn >= LEAST_TURNS and time.monotonic() >= deadline:
            break
    return least


def _serving() -> Callable[[int], object]:
    """Rows of a shard, any of a table, as a batch asks for them."""
    shard, spec = Shard(0), TableSpec("rows", (WIDTH,), torch.float32, (0, NUM_ROWS))
    shard.add(spec, 0, torch.ones(NUM_ROWS, WIDTH, device="cpu"))
    store = Store(machine_of_part=[0], local=shard)
    store.register(spec)
    order = torch.randperm(NUM_ROWS, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    asked = order.split(NUM_ASKED)
    return lambda turn: store.pull([Pull("rows", asked[turn % len(asked)])]).result()


def _sampling() -> Callable[[int], object]:
    graph = rmat(NUM_NODES, NUM_EDGES, seed=0)
    sampler = NeighborSampler(graph, list(FANOUTS))
    order = torch.randperm(NUM_NODES, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    seeds, node_type = order.split(NUM_SEEDS), graph.node_types[0]
    return lambda turn: sampler.sample({node_type: seeds[turn]}, key=SampleKey(0, 0, turn))
