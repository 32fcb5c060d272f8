"""A machine as planners see it: what it is, what operators cost on it, and which ones slow each other down."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gnnsys.planning.costs.data_sheet import Rated, rated_costs
from gnnsys.planning.costs.model import CostModel, Observation
from gnnsys.planning.costs.operators import BUS, CORES, CostContext, find_operator

_VERSION = 1
_STANDS_FOR = {  # pairs are measured of these; the others use the same memory, bus or cores in the same way
    "gather/host": "spmm/host",
    "backward/host": "product/host",
    "optimizer/host": "spmm/host",
    "copy/pageable": "copy/up",
    "gather/cached": "gather/bus",
}


@dataclass(frozen=True)
class ProfiledMachine:
    """What a profile is of: it says nothing about any other. `gpu` and `driver` are empty where there is none."""

    processor: str = ""
    cores: int = 1
    threads: int = 1
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    build: str = ""
    source: str = "measured"


@dataclass(frozen=True)
class MachineProfile:
    """`pairs[a, b]` is by how much `a` takes longer while `b` runs beside it. Operators on the host use
    `machine.threads` threads. `seconds_taken` is what profiling took."""

    machine: ProfiledMachine
    costs: CostModel
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    seconds_taken: float = 0.0

    def seconds(self, operator: str, **sizes: float) -> float:
        """What one call takes with the machine to itself."""
        return self.costs.seconds(operator, **sizes)

    @property
    def error(self) -> float:
        """The mean over operators of their leave-one-out errors; 0 where none was fitted."""
        return statistics.fmean([cost.error or 0.0 for cost in self.costs.operators.values()] or [0.0])

    def slow_down(self, operator: str, beside: str) -> float:
        """By how much `operator` takes longer while `beside` runs: 1 where they share nothing, or nobody measured."""
        for one in (operator, _STANDS_FOR.get(operator, operator)):
            for other in (beside, _STANDS_FOR.get(beside, beside)):
                if (one, other) in self.pairs:
                    return self.pairs[one, other]
        return 1.0

    def shared_by(self, ranks: int, *, on_bus: int | None = None) -> MachineProfile:
        """As each of `ranks` processes of this machine sees it while all of them work, each with `machine.threads`.

        Cores are divided as far as all their threads are more than there are; the bus is divided among `on_bus` ranks,
        by default all of them.
        """
        if ranks < 1 or (on_bus is not None and not 1 <= on_bus <= ranks):
            raise ValueError(f"ranks and on_bus must be 1 or more, on_bus no more than ranks: got {ranks}, {on_bus}")
        factors = {
            CORES: max(1.0, ranks * self.machine.threads / max(1, self.machine.cores)),
            BUS: float(ranks if on_bus is None else on_bus),
        }
        costs = {}
        for name, cost in self.costs.operators.items():
            shares = find_operator(name).shares
            costs[name] = cost.times(max((factors[share] for share in shares), default=1.0))
        return replace(self, costs=self.costs.replace(costs))

    @classmethod
    def from_rates(
        cls,
        *,
        cores: int,
        host_gbs_per_core: float,
        host_gflops_per_core: float,
        bus_gbs: float = 0.0,
        device_gbs: float = 0.0,
        device_tflops: float = 0.0,
        launch_us: float = 5.0,
        pageable_gbs: float | None = None,
        threads: int | None = None,
        host_cache_mb: float = 32.0,
        device_cache_mb: float = 32.0,
        processor: str = "",
        gpu: str = "",
        source: str = "data sheet",
    ) -> MachineProfile:
        """Hardware that is only described, by its data sheet. Without a bus and device memory it has no GPU.

        Rates are what a program gets, not what is printed: about 0.8 of memory's and 0.9 of the bus's. `gflops` and
        `tflops` count a multiply-add as two. What else is assumed is in `data_sheet.py`; expect to be wrong by half.
        """
        used = cores if threads is None else threads
        rated = Rated(
            host=1e9 * host_gbs_per_core * used,
            host_macs=0.5e9 * host_gflops_per_core * used,
            bus=1e9 * bus_gbs,
            pageable=1e9 * (0.4 * bus_gbs if pageable_gbs is None else pageable_gbs),
            device=1e9 * device_gbs,
            device_macs=0.5e12 * device_tflops,
            launch=1e-6 * launch_us,
        )
        facts = ProfiledMachine(processor, cores, used, gpu, source=source)
        caches = {"last_cache": int(1e6 * host_cache_mb), "device_cache": int(1e6 * device_cache_mb)}
        return cls(facts, CostModel(rated_costs(rated), CostContext(threads=1, **caches)))  # rates are of all threads

    def fitted_to(self, observations: Iterable[Observation], source: str) -> MachineProfile:
        """The same machine with costs fitted to what somebody has measured, such as a published table. Operators that
        were not observed stay as they are."""
        fitted = CostModel.fit(observations, self.costs.context)
        return replace(self, machine=replace(self.machine, source=source), costs=self.costs.replace(fitted.operators))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return {
            "version": _VERSION,
            "machine": asdict(self.machine),
            "costs": self.costs.to_json(),
            "pairs": [[*pair, factor] for pair, factor in self.pairs.items()],
            "seconds_taken": self.seconds_taken,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MachineProfile:
        """ValueError for what is no profile, or one of another version."""
        if not isinstance(value, Mapping) or value.get("version") != _VERSION:
            raise ValueError(f"this is no machine profile of version {_VERSION}")
        try:
            pairs = {(str(one), str(other)): max(1.0, float(factor)) for one, other, factor in value["pairs"]}
            costs = CostModel.from_json(value["costs"])
            return cls(ProfiledMachine(**value["machine"]), costs, pairs, float(value["seconds_taken"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no machine profile: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON, for `load`. Whoever reads the file meanwhile sees the old one or the new one."""
        path = Path(path)
        handle, unnamed = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with mode 600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(), file, indent=1)
                file.write("\n")
            os.replace(unnamed, path)
        except BaseException:
            os.unlink(unnamed)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MachineProfile:
        """ValueError, naming the file, for one that is no profile."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # json's own errors are such, too
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def report(self) -> str:
        """What operators cost and how well that was fitted, a line each."""
        facts = self.machine
        where = f"{facts.processor}, {facts.threads} of {facts.cores} cores" + (f"; {facts.gpu}" if facts.gpu else "")
        lines = [f"{where} ({facts.source})"]
        for name, cost in self.costs.operators.items():
            terms = " + ".join(f"{seconds:.3g} {term}" for term, seconds in cost.terms.items()) or "0"
            fitted = "" if cost.error is None else f"  [left out: {cost.error:.1%}, worst {cost.worst or 0:.1%}]"
            lines.append(f"  {name}: {terms}{fitted}")
        lines += [f"  {one} beside {other}: {factor:.2f} times as long" for (one, other), factor in self.pairs.items()]
        return "\n".join(lines)
