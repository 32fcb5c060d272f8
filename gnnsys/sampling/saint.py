"""GraphSAINT (Zeng et al. 2020): random subgraphs, with weights that undo how likely their nodes and edges are.

| sampler | nodes of a subgraph |
|---|---|
| `SaintNodeSampler` | `size` draws of nodes, by in-degree |
| `SaintEdgeSampler` | both ends of one in-edge each of `size` uniform nodes |
| `SaintWalkSampler` | all nodes of `size` random walks of `length` steps along in-edges, from uniform roots |

All take every edge among their nodes. Where edges go both ways, an edge {u, v} is drawn in proportion to 1/degree(u) +
1/degree(v), the paper's choice. How often nodes and edges come is counted in subgraphs that are made before (sections
3.2 and 3.4). Draws are keyed by (seed, epoch, input, draw) and original ids: a subgraph is the same on one graph and on
its parts, and so are the counts, which every process makes for itself.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from gnnsys.graph import Graph
from gnnsys.ops import MAX_WALKS, IdTable, draw_below, stream_key
from gnnsys.sampling.induced import induced_edges
from gnnsys.sampling.neighborhoods import AnyGraph, HopRequest, neighborhoods, sampling_device, to_device
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey
from gnnsys.sampling.subgraph_sampler import SubgraphSampler, check_inputs
from gnnsys.sampling.walks import walk

_PRESAMPLING = -2  # the epoch of subgraphs that are counted: no loader has it
_ROOTS, _STEPS = 0x524F, 0x5354  # domains of draws
_PIECE = 1 << 20


class SaintSampler(SubgraphSampler):
    """What the three have in common. An input is the number of a subgraph; a batch is one of them.

    `num_subgraphs` is how many an epoch has (default: as many as it takes to draw every node once on average).
    `coverage`: subgraphs are counted until they have that many nodes for each node of the graph; 0 leaves weights out.
    `ascending` sorts the nodes of a subgraph, which come in the order they were drawn otherwise.
    Counts take 4 bytes per node and edge of the whole graph in every process.
    """

    unbiased_for: ClassVar[str] = (
        "sums over nodes times node_weight of sums over in-edges times edge_weight, up to the error of the counts, "
        "1 / sqrt(coverage) for each node"
    )
    gives: ClassVar[tuple[str, ...]] = ("edge_weight", "node_weight")

    def __init__(
        self,
        graph: AnyGraph,
        size: int,
        *,
        num_subgraphs: int | None = None,
        coverage: int = 50,
        seed: int = 0,
        ascending: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if len(graph.node_types) != 1 or len(graph.edge_types) != 1:
            raise ValueError(f"{type(self).__name__} is for graphs with one node and edge type, got {graph.edge_types}")
        if not 1 <= size <= MAX_WALKS:
            raise ValueError(f"size must be in [1, {MAX_WALKS}], got {size}")
        if coverage < 0 or (num_subgraphs is not None and num_subgraphs < 1):
            raise ValueError(f"coverage must be >= 0 and num_subgraphs >= 1, got {coverage} and {num_subgraphs}")
        self.graph, self.size = graph, size
        self.device = sampling_device(graph, device)
        (self._node_type,), (self._edge_type,) = graph.node_types, graph.edge_types
        self._num_nodes, num_edges = graph.num_nodes(), graph.num_edges()
        if num_edges == 0:
            raise ValueError(f"{type(self).__name__} needs a graph with edges")
        self._hoods = neighborhoods(graph, device=self.device)
        self._num_inputs = -(-self._num_nodes // size) if num_subgraphs is None else num_subgraphs
        self._coverage, self._seed, self._ascending = coverage, seed, ascending
        self._counted = threading.Lock()
        self._counts: tuple[int, Tensor, Tensor] | None = None

    @property
    def num_inputs(self) -> int:
        return self._num_inputs

    def check_batch_size(self, batch_size: int) -> None:
        if batch_size != 1:
            raise ValueError(
                f"batch_size must be 1, one subgraph, got {batch_size}: `size` of the sampler says how large it is"
            )

    def options(self) -> dict[str, Any]:
        told = {"size": self.size, "coverage": self._coverage, "presampling seed": self._seed}
        return told | ({"ascending": True} if self._ascending else {})

    def sample(self, inputs: Tensor, *, key: SampleKey) -> Sample:
        """The subgraph with the number `inputs`, with its weights; an empty one for no input."""
        inputs = check_inputs(inputs, self._num_inputs)
        if inputs.numel() > 1:
            self.check_batch_size(inputs.numel())
        numbers = inputs.tolist()
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        sample = self._induce(self.nodes(numbers[0], key=key) if numbers else none)
        if self._coverage:
            sample.edge_weight, sample.node_weight = self._weights(sample)
        return sample

    def nodes(self, number: int, *, key: SampleKey) -> Tensor:
        """Nodes of a subgraph, int64 on `device`, each once, in the order that the sampler has them."""
        return self._once(self._draw(stream_key(key.seed, key.epoch, number)))

    @abstractmethod
    def _draw(self, key: int) -> Tensor:
        """Nodes of one subgraph, in the order they were drawn, on `device`; some may come twice."""

    def _once(self, drawn: Tensor) -> Tensor:
        table = IdTable(self._num_nodes, max(1, drawn.numel()), device=self.device)
        _, nodes = table.insert(drawn.long().contiguous())
        return nodes.sort().values if self._ascending else nodes

    def _induce(self, nodes: Tensor) -> Sample:
        node = {self._node_type: nodes}
        return Sample(node, *induced_edges(self.graph, node, self.graph.edge_types), {}, {})

    def _uniform(self, key: int) -> Tensor:
        """`size` nodes, each with the same probability."""
        numbers = torch.arange(self.size, device=self.device)
        return self._ids(draw_below(numbers, self._num_nodes, key=stream_key(key, _ROOTS)))

    def _ids(self, original: Tensor) -> Tensor:
        """What the graph calls nodes that were drawn by their original ids."""
        return original if isinstance(self.graph, Graph) else self.graph.global_ids(original)

    # -- weights -----------------------------------------------------------------------------------------------------

    def presample(self) -> int:
        """Counts nodes and edges of subgraphs, unless that was done; how many subgraphs were counted.

        The first sample does it. A trainer calls it before, where the first batch is not to wait.
        """
        return self.counts()[0]

    def counts(self) -> tuple[int, Tensor, Tensor]:
        """How many subgraphs were counted, and how many of them have each node and each edge, int32 by id."""
        with self._counted:
            if self._counts is None:
                where = self.graph.device if isinstance(self.graph, Graph) else torch.device("cpu")  # as the structure
                nodes = torch.zeros(self._num_nodes, dtype=torch.int32, device=where)
                edges = torch.zeros(self.graph.num_edges(), dtype=torch.int32, device=where)
                number, seen = 0, 0
                while seen < self._coverage * self._num_nodes:
                    sample = self._induce(self._once(self._draw(stream_key(self._seed, _PRESAMPLING, number))))
                    chosen = sample.node[self._node_type].to(where)
                    nodes[chosen] += 1  # each is there once
                    edges[sample.edge[self._edge_type].to(where)] += 1
                    number, seen = number + 1, seen + max(1, chosen.numel())
                if where.type == "cuda":
                    torch.cuda.synchronize(where)  # samples may be made on any stream
                self._counts = number, nodes, edges
            return self._counts

    def _weights(self, sample: Sample) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        """edge_weight C(v) / C(u, v) and node_weight num_presamples / C(v); what was never counted counts once."""
        number, nodes, edges = self.counts()
        of_node = nodes[sample.node[self._node_type].to(nodes.device)].clamp_(min=1).double()
        of_edge = edges[sample.edge[self._edge_type].to(nodes.device)].clamp_(min=1).double()
        edge_weight = (of_node[sample.col[self._edge_type].to(nodes.device)] / of_edge).float()
        node_weight = (number / of_node).float()
        return (
            {self._edge_type: to_device(edge_weight, self.device)},
            {self._node_type: to_device(node_weight, self.device)},
        )


class SaintNodeSampler(SaintSampler):
    """Subgraphs of `size` draws of nodes in proportion to in-degrees.

    On parts every process keeps 8 bytes per node, the sums of in-degrees in the order of original ids.
    """

    def __init__(self, graph: AnyGraph, size: int, **options: Any) -> None:
        super().__init__(graph, size, **options)
        ends = graph.csc().indptr[1:] if isinstance(graph, Graph) else self._sum_degrees()
        self._ends, self._num_draws = to_device(ends.contiguous(), self.device), graph.num_edges()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # samples may be made on any stream

    def _sum_degrees(self) -> Tensor:
        assert not isinstance(self.graph, Graph)
        ends = torch.empty(self._num_nodes, dtype=torch.int64, device="cpu")
        for first in range(0, self._num_nodes, _PIECE):
            ids = torch.arange(first, min(first + _PIECE, self._num_nodes), device="cpu")
            ends[ids] = self.graph.in_degrees(self.graph.global_ids(ids))
        return torch.cumsum(ends, 0, out=ends)

    def _draw(self, key: int) -> Tensor:
        numbers = torch.arange(self.size, device=self.device)
        edges = draw_below(numbers, self._num_draws, key=stream_key(key, _ROOTS))
        return self._ids(torch.searchsorted(self._ends, edges, right=True))


class SaintEdgeSampler(SaintSampler):
    """Subgraphs of `size` draws of edges: of a uniform node a uniform in-edge. Nodes without in-edges give none."""

    def _draw(self, key: int) -> Tensor:
        nodes = self._uniform(key)
        seeds = nodes.to(self._hoods.id_dtypes[self._node_type])
        tree = torch.arange(self.size, device=self.device)
        (found,) = self._hoods.sample([HopRequest(self._edge_type, seeds, 1, stream_key(key, _STEPS), tree=tree)])
        ends = nodes[found.indptr.diff() > 0]
        return torch.stack([ends.long(), found.ids.long()], dim=1).view(-1)


class SaintWalkSampler(SaintSampler):
    """Subgraphs of `size` random walks of `length` steps along in-edges, from uniform roots."""

    def __init__(self, graph: AnyGraph, size: int, length: int, **options: Any) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.length = length
        super().__init__(graph, size, **options)

    def options(self) -> dict[str, Any]:
        return super().options() | {"length": self.length}

    def _draw(self, key: int) -> Tensor:
        walks = walk(self._hoods, self._edge_type, self._uniform(key), self.length, stream_key(key, _STEPS)).view(-1)
        return walks[walks >= 0]
