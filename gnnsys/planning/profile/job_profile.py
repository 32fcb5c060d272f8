"""A job profile: what a training job asks of whatever machines it will run on. `gnnsys profile` writes it.

It knows nothing of hosts. With a cluster and a placement the simulator makes an epoch's seconds of it (`as_tasks`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnsys.graph import did_you_mean, in_words
from gnnsys.partition import Placement
from gnnsys.planning.profile.share_profile import ShareProfile, mix
from gnnsys.seeds import assign_shares

if TYPE_CHECKING:
    from gnnsys.planning.simulation import Demands, TrainingTasks

FORMAT, VERSION = "gnnsys-job-profile", 2
MEASURED, COUNTED = "run", "dry"


@dataclass(frozen=True, kw_only=True)
class JobGradients:
    """Bytes of gradients that a trainer gives in a step: `dense` are summed over all trainers (all-reduce), `sparse`
    are rows that are pushed to their owners, [num_parts] on average, and `pulled` the trained rows that come back."""

    dense: float = 0.0
    sparse: tuple[float, ...] = ()
    pulled: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ByteWork:
    """Core-seconds that one byte on a link costs at each end: `seal` to encrypt or decrypt it, `carry` for sockets."""

    seal: float = 0.0
    carry: float = 0.0

    @property
    def total(self) -> float:
        return self.seal + self.carry


@dataclass(frozen=True, kw_only=True)
class JobProfile:
    """`shares` are ranges of the seeds, of equal size, in ascending order of ids. `subpart_seeds`: how many seeds each
    subpart has. `part_bytes`: of each part on disk, which is what serving it takes of memory. `ahead`: so many batches
    are under way beside the one that is trained on. `in_flight`: of so many of them rows are on their way when another
    one asks for its own, unless rows come late. `computes_on`: "cpu", or the kind of GPU. `source`: whether it was
    counted without a run, or measured in one. `about`: facts for people."""

    parts_digest: int  # CRC-32 of the manifest
    num_parts: int
    trainers_per_part: int
    subpart_seeds: tuple[int, ...]
    batch_size: int
    shares: tuple[ShareProfile, ...]
    gradients: JobGradients = field(default_factory=JobGradients)
    byte_work: ByteWork = field(default_factory=ByteWork)
    part_bytes: tuple[int, ...] = ()
    ahead: int = 5
    in_flight: int = 1
    computes_on: str = "cpu"
    source: str = COUNTED
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shares:
            raise ValueError("a profile needs at least one share of the seeds")
        if self.num_parts < 1 or any(share.num_parts != self.num_parts for share in self.shares):
            raise ValueError(f"every share must have flows of {self.num_parts} parts")
        if len(self.subpart_seeds) != self.num_parts * self.trainers_per_part or sum(self.subpart_seeds) < 1:
            raise ValueError(
                f"subpart_seeds must be {self.num_parts} x {self.trainers_per_part} counts, not all of them 0"
            )
        if self.part_bytes and len(self.part_bytes) != self.num_parts:
            raise ValueError(f"part_bytes must be of {self.num_parts} parts, got {len(self.part_bytes)}")
        if self.batch_size < 1 or self.ahead < 0:
            raise ValueError(f"batch_size {self.batch_size} and ahead {self.ahead} must be at least 1 and 0")
        if not 0 <= self.in_flight <= self.ahead:
            raise ValueError(f"in_flight must be from 0 to ahead, which is {self.ahead}, got {self.in_flight}")

    # --- what a planner asks

    @property
    def num_seeds(self) -> int:
        return sum(self.subpart_seeds)

    @property
    def digest(self) -> str:
        """Of all that it says."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def batches_per_epoch(self, trainers: int) -> int:
        """Steps of an epoch: as many on every trainer."""
        _check_trainers(trainers)
        largest = -(-self.num_seeds // trainers)
        return max(1, -(-largest // self.batch_size))

    def share(self, number: int, trainers: int) -> ShareProfile:
        """The `number`-th of `trainers` ranges of the seeds. With as many as were profiled it is one of those; else it
        is mixed of those that it overlaps."""
        _check_trainers(trainers)
        if trainers == len(self.shares):
            return self.shares[number]
        begin, end = number / trainers, (number + 1) / trainers
        found = []
        for other, share in enumerate(self.shares):
            low, high = other / len(self.shares), (other + 1) / len(self.shares)
            if (common := min(end, high) - max(begin, low)) > 1e-12:
                found.append((common, share))
        return mix(found)

    def worker_machines(self, machine_of_part: Sequence[int], ranks: Sequence[int]) -> list[int]:
        """The machine of each range of the seeds, where machine m has `ranks[m]` trainers and serves the parts p with
        `machine_of_part[p] == m`: as `gnnsys.split` deals them in a run."""
        machines, shares = self.dealt(machine_of_part, ranks)
        return [machines[shares.index(number)] for number in range(len(shares))]

    def dealt(self, machine_of_part: Sequence[int], ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The machine and the range of the seeds of every rank of a run. Ranks are numbered machine by machine, as
        torchrun does, which is also the order of their ring."""
        if len(machine_of_part) != self.num_parts:
            raise ValueError(f"the profile is of {self.num_parts} parts, got machines of {len(machine_of_part)}")
        machine_of_rank = [machine for machine, count in enumerate(ranks) for _ in range(count)]
        trainers = len(machine_of_rank)
        _check_trainers(trainers)
        placement = Placement(0, tuple(machine_of_rank), tuple(machine_of_part))
        given = assign_shares(self.subpart_seeds, placement, self.trainers_per_part)
        order = sorted(range(trainers), key=lambda rank: (given[rank].start, given[rank].stop, rank))
        return machine_of_rank, [order.index(rank) for rank in range(trainers)]

    def as_tasks(
        self,
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
        """The job as the simulator runs it, with `trainers` workers: worker i has the i-th range of the seeds, or the
        one that `shares` says (`dealt`): a ring goes from worker to worker in their order.

        `samplers_per_trainer`: 0 where trainers sample and fetch for themselves; else so many samplers are placed, each
        of which makes its part of every batch and sends it to its worker. `sync`: see `TrainingTasks.of_job`.
        `placement`: the machine of each part and of each worker, where they are known: flows that stay on a machine
        then cost nothing to encrypt and carry, and rows are those that are asked for from there. Placements that are
        compared before they are known (`None`) have flows of all parts, of which those that stay are left out by the
        simulator, with their encryption counted. `step_delays`: with a ring, seconds that a small message waits on its
        way to each worker, in queues of links that others fill; see `queue_delays`. `late`: the share of batches whose
        rows come late to each worker, none without it (`settle_late_rows`); of a `placement` alone.
        """
        from gnnsys.planning.profile.as_tasks import as_tasks

        return as_tasks(
            self, trainers, iterations=iterations, samplers_per_trainer=samplers_per_trainer, sync=sync,
            servers=servers, placement=placement, shares=shares, step_delays=step_delays, late=late,
        )  # fmt: skip

    def scaled(self, *, work: float = 1.0, step: float = 0.0) -> JobProfile:
        """The same with all core-seconds multiplied by `work`, and `step` more in every step of every trainer: what a
        run has shown of the machines (`fit_work`), beside what was timed."""
        if not (work > 0 and step >= 0):
            raise ValueError(f"work must be more than 0 and step at least 0, got {work} and {step}")
        prefixes = ("", "home_", "late_", "home_late_")
        names = ("sample_seconds", "sampling", "fetching", *(f"{prefix}pull_seconds" for prefix in prefixes))
        shares = tuple(
            replace(
                share,
                **{name: work * getattr(share, name) for name in names},
                computing=work * share.computing + step,
            )
            for share in self.shares
        )
        byte_work = ByteWork(seal=work * self.byte_work.seal, carry=work * self.byte_work.carry)
        return replace(self, shares=shares, byte_work=byte_work)

    def check_parts(self, digest: int, where: str) -> None:
        """ValueError for parts (`digest`: the CRC-32 of their manifest) that it is not of."""
        if digest != self.parts_digest:
            raise ValueError(
                f"the profile is of parts with the digest {self.parts_digest:08x}, {where} has {digest:08x}: "
                f"make another with `gnnsys profile` from the same parts"
            )

    def check_costs(self) -> None:
        """ValueError where something that takes time was measured as nothing: the machine was busy with other work."""
        if self.source != COUNTED:  # a run's times of stages and servers hold those of its bytes
            return
        costs = {"a byte to carry": self.byte_work.carry}
        for name in ("serving", "sampling", "fetching", "computing"):
            costs[name] = min(float(getattr(share, name).sum()) for share in self.shares)
        if unmeasured := [name for name, cost in costs.items() if cost <= 0]:
            raise ValueError(
                f"the measurement is not usable: {in_words(unmeasured)} cost 0.00 core-seconds{self._load()}. Run "
                "`gnnsys profile` again on an idle machine, or make the profile of a run by --trace FILE"
            )

    def _load(self) -> str:
        load, cores = self.about.get("load"), self.about.get("cores")
        return f", on a machine with a load of {load:.1f} on {cores:g} cores" if load is not None and cores else ""

    def report(self) -> str:
        """What it says, in a table for people: means over batches."""
        lines = [
            f"{self.num_parts} parts, {self.num_seeds:,} seeds, batches of {self.batch_size:,}; "
            f"{'counted without a run' if self.source == COUNTED else 'measured in a run'}, "
            f"{self.shares[0].num_batches} batches of each of {len(self.shares)} shares",
            "share     nodes      rows     edges   MB in  MB out   core-ms of serving  sampling  fetching  "
            f"ms of computing on {self.computes_on}",
        ]
        for number, share in enumerate(self.shares):
            lines.append(
                f"{number:5d} {share.nodes.mean():9,.0f} {share.rows.sum(1).mean():9,.0f} "
                f"{share.edges.sum(1).mean():9,.0f} {share.bytes_in.sum(1).mean() / 1e6:7.2f} "
                f"{share.bytes_out.sum(1).mean() / 1e6:7.2f} {1e3 * share.serving.sum(1).mean():20.1f} "
                f"{1e3 * share.sampling.mean():9.1f} {1e3 * share.fetching.mean():9.1f} "
                f"{1e3 * share.computing.mean():10.1f}"
            )
        sparse = f", {sum(self.gradients.sparse) / 1e6:.2f} MB pushed" if self.gradients.sparse else ""
        lines.append(
            f"a step sums {self.gradients.dense / 1e6:.2f} MB of gradients{sparse}; a byte on a link costs each end "
            f"{1e9 * self.byte_work.seal:.2f} core-ns to encrypt and {1e9 * self.byte_work.carry:.2f} to carry"
        )
        load, cores = self.about.get("load"), self.about.get("cores")
        if load is not None and cores and load >= cores:
            lines.append(
                f"the machine was busy before, load {load:.1f} on {cores:g} cores: bytes are right, times may not be. "
                "Profile on an idle machine"
            )
        return "\n".join(lines)

    # --- files

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "parts_digest": f"{self.parts_digest:08x}",
            "num_parts": self.num_parts,
            "trainers_per_part": self.trainers_per_part,
            "subpart_seeds": list(self.subpart_seeds),
            "batch_size": self.batch_size,
            "part_bytes": list(self.part_bytes),
            "ahead": self.ahead,
            "in_flight": self.in_flight,
            "computes_on": self.computes_on,
            "gradients": {
                "dense": self.gradients.dense,
                "sparse": list(self.gradients.sparse),
                "pulled": list(self.gradients.pulled),
            },
            "byte_work": {"seal": self.byte_work.seal, "carry": self.byte_work.carry},
            "about": dict(self.about),
            "shares": [share.to_json() for share in self.shares],
        }

    @classmethod
    def from_json(cls, value: Any) -> JobProfile:
        """ValueError, one line, for what is wrong."""
        if not isinstance(value, Mapping) or value.get("format") != FORMAT:
            raise ValueError(f'it is no job profile: "format" must be "{FORMAT}"')
        if value.get("version") != VERSION:
            raise ValueError(f"version {value.get('version')!r} is not understood: make it anew with `gnnsys profile`")
        known = (
            "format", "version", "source", "parts_digest", "num_parts", "trainers_per_part", "subpart_seeds",
            "batch_size", "part_bytes", "ahead", "in_flight", "computes_on", "gradients", "byte_work", "about",
            "shares",
        )  # fmt: skip
        for key in value:
            if key not in known:
                raise ValueError(f"unknown key {key!r}{did_you_mean(key, known)}")
        for key in known:
            if key not in value:
                raise ValueError(f"{key} is missing")
        try:
            gradients = value["gradients"]
            return cls(
                parts_digest=int(value["parts_digest"], 16),
                num_parts=int(value["num_parts"]),
                trainers_per_part=int(value["trainers_per_part"]),
                subpart_seeds=tuple(int(count) for count in value["subpart_seeds"]),
                batch_size=int(value["batch_size"]),
                shares=tuple(ShareProfile.from_json(share) for share in value["shares"]),
                gradients=JobGradients(
                    dense=float(gradients["dense"]),
                    sparse=tuple(map(float, gradients["sparse"])),
                    pulled=tuple(map(float, gradients["pulled"])),
                ),
                byte_work=ByteWork(**{key: float(told) for key, told in value["byte_work"].items()}),
                part_bytes=tuple(int(size) for size in value["part_bytes"]),
                ahead=int(value["ahead"]),
                in_flight=int(value["in_flight"]),
                computes_on=str(value["computes_on"]),
                source=str(value["source"]),
                about=dict(value["about"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged: {error!r}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> JobProfile:
        """ValueError, one line that names the file, for what is wrong."""
        file = Path(path)
        try:
            value = json.loads(file.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise ValueError(f"there is no profile {file}: make one with `gnnsys profile PARTS --out {file}`") from None
        except OSError as error:
            raise ValueError(f"the profile {file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: {error}") from None
        try:
            return cls.from_json(value)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


def _check_trainers(trainers: int) -> None:
    if trainers < 1:
        raise ValueError(f"trainers must be at least 1, got {trainers}")
