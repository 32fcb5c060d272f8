"""Operations that slow each other down although each has a resource of its own.

Sums of the host and a copy read the same memory. By how much is measured in pairs (`MachineProfile.slow_down`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gnnsys.planning.scheduling.operations import PlanGraph
from gnnsys.planning.scheduling.simulate import steady_seconds

SlowDown = Callable[[str, str], float]
"""By how much one operator takes longer while another runs: 1 where it does not."""


def slowed(graphs: Sequence[PlanGraph], slow_down: SlowDown) -> list[PlanGraph]:
    """The same batches, over and over, with the seconds that operations take beside those on other resources.

    An operator that runs for a share of the time slows the others down for that share. Nothing gets faster.
    """
    every = [one for graph in graphs for one in graph.operations]
    round_seconds = steady_seconds(graphs) * len(graphs)
    if round_seconds == 0:
        return list(graphs)
    shares: dict[tuple[str, str], float] = {}
    for one in every:
        key = (one.operator, one.resource)
        shares[key] = shares.get(key, 0.0) + one.seconds / round_seconds

    def factor(operator: str, resource: str) -> float:
        more = (
            share * max(0.0, slow_down(operator, other) - 1)
            for (other, where), share in shares.items()
            if where != resource
        )
        return 1 + sum(more)

    factors = {key: factor(*key) for key in shares}
    return [
        PlanGraph(replace(one, seconds=one.seconds * factors[one.operator, one.resource]) for one in graph.operations)
        for graph in graphs
    ]
