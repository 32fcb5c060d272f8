"""Where parts, trainers and samplers go (DGTP, §V): a first placement (IFS), a search (ETP), and the file of a plan."""

from gnnsys.planning.placement.plan_file import (
    PlacedHost,
    PlacedSampler,
    PlacementForecast,
    PlacementPlan,
    RunnerUp,
    is_placement_plan,
)

__all__ = [
    "PlacedHost",
    "PlacedSampler",
    "PlacementForecast",
    "PlacementPlan",
    "RunnerUp",
    "is_placement_plan",
]
