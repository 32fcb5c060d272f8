"""A folder of checkpoints on one machine: how checkpoints are found, written, published and removed.

A checkpoint is written to `.step-N-TOKEN/`. It gets its manifest when every file of every machine is on disk, and is
valid from then on. Then it is renamed to `step-N/`. Machines may share one folder or have one each, so another machine
may already have done what a function here does.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnsys.graph import MANIFEST, file_checksum, manifest_checksum, read_manifest, sync_folder

FORMAT, VERSION, WHAT = "gnnsys-checkpoint", 1, "a checkpoint"
_STEP = re.compile(r"step-(\d{10,})")
_STAGING = re.compile(r"\.step-(\d{10,})-[0-9a-f]{16}")
_LEFT = re.compile(r"\.(step-\d{10,}-[0-9a-f]{16}|gone-.*|manifest-.*)")


def name_of(steps: int) -> str:
    return f"step-{steps:010d}"


def staging_name(steps: int, token: str) -> str:
    """The folder that a checkpoint is written to, on every machine. `token`: 16 hexadecimal digits."""
    return f".{name_of(steps)}-{token}"


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint of which this machine has files. `lacks`: the files that are missing or incomplete here."""

    name: str
    steps: int
    token: str
    lacks: list[str]


def look(folder: Path) -> list[LocalCheckpoint]:
    """All checkpoints with a manifest on this machine, complete here or not."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (_STEP.fullmatch(path.name) or _STAGING.fullmatch(path.name)) or not (path / MANIFEST).is_file():
            continue
        try:
            manifest = read_checkpoint(path)
        except ValueError:
            continue
        lacks = [file for file, (size, _) in manifest["files"].items() if _size(path / file) != size]
        found.append(LocalCheckpoint(path.name, manifest["steps"], manifest["token"], lacks))
    return found


def unreadable(folder: Path) -> list[str]:
    """The errors of checkpoints whose manifest cannot be read."""
    wrong = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _STEP.fullmatch(path.name):
            try:
                read_checkpoint(path)
            except ValueError as error:
                wrong.append(str(error))
    return wrong


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest. ValueError, naming the file, if it is incomplete or names files outside its folder."""
    manifest = read_manifest(path, format=FORMAT, version=VERSION, what=WHAT)
    try:
        for file, (size, crc32) in manifest["files"].items():
            steps = file.split("/")
            if any(step in ("", ".", "..") or Path(step).name != step for step in steps):
                raise ValueError(f"{path / MANIFEST} names {file!r}, which is not a file of this directory")
            int(size), int(crc32)
        int(manifest["steps"]), int(manifest["world_size"]), str(manifest["token"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / MANIFEST} is malformed: {error!r}") from error
    return manifest


def check_files(path: Path, files: dict[str, list[int]]) -> str | None:
    """Compares files with their sizes and checksums. Returns the first problem, or None."""
    for file, (size, crc32) in files.items():
        try:
            if _size(path / file) != size:
                return f"{path / file} has {_size(path / file)} bytes, {MANIFEST} says {size}: it was cut or altered"
            if file_checksum(path / file) != crc32:
                return f"{path / file} does not match its checksum: it was altered"
        except OSError as error:
            return f"{path / file} cannot be read: {error.strerror or error}"
    return None


def check_sizes(path: Path, files: dict[str, list[int]]) -> str | None:
    """Compares files with their sizes. Returns the first problem, or None."""
    for file, (size, _) in files.items():
        if _size(path / file) != size:
            found = "is not there" if _size(path / file) < 0 else f"has {_size(path / file)} bytes, not {size}"
            return f"{path / file} {found}"
    return None


def is_checkpoint(name: str) -> bool:
    """Whether this is the name of a published checkpoint."""
    return _STEP.fullmatch(name) is not None


def describe(staging: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest. Machines that share a folder all write the same content."""
    plain = json.loads(json.dumps(manifest))
    plain["crc32"] = manifest_checksum(plain)
    text = staging / f".manifest-{secrets.token_hex(6)}"
    with open(text, "w", encoding="utf-8") as file:
        json.dump(plain, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    text.rename(staging / MANIFEST)
    sync_folder(staging)


def publish(folder: Path, staging: str, steps: int, token: str) -> Path:
    """Renames a checkpoint to `step-N`, if no other machine has done so. ValueError if another one has that name."""
    target = folder / name_of(steps)
    try:
        os.rename(folder / staging, target)
    except FileNotFoundError:
        if not _is(target, token):
            raise
    except OSError:
        if not _is(target, token):
            raise ValueError(f"{target} exists: another job saves to this folder, choose another") from None
    sync_folder(folder)
    return target


def remove(folder: Path, names: Iterable[str]) -> None:
    """Removes checkpoints: renames each at once, then deletes it. Skips those that are gone already."""
    for name in names:
        gone = folder / f".gone-{name.lstrip('.')}-{secrets.token_hex(6)}"
        try:
            os.rename(folder / name, gone)
        except FileNotFoundError:
            continue
        shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path, keep: Iterable[str] = ()) -> None:
    """Removes what killed processes left. Must not run while another save to the folder is under way."""
    kept = set(keep)
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if _LEFT.fullmatch(path.name) and path.name not in kept:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def old_ones(folder: Path, keep: int) -> list[str]:
    """The names of checkpoints beyond the newest `keep`."""
    names = [path.name for path in folder.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(names, key=lambda name: int(name.split("-")[1]), reverse=True)[keep:]


def set_aside(folder: Path, name: str) -> None:
    """Renames a damaged checkpoint, so that a new one can have its name and a person can look at it."""
    try:
        os.rename(folder / name, folder / f"damaged-{name.lstrip('.')}-{secrets.token_hex(4)}")
    except FileNotFoundError:
        return


def _is(path: Path, token: str) -> bool:
    try:
        return bool(read_checkpoint(path)["token"] == token)
    except (ValueError, OSError):
        return False


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1
