"""What structure costs on the wire by layer-wise samplers beside uniform draws, between two machines over loopback.

Two hops of 10 neighbours; a layer draws as often as uniform draws found new nodes in that hop. `in-edges` asks for all
in-edges of the same layers, which LADIES would need if owners did not add them up; it draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Unit, Versus, milliseconds, value
from gnnsys.bench.two_machines import two_machines
from gnnsys.bench.workload import Workload
from gnnsys.graph import EDGE, NODE
from gnnsys.sampling import (
    DistGraph,
    FastGCNSampler,
    LadiesSampler,
    NeighborSampler,
    Sample,
    SampleKey,
    Sampler,
)

FANOUTS = [10, 10]
UNITS: dict[str, Unit] = {"messages": value("messages"), "bytes": value("KB"), "time": milliseconds()}
PEERS = {
    "messages": ("uniform", "fastgcn"),
    "bytes": ("uniform", "fastgcn", "in-edges"),
    "time": ("uniform", "fastgcn"),
}


class WireCosts:
    """The samplers of a run, and what one batch of each sends and receives."""

    def __init__(self, work: Workload) -> None:
        self.graph: DistGraph = two_machines(work).graph
        self.seeds: Tensor = self.graph.global_ids(work.seeds(work.sizes.num_seeds), NODE)
        uniform = NeighborSampler(self.graph, FANOUTS)
        numbers = self.sample(uniform).num_sampled_nodes[NODE][1:]
        ladies = LadiesSampler(self.graph, numbers)
        fastgcn = FastGCNSampler(self.graph, numbers)
        self.samplers: dict[str, Sampler] = {OURS: ladies, "uniform": uniform, "fastgcn": fastgcn}
        self._layers = self._of(self.sample(ladies))

    def sample(self, sampler: Sampler) -> Sample:
        return sampler.sample({NODE: self.seeds}, key=SampleKey())

    def _of(self, sample: Sample) -> list[Tensor]:
        """The nodes of each layer, from the seeds on."""
        sizes = [block.num_dst[NODE] for block in reversed(sample.blocks)]
        return [sample.node[NODE][:size] for size in sizes]

    def run(self, side: str) -> None:
        if side in self.samplers:
            self.sample(self.samplers[side])
        else:
            for nodes in self._layers:
                self.graph.sample_neighbors(nodes, -1, edge_type=EDGE)

    def counted(self, side: str, what: str) -> float:
        """Of one batch: requests, or kilobytes there and back."""
        before = self._traffic()
        self.run(side)
        messages, num_bytes = (after - was for after, was in zip(self._traffic(), before, strict=True))
        return messages if what == "messages" else num_bytes / 1e3

    def _traffic(self) -> tuple[int, int]:
        assert self.graph.client is not None
        kinds = [counts for name, counts in self.graph.client.counters()["kinds"].items() if name != "PING"]
        both_ways = sum(counts["bytes_in"] + counts["bytes_out"] for counts in kinds)
        return sum(counts["messages_out"] for counts in kinds), both_ways


def layer_wise(work: Workload) -> Iterator[Case]:
    for what, unit in UNITS.items():

        def sides(what: str = what) -> dict[str, Side]:
            costs = work.once("samplers/wire", lambda: WireCosts(work))

            def side(name: str) -> Side:
                return Side(lambda: costs.run(name) if what == "time" else costs.counted(name, what))

            return {name: side(name) for name in (OURS, *PEERS[what])}

        versus = tuple(Versus((peer,)) for peer in PEERS[what])
        yield Case(f"wire/{what}", unit, sides, versus, repeats=None if what == "time" else 1)
