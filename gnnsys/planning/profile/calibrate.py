"""What one run shows of a profile: how much core time hosts take beside what was timed, and how long queues are.

Pure functions of figures that a harness or an operator has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnsys.planning.profile.share_profile import Amounts

QUEUE_POWER = 3.0  # fits backlogs of buckets, read while one placement ran in the lab (docs/cluster_figures.md)


def fit_work(
    used: Sequence[float] | Amounts, said: Sequence[float] | Amounts, steps: Sequence[float] | Amounts
) -> tuple[float, float]:
    """(work, step) such that used = work * said + step * steps for every host, least squares and neither negative.

    `used` and `said`: core-seconds of each host, measured and by the profile. `steps`: of its trainers together. What a
    step costs beside the model and the batch (all-reduce, Python) is in no timing of parts.

    >>> [round(found, 9) for found in fit_work([1.2, 0.7], [2.0, 1.0], [20, 20])]
    [0.5, 0.01]
    """
    measured, predicted, counts = (np.asarray(values, dtype=np.float64) for values in (used, said, steps))
    if not (predicted.sum() > 0 and measured.sum() > 0):
        raise ValueError("core-seconds must be more than 0 on some host")
    ratio = float(measured.sum() / predicted.sum())
    found, *_ = np.linalg.lstsq(np.stack([predicted, counts], axis=1), measured, rcond=None)
    work, step = float(found[0]), float(found[1])
    if step < 0 or not counts.any():
        return ratio, 0.0
    if work <= 0.25 * ratio:  # hosts are too alike to tell one from the other
        work = 0.25 * ratio
        step = max(0.0, float((measured - work * predicted).sum() / counts.sum()))
    return work, step


def queue_delays(
    machine_of_worker: Sequence[int],
    use_in: Sequence[float] | Amounts,
    use_out: Sequence[float] | Amounts,
    queue: Sequence[float] | Amounts,
) -> list[float]:
    """Seconds that a small message of a ring waits on its way to each worker from the one before it.

    `use_in` and `use_out`: the share of the time that links of each machine are in use. A packet waits behind what came
    before it: `queue` seconds where the machine's buffer is full, and `use ** QUEUE_POWER` times as long on average,
    in front of the sender's link and of the receiver's. A step of gloo's ring is a round trip: the receiver first says
    that it is ready. Nothing waits inside a machine.

    >>> queue_delays([0, 0, 1], [0.5, 0.0], [0.0, 1.0], [0.01, 0.02])
    [0.02125, 0.0, 0.02125]
    """
    full = np.asarray(queue, dtype=np.float64)
    waits = full * (np.asarray(use_in) ** QUEUE_POWER + np.asarray(use_out) ** QUEUE_POWER)
    pairs = [(machine_of_worker[number - 1], machine) for number, machine in enumerate(machine_of_worker)]
    return [0.0 if before == machine else float(waits[before] + waits[machine]) for before, machine in pairs]
