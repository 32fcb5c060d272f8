"""Planning: what runs where, from what this machine can do and what was measured. `execution` plans one process,
`costs` says what operators cost, `simulation` says how long a job takes on a cluster."""

from gnnsys.planning import costs
from gnnsys.planning.cluster.cluster import Cluster, ClusterHost, ClusterUplink
from gnnsys.planning.cluster.machines_of import machines_of
from gnnsys.planning.costs import (
    CostContext,
    CostModel,
    CostProbe,
    CubicCost,
    DeviceProbes,
    HostProbes,
    MachineProfile,
    Observation,
    OperatorCost,
    ProbeTimer,
    ProfiledMachine,
    TransferCost,
    compute_threads,
    machine_profile,
    profile_machine,
    random_block,
    sampling_threads,
    time_probes,
)
from gnnsys.planning.execution.choose_rules import GraphBytes, choose_for_batches, choose_for_epochs
from gnnsys.planning.execution.comparison import PlanComparison, PlanEstimate, compare_batches
from gnnsys.planning.execution.compute_threads import ComputeThreads
from gnnsys.planning.execution.drift import Drift, DriftWatch
from gnnsys.planning.execution.expected_sizes import expected_sizes
from gnnsys.planning.execution.model_shape import KINDS, LayerSize, ModelShape
from gnnsys.planning.execution.plan import ExecutionPlan
from gnnsys.planning.execution.propose import (
    BatchLoad,
    Memory,
    SampleLoad,
    SumLoad,
    is_given,
    propose_places,
    propose_splits,
    spread,
)
from gnnsys.planning.execution.rates import Rates, measure_rates
from gnnsys.planning.execution.rules import BatchRule, BatchSizes, plan_batch
from gnnsys.planning.execution.trial import WayTrial
from gnnsys.planning.execution.turn_clock import TurnClock
from gnnsys.planning.execution.way import CACHED, DEVICE, GIVEN, PINNED, Way
from gnnsys.planning.profile.job_profile import ByteWork, JobGradients, JobProfile
from gnnsys.planning.profile.share_profile import FLOWS, HOME_SHARE, WORK, ShareProfile, mix
from gnnsys.planning.profile.step_cost import step_seconds
from gnnsys.planning.scheduling.grouping import GroupedPlan, plan_groups
from gnnsys.planning.scheduling.operations import Operation, OperatorCosts, PlanGraph
from gnnsys.planning.scheduling.sampling_turns import (
    SamplingForecast,
    SamplingTurns,
    assign_longest_first,
    assign_nearly_best,
)
from gnnsys.planning.scheduling.shares import RuleShares, bound, round_shares
from gnnsys.planning.scheduling.simulate import (
    BatchSchedule,
    best_schedule,
    least_seconds,
    list_schedule,
    steady_seconds,
)
from gnnsys.planning.scheduling.turn_groups import (
    CacheRefill,
    SamplingStage,
    TurnGroup,
    predict_groups,
    without_sampling,
)
from gnnsys.planning.simulation import (
    POLICIES,
    ClusterMachines,
    CountedAmount,
    Demands,
    DrawnAmount,
    RunBinding,
    RunBounds,
    SimulatedRun,
    TrainingTasks,
    run_bounds,
    simulate,
)

__all__ = [
    "CACHED",
    "DEVICE",
    "FLOWS",
    "GIVEN",
    "HOME_SHARE",
    "KINDS",
    "PINNED",
    "POLICIES",
    "WORK",
    "BatchLoad",
    "BatchRule",
    "BatchSchedule",
    "BatchSizes",
    "ByteWork",
    "CacheRefill",
    "Cluster",
    "ClusterHost",
    "ClusterMachines",
    "ClusterUplink",
    "ComputeThreads",
    "CostContext",
    "CostModel",
    "CostProbe",
    "CountedAmount",
    "CubicCost",
    "Demands",
    "DeviceProbes",
    "DrawnAmount",
    "Drift",
    "DriftWatch",
    "ExecutionPlan",
    "GraphBytes",
    "GroupedPlan",
    "HostProbes",
    "JobGradients",
    "JobProfile",
    "LayerSize",
    "MachineProfile",
    "Memory",
    "ModelShape",
    "Observation",
    "Operation",
    "OperatorCost",
    "OperatorCosts",
    "PlanComparison",
    "PlanEstimate",
    "PlanGraph",
    "ProbeTimer",
    "ProfiledMachine",
    "Rates",
    "RuleShares",
    "RunBinding",
    "RunBounds",
    "SampleLoad",
    "SamplingForecast",
    "SamplingStage",
    "SamplingTurns",
    "ShareProfile",
    "SimulatedRun",
    "SumLoad",
    "TrainingTasks",
    "TransferCost",
    "TurnClock",
    "TurnGroup",
    "Way",
    "WayTrial",
    "assign_longest_first",
    "assign_nearly_best",
    "best_schedule",
    "bound",
    "choose_for_batches",
    "choose_for_epochs",
    "compare_batches",
    "compute_threads",
    "costs",
    "expected_sizes",
    "is_given",
    "least_seconds",
    "list_schedule",
    "machine_profile",
    "machines_of",
    "measure_rates",
    "mix",
    "plan_batch",
    "plan_groups",
    "predict_groups",
    "profile_machine",
    "propose_places",
    "propose_splits",
    "random_block",
    "round_shares",
    "run_bounds",
    "sampling_threads",
    "simulate",
    "spread",
    "steady_seconds",
    "step_seconds",
    "time_probes",
    "without_sampling",
]
