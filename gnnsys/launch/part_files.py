"""The files of a directory of parts, as its manifest lists them, read without torch: an agent must be up at once.

What the arrays mean is the business of `gnnsys.partition`; here a file has a name, a size and a CRC-32.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MANIFEST, FORMAT = "manifest.json", "gnnsys-parts"
_SAFE = re.compile(r"(?:part-\d{4,}/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class PartFile:
    """One file of a part: its name below the directory, and what it must be."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class PartsListing:
    """What a manifest says. `digest` is that of the manifest's own bytes: the same on every host.

    `finds_nodes` and `finds_edges`: whether the parts know the user's own ids of nodes and of edges.
    """

    path: Path
    num_parts: int
    files: tuple[PartFile, ...]
    digest: int
    finds_nodes: bool = True
    finds_edges: bool = True
    unfit_rows: tuple[str, ...] = ()  # arrays of features that have NaN, and in which rows

    def of_parts(self, parts: Iterable[int]) -> list[PartFile]:
        folders = {folder_of(part) for part in parts}
        return [file for file in self.files if file.name.split("/")[0] in folders]


def folder_of(part: int) -> str:
    return f"part-{part:04d}"


def read_listing(path: Path) -> PartsListing:
    """The listing of a directory of parts; ValueError that says what is wrong with it."""
    file = path / MANIFEST
    try:
        data = file.read_bytes()
    except OSError:
        raise ValueError(f"{path} has no {MANIFEST}: make parts with gnnsys partition SOURCE --out {path}") from None
    try:
        manifest = json.loads(data)
        if manifest["format"] != FORMAT:
            raise ValueError(f"it describes a {manifest['format']}")
        files = [PartFile(str(name), int(e["bytes"]), int(e["crc32"])) for name, e in manifest["files"].items()]
        num_parts = int(manifest["book"]["num_parts"])
        nodes = [each for entry in manifest.get("parts", []) for each in entry["nodes"]]
        finds = all(each.get("global_ids") is not None for each in nodes), bool(manifest.get("edge_ids", True))
        if wrong := [each.name for each in files if not is_safe(each.name)]:
            raise ValueError(f"it names {wrong[0]!r}, which is no file of a part")
        unfit = tuple(f"{where}: {text}" for where, text in manifest.get("unfit_rows", {}).items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no manifest of parts: {error}") from None
    return PartsListing(path, num_parts, tuple(files), zlib.crc32(data), *finds, unfit)


def is_safe(name: str) -> bool:
    """Whether a name stays below its directory."""
    return _SAFE.fullmatch(name) is not None


def folders_there(listing: PartsListing) -> list[int]:
    """Parts whose folders are in the directory."""
    return [part for part in range(listing.num_parts) if os.path.isdir(listing.path / folder_of(part))]


def file_problem(folder: Path, file: PartFile, *, verify: bool) -> str | None:
    """What is wrong with a file on disk; None for one that is as the manifest says."""
    path = folder / file.name
    try:
        size = path.stat().st_size
    except OSError:
        return f"{path} is missing"
    if size != file.bytes:
        return f"{path} has {size} bytes instead of {file.bytes}"
    if verify and checksum(path) != file.crc32:
        return f"{path} does not match its checksum: it was altered"
    return None


def checksum(path: Path, count: int | None = None) -> int:
    """CRC-32 of a file, or of its first `count` bytes."""
    value, left = 0, count
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK if left is None else min(_CHUNK, left)):
            value = zlib.crc32(chunk, value)
            left = None if left is None else left - len(chunk)
    return value
