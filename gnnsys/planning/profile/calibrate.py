"""What one run shows of a profile: how much core time hosts take beside what was timed, and how long queues are.

Pure functions of figures that a harness or an operator has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnsys.planning.profile.share_profile import Amounts


def fit_work(
    used: Sequence[float] | Amounts, said: Sequence[float] | Amounts, steps: Sequence[float] | Amounts
) -> tuple[float, float]:
    """(work, step) such that used = work * said + step * steps for every host, least squares and neither negative.

    `used` and `said`: core-seconds of each host, measured and by the profile. `steps`: of its trainers together. What a
    step costs beside the model and the batch (all-reduce, Python) is in no timing of parts.

    >>> fit_work([1.2, 0.7], [2.0, 1.0], [20, 10])
    (0.5, 0.01...)
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


def queue_delays(machine_of_worker: Sequence[int], use_in: Sequence[float] | Amounts, queue: float) -> list[float]:
    """Seconds that a small message waits on its way to each worker from the one before it in the ring.

    A link that is in use for the share `use_in` of the time has a queue in front of its receiver, where a packet waits
    `queue` seconds if it is always in use. A sender's own queue is short: Linux lets a connection have few packets in
    it. Nothing waits inside a machine.

    >>> queue_delays([0, 0, 1], [0.5, 1.0], 0.01)
    [0.005, 0.0, 0.01]
    """
    delays = []
    for number, machine in enumerate(machine_of_worker):
        before = machine_of_worker[number - 1]
        delays.append(0.0 if before == machine else queue * float(use_in[machine]))
    return delays
