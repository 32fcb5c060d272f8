"""The records of a run in a file: `loader.save_trace(path)` on every rank; `gnnsys profile --trace` reads them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gnnsys.graph import MANIFEST
from gnnsys.observe import BatchTrace
from gnnsys.sampling import DistGraph

if TYPE_CHECKING:
    from gnnsys.loader.loader import Loader

FORMAT, VERSION = "gnnsys-run-trace", 1


@dataclass(frozen=True, kw_only=True)
class RunTrace:
    """What one rank has recorded, and what its numbers are of. `share`: which of the chosen seeds were its own, counted
    in ascending order; `subpart_seeds`: how many each subpart has. `gradients`: bytes of the model's, 0 if unknown."""

    parts_digest: int
    machine: int
    machine_of_part: tuple[int, ...]
    trainers_per_part: int
    share: tuple[int, int]
    subpart_seeds: tuple[int, ...]
    rank: int
    world_size: int
    batch_size: int
    ahead: int
    device: str
    row_bytes: int
    gradients: int
    records: tuple[BatchTrace, ...]

    @classmethod
    def of_loader(cls, loader: Loader, model: nn.Module | None = None) -> RunTrace:
        """ValueError where the loader's inputs are no share of `gnnsys.split`, or its graph is not in parts."""
        graph = loader.graph
        recipe: Any = loader.recipe
        if not isinstance(graph, DistGraph) or recipe is None:
            raise ValueError("a trace of a run is of parts that gnnsys.open gave, and of seeds that gnnsys.split gave")
        share = recipe.shares[recipe.rank]
        return cls(
            parts_digest=zlib.crc32((graph.parts.path / MANIFEST).read_bytes()),
            machine=graph.machine,
            machine_of_part=tuple(graph.machine_of_part),
            trainers_per_part=graph.book.trainers_per_part,
            share=(share.start, share.stop),
            subpart_seeds=tuple(recipe.counts),
            rank=recipe.rank,
            world_size=len(recipe.shares),
            batch_size=loader.schedule.batch_size,
            ahead=loader.num_under_way,
            device=str(loader.device),
            row_bytes=loader.row_bytes(),
            gradients=0 if model is None else sum(p.numel() * p.element_size() for p in model.parameters()),
            records=tuple(loader.trace()),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        told = {**vars(self), "records": [record.as_dict() for record in self.records]}
        Path(path).write_text(json.dumps({"format": FORMAT, "version": VERSION, **told}) + "\n", encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> RunTrace:
        """ValueError, naming the file, for one that is no trace."""
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
            if not text.strip():
                raise ValueError("it is empty: save one with loader.save_trace(path) on every rank")
            try:
                value = json.loads(text)
            except ValueError as error:
                raise ValueError(f"it is no trace of a run: {error}") from None
            return cls._from_json(value)
        except FileNotFoundError:
            raise ValueError(f"there is no trace {file}: save one with loader.save_trace(path) on every rank") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def _from_json(cls, value: Any) -> RunTrace:
        if not isinstance(value, Mapping) or value.get("format") != FORMAT or value.get("version") != VERSION:
            raise ValueError(f'it is no trace of a run: "format" must be "{FORMAT}", "version" {VERSION}')
        told = {name: of for name, of in value.items() if name not in ("format", "version")}
        try:
            told["records"] = tuple(BatchTrace.from_dict(record) for record in told["records"])
            for name in ("machine_of_part", "share", "subpart_seeds"):
                told[name] = tuple(int(number) for number in told[name])
            return cls(**told)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is damaged: {error!r}") from None
