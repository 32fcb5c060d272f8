"""Where parts, trainers and samplers go (DGTP, §V): a first placement (IFS), a search (ETP), and the file of a plan."""

from gnnsys.planning.placement.launch_plan import (
    LaunchPlan,
    PlannedHost,
    manifest_digest,
    parse_launch_plan,
    read_launch_plan,
)
from gnnsys.planning.placement.plan_file import (
    PlacedHost,
    PlacedSampler,
    PlacementForecast,
    PlacementPlan,
    RunnerUp,
    is_placement_plan,
)

__all__ = [
    "LaunchPlan",
    "PlacedHost",
    "PlacedSampler",
    "PlacementForecast",
    "PlacementPlan",
    "PlannedHost",
    "RunnerUp",
    "is_placement_plan",
    "manifest_digest",
    "parse_launch_plan",
    "read_launch_plan",
]
