"""`python -m gnnsys.planning.costs`: prints what operators cost on this machine, and measures it where nobody has."""

from __future__ import annotations

import argparse
import sys

import torch

from gnnsys.planning.costs.profile import MachineProfile
from gnnsys.planning.costs.profile_cache import machine_profile

_ROWS, _EDGES, _WIDTH = 100_000, 1_000_000, 256
_BUSY = 0.15  # mean error of points that were left out, above which a profile is of little use


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gnnsys.planning.costs", description=__doc__)
    parser.add_argument("--device", help="also measure this GPU, such as cuda:0")
    parser.add_argument("--threads", type=int, help="of host operators (all cores)")
    parser.add_argument("--again", action="store_true", help="measure now, and keep this instead")
    parser.add_argument("--budget", type=float, default=20.0, metavar="S", help="seconds to measure for, at most (20)")
    parser.add_argument("--out", metavar="FILE", help="also write the profile to FILE, as JSON")
    args = parser.parse_args(arguments)
    device = None if args.device is None else torch.device(args.device)
    profile = machine_profile(device, args.threads, budget_seconds=args.budget, again=args.again)
    print(profile.report())
    if profile.error > _BUSY:
        print(f"  errors of {profile.error:.0%}: the machine was busy. Measure --again when it is not")
    for place, macs in macs_per_gather(profile).items():
        print(f"  multiply-adds in the time in which spmm moves one element, {place}: {macs:.1f}")
    print(f"  measured in {profile.seconds_taken:.1f} s")
    if args.out is not None:
        profile.save(args.out)
    return 0


def macs_per_gather(profile: MachineProfile) -> dict[str, float]:
    """What `MACS_PER_GATHER` of `gnnsys/nn/order.py` would be on this machine, at sizes of a batch's inner layer.

    Layers do not ask for it: their order must be the same on all ranks and in all runs, and a measurement is not.
    """
    found = {}
    for place in ("host", "device"):
        if f"spmm/{place}" in profile.costs.operators:
            moved = profile.seconds(f"spmm/{place}", edges=_EDGES, destinations=_ROWS, width=_WIDTH, sources=_ROWS)
            made = profile.seconds(f"product/{place}", rows=_ROWS, inner=_WIDTH, width=_WIDTH)
            found[place] = (moved / (_EDGES * _WIDTH)) / (made / (_ROWS * _WIDTH * _WIDTH))
    return found


if __name__ == "__main__":
    sys.exit(main())
