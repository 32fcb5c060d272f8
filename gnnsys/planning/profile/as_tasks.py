"""From a job profile to what the simulator runs: the tasks of a job, and what each of them has to do and to send.

A trainer samples and fetches for itself, or has samplers elsewhere. A part serves each of them by itself, on the cores
of its machine. What a byte costs in encryption and sockets is work of both ends, and nothing where it stays on a
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gnnsys.planning.profile.share_profile import Amounts, ShareProfile
from gnnsys.planning.simulation import CountedAmount, Demands, TrainingTasks
from gnnsys.planning.simulation.tasks import SYNCS

if TYPE_CHECKING:
    from gnnsys.planning.profile.job_profile import JobProfile

HEADER_BYTES = 200  # of a message: its packets' headers, framing and seal
HEADER_SHARE = 0.0025  # of what is sent: headers of packets; between namespaces 0.1 to 0.4% (docs/cluster_figures.md)
ACK_SHARE = 0.0015  # of what comes the other way: 0.1 to 0.2%
_COLD = 8  # batches whose rows are asked for while nothing is kept yet: left out where there are enough others


def bytes_on_wire(sent: Any, *, back: Any, messages: Any) -> Any:
    """What a link carries of so many bytes in so many messages, while `back` bytes come the other way; arrays too."""
    return sent + HEADER_SHARE * sent + ACK_SHARE * back + HEADER_BYTES * messages


def as_tasks(
    profile: JobProfile,
    trainers: int,
    *,
    iterations: int = 20,
    samplers_per_trainer: int = 0,
    sync: str = "ring-whole",
    servers: int = 1,
    placement: tuple[Sequence[int], Sequence[int]] | None = None,
    shares: Sequence[int] | None = None,
    step_delays: Sequence[float] | None = None,
    late: Sequence[float] | None = None,
) -> tuple[TrainingTasks, Demands]:
    """See `JobProfile.as_tasks`."""
    if samplers_per_trainer < 0:
        raise ValueError(f"samplers_per_trainer must be at least 0, got {samplers_per_trainer}")
    if sync not in SYNCS:
        raise ValueError(f"sync is one of {', '.join(SYNCS)}, got {sync!r}")
    if trainers == 1 and sync != "ps":
        sync = "none"
    per_trainer, is_sparse = max(1, samplers_per_trainer), bool(profile.gradients.sparse)
    tasks = TrainingTasks.of_job(
        profile.num_parts,
        trainers,
        per_trainer,
        sync=sync,
        servers=servers,
        ahead=max(1, profile.ahead),
        own_samplers=samplers_per_trainer == 0,
        serve_each=True,
        sparse=is_sparse,
        requests=True,
    )
    numbers = list(range(trainers)) if shares is None else list(shares)
    if sorted(numbers) != list(range(trainers)):
        raise ValueError(f"shares must be 0 to {trainers - 1} in some order, got {numbers}")
    lateness = [0.0] * trainers if late is None else late
    seen = [
        _seen_from(profile.share(number, trainers), worker, placement, lateness[worker])
        for worker, number in enumerate(numbers)
    ]
    work = _Work(profile, seen, iterations, per_trainer)
    volume: dict[str, Any] = {
        "graph": work.wire_bytes("bytes_in", "bytes_out"), "request": work.wire_bytes("bytes_out", "bytes_in"),
        **_gradients(profile, trainers, sync, servers),
    }  # fmt: skip
    if samplers_per_trainer:
        volume["batch"] = work.by_sampler("batch_bytes")
    elsewhere = samplers_per_trainer > 0
    seconds: dict[str, Any] = {
        "serving": work.serving(), "sampler": work.sampling(sends=elsewhere),
        "worker": work.computing(receives=elsewhere),
    }  # fmt: skip
    threads = {"worker": 1.0 if profile.computes_on == "cpu" else 0.0}
    if step_delays is not None and sync in ("ring", "ring-whole"):
        seconds["ring"] = _ring_delays(np.asarray(step_delays, dtype=np.float64), sync)
        threads["ring"] = 0.0  # waited, not worked
    return tasks, Demands.of(tasks, iterations, seconds=seconds, volume=volume, threads=threads)


def _ring_delays(delays: Amounts, sync: str) -> Amounts:
    """[steps, trainers] from what a message waits on its way to each trainer. A trainer is ready for the message of a
    step when it has that of the step before, so the slowest way is waited for in every step."""
    trainers = len(delays)
    if sync == "ring":
        return np.broadcast_to(delays, (2 * trainers - 2, trainers))
    return np.full((1, trainers), (2 * trainers - 2) * delays.max())


def _seen_from(
    share: ShareProfile, number: int, placement: tuple[Sequence[int], Sequence[int]] | None, late: float
) -> ShareProfile:
    """Flows of a share where it is known who is where: those of parts beside the trainer do not cross a link."""
    if placement is None:
        return share
    machine_of_part, machine_of_trainer = placement
    local = [part for part, m in enumerate(machine_of_part) if m == machine_of_trainer[number]]
    return share.seen_from(local, late)


class _Work:
    """Amounts of all trainers, for so many iterations."""

    def __init__(self, profile: JobProfile, shares: Sequence[ShareProfile], iterations: int, per_trainer: int) -> None:
        self._shares, self._iterations, self._per_trainer = shares, iterations, per_trainer
        self._byte = profile.byte_work.total

    def _rows(self, share: ShareProfile, amounts: Amounts) -> Amounts:
        """[iterations, ...]: those of batches in turn, without the first ones where there are enough."""
        cold = min(_COLD, share.num_batches // 4)
        at = cold + np.arange(self._iterations) % (share.num_batches - cold)
        return amounts[at]

    def computing(self, *, receives: bool) -> CountedAmount:
        """[iterations, trainers], with the work of receiving a batch where another process has made it."""
        byte = self._byte if receives else 0.0
        found = [self._rows(share, share.computing + byte * share.batch_bytes) for share in self._shares]
        return CountedAmount(np.stack(found, axis=1))

    def by_sampler(self, name: str) -> CountedAmount:
        """[iterations, samplers]: each makes its part of every batch."""
        found = np.stack([self._rows(share, getattr(share, name)) for share in self._shares], axis=1)
        return CountedAmount(np.repeat(found / self._per_trainer, self._per_trainer, axis=1))

    def wire_bytes(self, name: str, other_way: str) -> CountedAmount:
        """[iterations, parts, samplers]: with headers of packets, where anything is sent at all."""
        amounts = []
        for share in self._shares:
            sent, back = getattr(share, name), getattr(share, other_way)
            amounts.append(bytes_on_wire(sent, back=back, messages=share.requests * (sent > 0)))
        return CountedAmount(self._by_part(amounts))

    def serving(self) -> CountedAmount:
        amounts = [share.serving + self._byte * (share.bytes_in + share.bytes_out) for share in self._shares]
        return CountedAmount(self._by_part(amounts))

    def sampling(self, *, sends: bool) -> CountedAmount:
        """[iterations, samplers], with the work of sending the batch where it is for another process."""
        found = []
        for share in self._shares:
            carried = self._byte * ((share.bytes_in + share.bytes_out).sum(1) + (share.batch_bytes if sends else 0.0))
            found.append(self._rows(share, share.sampling + share.fetching + carried))
        return CountedAmount(np.repeat(np.stack(found, axis=1) / self._per_trainer, self._per_trainer, axis=1))

    def _by_part(self, amounts: Sequence[Amounts]) -> Amounts:
        """[iterations, parts, samplers]"""
        found = [self._rows(share, each) for share, each in zip(self._shares, amounts, strict=True)]
        return np.repeat(np.stack(found, axis=2) / self._per_trainer, self._per_trainer, axis=2)


def _gradients(profile: JobProfile, trainers: int, sync: str, servers: int) -> dict[str, Any]:
    """Bytes of gradients by kind of edge. A ring's steps send a chunk each; in one step, all of them."""
    dense, sparse = profile.gradients.dense, profile.gradients.sparse
    volume: dict[str, Any] = {}
    if sync == "ps":
        volume |= {"gradient": dense / servers, "parameter": dense / servers}
    elif sync == "ring" and trainers > 1:
        volume["chunk"] = dense / trainers
    elif sync == "ring-whole" and trainers > 1:
        volume["chunk"] = dense * (2 * trainers - 2) / trainers
    if sparse:
        volume["push"] = np.broadcast_to(np.asarray(sparse), (trainers, profile.num_parts))
        volume["pull"] = np.broadcast_to(np.asarray(profile.gradients.pulled)[:, None], (profile.num_parts, trainers))
    return volume
