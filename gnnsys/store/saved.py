"""Tables on disk: one directory per part and table, `.npy` arrays and a JSON manifest, whole or not there.

Every machine writes the parts it serves, so the directories of one save may lie on different machines. They carry one
name of the save, by which parts of different saves are told apart when they are read again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gnnsys.graph import MANIFEST, ArrayReader, ArrayWriter, chunk_rows, read_manifest, staged, write_manifest
from gnnsys.store.row_optimizers import STATES, state_row_shape
from gnnsys.store.spec import TableSpec

FORMAT, VERSION, WHAT = "gnnsys-table", 1, "a saved table"


@dataclass(frozen=True, eq=False)
class SavedPart:
    """The rows of a part as they were saved, and the optimizer's state with them."""

    spec: TableSpec
    part: int
    save: str  # the same for all parts that were saved together
    step_counts: Mapping[str, int]  # by kind of optimizer
    rows: Tensor
    states: Mapping[str, Tensor]


def part_folder(folder: str, name: str, part: int) -> Path:
    """Where a part of a table is: a readable name, and a hash, because names of tables need not be names of files."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:60]
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return Path(folder) / f"{readable}-{digest}" / f"part{part:05d}"


def save_part(saved: SavedPart, folder: str, overwrite: bool, check: Callable[[], None] = lambda: None) -> None:
    """Writes one part, piece by piece; what is there stays until the new one is complete.

    `check` is called before each piece, and may raise to end it.
    """
    target = part_folder(folder, saved.spec.name, saved.part)

    def write(writer: ArrayWriter, rows: Tensor) -> str:
        with writer.stream(rows.dtype, rows.shape) as stream:
            for piece in rows.split(chunk_rows(rows)):
                check()
                stream.append(piece)
        return stream.name

    with staged(target, overwrite=overwrite, format=FORMAT, what=WHAT) as staging:
        writer = ArrayWriter(staging)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "spec": saved.spec.to_json(),
            "part": saved.part,
            "save": saved.save,
            "steps": max(saved.step_counts.values(), default=0),
            "step_counts": dict(saved.step_counts),
            "rows": write(writer, saved.rows),
            "states": {name: write(writer, rows) for name, rows in saved.states.items()},
            "files": writer.files,
        }
        write_manifest(staging, manifest)


def load_part(folder: str, name: str, part: int, *, verify: bool = True) -> SavedPart:
    """Opens a part that was saved, memory-mapped, its checksums compared with `verify`; ValueError names the file."""
    path = part_folder(folder, name, part)
    manifest = read_manifest(path, format=FORMAT, version=VERSION, what=WHAT)
    try:
        spec = TableSpec.from_json(manifest["spec"])
        reader = ArrayReader(path, manifest["files"], verify)
        if (spec.name, manifest["part"]) != (name, part):
            raise ValueError(f"it holds part {manifest['part']} of {spec.name!r}")
        shape = spec.part_shape(part)
        rows = reader.array(manifest["rows"], spec.dtype, shape)
        states = {
            state: reader.array(file, None, (shape[0], *state_row_shape(state, shape[1:])))
            for state, file in manifest["states"].items()
        }
        counts = manifest.get("step_counts")
        if counts is None:  # of a version that counted the steps of all kinds together
            counts = {kind: manifest["steps"] for kind, of in STATES.items() if {*of} & {*states}}
        if not {*states} <= {state for of in STATES.values() for state in of} or not {*counts} <= {*STATES}:
            raise ValueError(f"{path / MANIFEST} has states {sorted(states)} of {sorted(counts)}, known are {STATES}")
        return SavedPart(spec, part, str(manifest["save"]), {k: int(n) for k, n in counts.items()}, rows, states)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / MANIFEST} is malformed: {error!r}") from error
