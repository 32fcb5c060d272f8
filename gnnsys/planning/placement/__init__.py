"""Where parts, trainers and samplers go (DGTP, §V): a first placement (IFS), a search (ETP), and the file of a plan."""

from gnnsys.planning.placement.balanced_placement import balanced_placements, placement_floor
from gnnsys.planning.placement.baselines import (
    BASELINES,
    all_placements,
    distdgl_placement,
    even_placement,
    exhaustive,
    random_placement,
)
from gnnsys.planning.placement.explore import Exploration, ExploreSettings, SimulatedPlacement, explore
from gnnsys.planning.placement.first_placement import NoPlacement, first_placement
from gnnsys.planning.placement.launch_plan import (
    LaunchPlan,
    PlannedHost,
    manifest_digest,
    parse_launch_plan,
    read_launch_plan,
)
from gnnsys.planning.placement.place_job import JobPlacer, PlaceOptions, place_job, simulate_plan
from gnnsys.planning.placement.plan_file import (
    PlacedHost,
    PlacedSampler,
    PlacementForecast,
    PlacementPlan,
    RunnerUp,
    is_placement_plan,
)
from gnnsys.planning.placement.problem import CostBounds, PlacementProblem
from gnnsys.planning.placement.queued_run import link_use, steady_iteration
from gnnsys.planning.placement.resources import Resources, TaskCounts
from gnnsys.planning.placement.search_placements import ANNEALED, TRIES, search_placements

__all__ = [
    "ANNEALED",
    "BASELINES",
    "TRIES",
    "CostBounds",
    "Exploration",
    "ExploreSettings",
    "JobPlacer",
    "LaunchPlan",
    "NoPlacement",
    "PlaceOptions",
    "PlacedHost",
    "PlacedSampler",
    "PlacementForecast",
    "PlacementPlan",
    "PlacementProblem",
    "PlannedHost",
    "Resources",
    "RunnerUp",
    "SimulatedPlacement",
    "TaskCounts",
    "all_placements",
    "balanced_placements",
    "distdgl_placement",
    "even_placement",
    "exhaustive",
    "explore",
    "first_placement",
    "is_placement_plan",
    "link_use",
    "manifest_digest",
    "parse_launch_plan",
    "place_job",
    "placement_floor",
    "random_placement",
    "read_launch_plan",
    "search_placements",
    "simulate_plan",
    "steady_iteration",
]
