"""A process that holds all of a device but so many bytes, until its input ends: `device_watch.py` starts it."""

from __future__ import annotations

import sys

import torch

from gnnsys.bench.child_process import answer, wait_for_end

_LEAVE = 64 << 20  # of a device that is full to the brim no context can be made


def main() -> None:
    wanted = int(sys.argv[1])
    free, _ = torch.cuda.mem_get_info("cuda")
    held = max(free - wanted, 0)
    ballast = torch.empty(held, dtype=torch.uint8, device="cuda") if held > _LEAVE else None
    answer({"held": 0 if ballast is None else held})
    wait_for_end()


if __name__ == "__main__":
    main()
