"""Count what training on parts asks of machines, before there are any: bytes, core-seconds, gradients.

The profile is what `gnnsys plan --cluster` and `gnnsys simulate` predict an epoch from. With --trace it is made of what
a run has recorded (`loader.save_trace`), instead of in this process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gnnsys.planning import JobProfile, MachineProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", metavar="DIR", type=Path, help="what `gnnsys partition` wrote")
    parser.add_argument(
        "--fanouts", metavar="N,N,...", default="15,10,5", help="neighbours per hop (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", default=1024, help="seeds of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        choices=("sage", "gcn", "gat", "gin", "rgcn"),
        default="sage",
        help="default: %(default)s; of typed parts sage, gat or rgcn",
    )
    parser.add_argument(
        "--hidden", type=int, metavar="N", default=256, help="width of its hidden layers (default: %(default)s)"
    )
    parser.add_argument("--seeds", metavar="MASK", default="train", help="what is trained on (default: %(default)s)")
    parser.add_argument(
        "--batches", type=int, metavar="N", default=50, help="that are looked at, of each share (default: %(default)s)"
    )
    parser.add_argument(
        "--trainers", type=int, metavar="N", help="shares of the seeds that are looked at (default: one per subpart)"
    )
    parser.add_argument(
        "--num-threads", type=int, metavar="N", help="of each trainer's loader (default: what it would choose)"
    )
    parser.add_argument("--machine", metavar="FILE", type=Path, help="a machine's profile: its GPU computes the steps")
    parser.add_argument("--device", help="cuda: the steps are computed by this machine's GPU, by its kept profile")
    parser.add_argument("--plain", action="store_true", help="links are not encrypted (gnnsys.init(encrypt=False))")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, nargs="+", help="what every rank of a run has saved, instead of counting"
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        type=Path,
        help="with --trace: a profile that was used, to say what was wrong in it",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the profile, as JSON")


def run(args: argparse.Namespace) -> int:
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: the folder {args.out.parent} does not exist")
    if not args.parts.exists():
        raise ValueError(f"there is no folder {args.parts}: make parts with gnnsys partition SOURCE --out {args.parts}")
    if args.against is not None and args.trace is None:
        raise ValueError("--against compares a profile with a run: give the run's traces by --trace FILE ...")
    profile = _counted(args) if args.trace is None else _measured(args)
    profile.check_costs()
    profile.save(args.out)
    print(profile.report())
    if args.against is not None:
        from gnnsys.planning import JobProfile, profile_drift

        print(f"beside {args.against}, what is off most first:")
        print("\n".join(f"  {line}" for line in profile_drift(JobProfile.from_file(args.against), profile)))
    print(f"written to {args.out}; predict an epoch with: gnnsys plan {args.parts} --cluster FILE --profile {args.out}")
    return 0


def _counted(args: argparse.Namespace) -> JobProfile:
    from gnnsys.cli.progress import Progress
    from gnnsys.profiling import DryJob, profile_parts

    job = DryJob(
        fanouts=_fanouts(args.fanouts), batch_size=args.batch_size, what=args.seeds, num_threads=args.num_threads
    )
    with Progress.reported("profile") as progress:

        def tell(done: int, total: int) -> None:
            if not done:
                looked = f"{args.batches} batches of each share of the seeds"
                print(f"profile: looks at {looked}, in several ways: makes {total:,} batches", file=sys.stderr)
            progress(done, total, "batches")

        return profile_parts(
            args.parts, job, model=args.model, hidden=args.hidden, trainers=args.trainers, num_batches=args.batches,
            encrypt=not args.plain, machine=_machine(args),
            progress=tell,
        )  # fmt: skip


def _measured(args: argparse.Namespace) -> JobProfile:
    from gnnsys.profiling import profile_of_traces

    return profile_of_traces(args.parts, args.trace)


def _machine(args: argparse.Namespace) -> MachineProfile | None:
    """Whose GPU computes the steps; None: they are timed here, on a core."""
    if args.machine is not None and not args.machine.is_file():
        raise ValueError(f"there is no machine profile {args.machine}: docs/costs.md says how one is measured")
    import torch

    from gnnsys.planning import MachineProfile, machine_profile

    if args.machine is not None:
        found = MachineProfile.load(args.machine)
        if "product/device" not in found.costs.operators:
            raise ValueError(f"--machine {args.machine}: this machine has no GPU")
        return found
    if args.device in (None, "cpu"):
        return None
    if args.device.partition(":")[0] != "cuda":
        raise ValueError(f"--device must be cpu or cuda, got {args.device!r}; another machine's GPU is --machine FILE")
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here: give the profile of a machine that has one by --machine FILE")
    return machine_profile(torch.device(args.device))


def _fanouts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(fanout) for fanout in text.split(","))
    except ValueError:
        raise ValueError(f"--fanouts must be whole numbers with commas, such as 15,10,5, got {text!r}") from None
