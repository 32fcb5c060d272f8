"""`gnnsys plan PARTS --cluster FILE ...`: where parts, trainers and samplers go on a cluster, and `gnnsys simulate`."""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.planning import Cluster, JobProfile, PlacedHost, PlacementPlan

MOST_SIMULATED = 200  # placements of each walk
# Options of `gnnsys plan` that are about one machine.
_OF_A_MACHINE = ("sizes", "memory", "machine", "fanouts")
# Options that need --cluster, with what they are where they are not given.
_OF_A_CLUSTER: dict[str, Any] = {
    "profile": None, "trainers": None, "out": None, "samplers": "auto", "keep_parts": False, "policy": "maxmin",
    "cost": "bound", "steps": 50_000, "seed": 0, "set": [],
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is about a cluster to `gnnsys plan`."""
    group = parser.add_argument_group(
        "a cluster", "where parts and trainers of a job go: PARTS in the place of DATASET"
    )
    group.add_argument("--cluster", metavar="FILE", help="hosts by name with cores, GPUs and rates, as YAML or JSON")
    group.add_argument("--profile", metavar="FILE", help="of the job, as gnnsys profile writes it")
    group.add_argument("--trainers", type=int, metavar="N", help="how many there are on all hosts together")
    group.add_argument("--out", metavar="FILE", help="write the plan, for gnnsys simulate and gnnsys launch --plan")
    group.add_argument(
        "--samplers",
        default="auto",
        metavar="N",
        help="processes that sample for each trainer, on any host; 0: none, auto: what is faster",
    )
    group.add_argument("--keep-parts", action="store_true", help="parts stay where a run without a plan has them")
    group.add_argument(
        "--policy", default="maxmin", help="how flows share links (default: %(default)s, as TCP nearly does)"
    )
    group.add_argument(
        "--cost", default="bound", help="what guides the search: bound, path or load (default: %(default)s)"
    )
    group.add_argument("--steps", type=int, metavar="N", default=50_000, help="of the search (default: %(default)s)")
    group.add_argument("--seed", type=int, metavar="N", default=0, help="of the search (default: %(default)s)")
    add_set_argument(group)


def add_set_argument(parser: Any) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="HOST.KEY=VALUE",
        help="as if the cluster file said so: h3.rate=10gbit, all.cores=8; again for another",
    )  # fmt: skip


def check_without_cluster(args: argparse.Namespace) -> None:
    """ValueError for an option of a cluster where there is none."""
    for name, default in _OF_A_CLUSTER.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} needs --cluster FILE, the hosts that it is about")


def run_plan(args: argparse.Namespace) -> int:
    """`gnnsys plan PARTS --cluster FILE --profile FILE --trainers N`."""
    from gnnsys.cli.progress import Progress

    for name in _OF_A_MACHINE:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is about one machine: it has no meaning with --cluster")
    for name, example in (("source", "PARTS"), ("profile", "--profile job.json"), ("trainers", "--trainers 6")):
        if getattr(args, name) is None:
            raise ValueError(
                f"a plan for a cluster needs {example}: gnnsys plan PARTS --cluster FILE --profile FILE ..."
            )
    if args.out is not None and not Path(args.out).absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: the folder {Path(args.out).parent} does not exist")
    _check_files(cluster=args.cluster, profile=args.profile)
    digest = manifest_digest(args.source)
    from gnnsys.planning import Cluster, ExploreSettings, JobProfile, PlaceOptions, place_job  # and torch: seconds

    cluster = Cluster.from_file(args.cluster).with_settings(args.set)
    profile = JobProfile.from_file(args.profile)
    profile.check_parts(digest, args.source)
    options = PlaceOptions(
        samplers=_samplers(args.samplers),
        move_parts=not args.keep_parts,
        policy=args.policy,
        search=ExploreSettings(cost=args.cost, steps=args.steps, seed=args.seed, most_simulated=MOST_SIMULATED),
    )
    with Progress.reported("plan") as progress:
        plan = place_job(
            cluster, profile, args.trainers, options, profile_path=_beside(args.profile, args.out), progress=progress
        )
    if args.json != "-":
        for line in report(plan, cluster, profile):
            print(line)
    if args.out is not None:
        plan.save(args.out)
        if args.json != "-":
            print(f"written: {args.out}; gnnsys simulate {args.out} asks what would be if")
    if args.json is not None:
        told = json.dumps(plan.to_json(), indent=1)
        print(told) if args.json == "-" else Path(args.json).write_text(told + "\n", encoding="utf-8")
    return 0


def run_simulate(args: argparse.Namespace) -> int:
    """`gnnsys simulate PLAN`."""
    for option, file in (("--trace", args.trace), ("--json", args.json)):
        if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{option} {file}: the folder {Path(file).parent} does not exist")
    _check_files(plan=args.plan, cluster=args.cluster, profile=args.profile)
    from gnnsys.planning import Cluster, JobProfile, PlacementPlan, simulate_plan  # and torch: seconds

    plan = PlacementPlan.from_file(args.plan)
    given = Cluster.from_json(plan.cluster) if args.cluster is None else Cluster.from_file(args.cluster)
    cluster = given.with_settings(args.set)
    path = args.profile or str(Path(args.plan).parent / plan.profile_path)
    profile = JobProfile.from_file(path)
    if profile.digest != plan.profile_digest:
        if args.profile is None:
            raise ValueError(f"{path} is another profile than that of the plan: name one with --profile FILE")
        profile.check_parts(plan.parts_digest, args.plan)
    placer, simulated = simulate_plan(plan, cluster, profile, trainers=args.trainers, policy=args.policy)
    forecast = placer.forecast(simulated)
    hosts = placer.hosts_of(simulated.placement)
    if args.json != "-":
        before = plan.forecast.seconds_per_epoch
        ratio = f", {forecast.seconds_per_epoch / before:.2f} times the plan's {_seconds(before)}" if before else ""
        print(f"{_seconds(forecast.seconds_per_epoch)} per epoch{ratio}")
        print(f"what binds: {forecast.binds}")
        for line in (*_bounds(forecast.bounds), *host_table(hosts)):
            print(line)
        if plan.forecast.settings.get("samplers_per_trainer") and args.trainers not in (None, plan.num_trainers):
            print("note: the plan has sampler processes; with another number of trainers they sample for themselves")
        for line in placer.overfull(simulated.placement):
            print(f"note: {line}")
    if args.trace is not None:
        Path(args.trace).write_text(json.dumps(simulated.timeline()), encoding="utf-8")
        if args.json != "-":
            print(f"written: {args.trace}, which https://ui.perfetto.dev opens")
    if args.json is not None:
        from dataclasses import replace

        told = json.dumps(replace(plan, hosts=hosts, forecast=forecast, cluster=cluster.to_json()).to_json(), indent=1)
        print(told) if args.json == "-" else Path(args.json).write_text(told + "\n", encoding="utf-8")
    return 0


def _check_files(*, plan: str | None = None, cluster: str | None = None, profile: str | None = None) -> None:
    """ValueError for one that is not there, before torch is imported."""
    for path, what, how in (
        (plan, "plan", "make one with gnnsys plan PARTS --cluster FILE --profile FILE --out {}"),
        (cluster, "cluster file", "write one with the hosts' names, cores and rates (docs/profile.md)"),
        (profile, "profile", "make one with `gnnsys profile PARTS --out {}`"),
    ):
        if path is not None and not Path(path).exists():
            raise ValueError(f"there is no {what} {path}: {how.format(path)}")


def manifest_digest(parts: str) -> int:
    """The CRC-32 of the manifest of a directory of parts."""
    file = Path(parts) / "manifest.json"
    try:
        return zlib.crc32(file.read_bytes())
    except OSError:
        raise ValueError(
            f"{parts} has no manifest.json: make parts with gnnsys partition SOURCE --out {parts}"
        ) from None


def report(plan: PlacementPlan, cluster: Cluster, profile: JobProfile) -> Iterator[str]:
    """A plan for people."""
    from gnnsys.graph import in_words

    told = plan.forecast.settings
    samplers = told["samplers_per_trainer"]
    yield (
        f"job      {plan.num_trainers} trainers, {profile.num_parts} parts, {told['batches_per_epoch']:,} batch"
        f"{'es' if told['batches_per_epoch'] > 1 else ''} of "
        f"{profile.batch_size:,} seeds per trainer and epoch"
    )
    yield f"cluster  {len(cluster)} hosts: {', '.join(cluster.names[:8])}{' ...' if len(cluster) > 8 else ''}"
    yield (f"plan     {_seconds(plan.forecast.seconds_per_epoch)} per epoch; {_who_samples(samplers)}")
    yield f"binds    {plan.forecast.binds}"
    yield from _bounds(plan.forecast.bounds)
    yield from host_table(plan.hosts)
    if unnamed := cluster.gpus_without_speed(profile.computes_on):
        yield (
            f"note: nobody says how fast a GPU of kind {in_words(unnamed)} is: it counts as fast as the profile's, "
            f"{profile.computes_on}; --set gpu.{unnamed[0]}=0.5, or gpu_speeds in the cluster file"
        )
    if plan.runners_up:
        yield "runners-up"
    for other in plan.runners_up:
        ratio = other.seconds_per_epoch / plan.forecast.seconds_per_epoch if plan.forecast.seconds_per_epoch else 1.0
        placed = trainers_and_parts(other.hosts, plan.hosts)
        yield f"  {_seconds(other.seconds_per_epoch)} ({ratio:.2f}x)  {other.name}: {placed}"


def _who_samples(samplers: int) -> str:
    if not samplers:
        return "trainers sample for themselves"
    return f"each trainer has {samplers} sampler process{'es' if samplers > 1 else ''}"


def host_table(hosts: Sequence[PlacedHost]) -> Iterator[str]:
    width = max(4, *(len(host.name) for host in hosts))
    yield f"{'host':<{width}}  trainers  parts; samplers"
    for host in hosts:
        parts = " ".join(map(str, host.parts)) or "-"
        samplers = ", ".join(f"{each.host}/{each.trainer}" for each in host.samplers)
        yield f"{host.name:<{width}}  {host.num_trainers:8d}  {parts}{f'; for {samplers}' if samplers else ''}"


def trainers_and_parts(hosts: Sequence[PlacedHost], chosen: Sequence[PlacedHost]) -> str:
    """The trainers of each host, and its parts where the chosen placement has the same trainers."""

    def trainers(placed: Sequence[PlacedHost]) -> dict[str, int]:
        return {host.name: host.num_trainers for host in placed if host.num_trainers}

    if trainers(hosts) != trainers(chosen):
        return ", ".join(f"{name} {count}" for name, count in trainers(hosts).items())
    told = [f"{host.name} {host.num_trainers}, parts {' '.join(map(str, host.parts)) or '-'}" for host in hosts]
    return "; ".join(told)


def _bounds(bounds: Any) -> Iterator[str]:
    told = [f"{name} {_seconds(seconds)}" for name, seconds in bounds.items() if seconds > 0]
    if told:
        yield f"at least {'; '.join(told)}"


def _seconds(value: float) -> str:
    return f"{value:.4g} s"


def _samplers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit():
        raise ValueError(f"--samplers must be auto or a whole number, got {text!r}")
    return int(text)


def _beside(profile: str, out: str | None) -> str:
    """The path of the profile from the folder of the plan, where it is below it."""
    if out is None:
        return profile
    import os

    return os.path.relpath(profile, Path(out).absolute().parent)
