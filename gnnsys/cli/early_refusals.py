"""What a command can refuse by looking at names alone, before torch is imported, which takes seconds.

Only the mistakes that are made most often, in the words of the rooms, which check all of it again. What is not certain
here is left to them.
"""

from __future__ import annotations

import os
from pathlib import Path

_MANIFEST = "manifest.json"
_FILE_ENDINGS = (".npz", ".csv", ".tsv", ".txt", ".parquet")


def check_are_parts(folder: Path) -> None:
    """ValueError where nothing says that these are parts."""
    if not folder.is_file() and not (folder / _MANIFEST).is_file():
        raise ValueError(
            f"{str(folder)!r} is not a directory of parts: it has no {_MANIFEST}; make one with: gnnsys partition "
            "SOURCE --parts P --out DIR"
        )


def check_source(source: str) -> None:
    """ValueError for the path of a file, or a name that ends like one's, where there is none."""
    path = Path(source)
    if path.exists() or ":" in source:
        return
    if path.name == source and (path.suffix.lower() not in _FILE_ENDINGS or _may_be_dataset(source)):
        return
    inside = "" if path.is_absolute() else f" in {os.getcwd()}"
    raise ValueError(f"there is no file {source}{inside}: give the path of one, or a dataset's name")


def _may_be_dataset(name: str) -> bool:
    given, beside = os.environ.get("GNNSYS_DATA"), Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(given) if given else beside
    return (folder / name).exists() or (folder / f"{name}.npz").exists()


def check_is_free(out: Path, *, overwrite: bool) -> None:
    """ValueError for a directory that is there and is to stay."""
    if out.exists() and not overwrite:
        raise ValueError(f"path {str(out)!r} exists: choose another, or overwrite it (overwrite=True, --overwrite)")


def check_counts(num_parts: int, trainers_per_part: int, halo_hops: int) -> None:
    """ValueError for less than one of anything."""
    if num_parts < 1 or trainers_per_part < 1:
        raise ValueError(f"parts and trainers per part must be at least 1, got {num_parts} and {trainers_per_part}")
    if halo_hops < 1:
        raise ValueError(f"halo_hops must be at least 1, got {halo_hops}")
