"""Directories that are whole or not there: staged beside their destination, described by one `manifest.json`.

Saved graphs and parts are both such directories. The manifest is written last, after every array has reached the disk,
and carries its own CRC-32; then the directory is renamed. What a killed writer leaves has a name that starts with a
dot.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gnnsys.graph.disk_room import naming, room_for
from gnnsys.graph.tables import FILE_ENDINGS

MANIFEST = "manifest.json"


@contextmanager
def staged(path: str | os.PathLike[str], *, overwrite: bool, format: str, what: str) -> Iterator[Path]:
    """A fresh directory to write into, which becomes `path` when the block ends and is removed when it fails.

    `path` must not exist, unless `overwrite` and it holds a manifest of the same `format`; `what` names the thing in
    errors ("a saved graph").
    """
    target = check_target(path, overwrite=overwrite, format=format, what=what)
    staging = _fresh_name(target, "new")
    with room_for(f"{what} to {str(path)!r}", target.parent):
        staging.mkdir()
        try:
            yield staging
            _replace(staging, target, path, overwrite=overwrite, format=format, what=what)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def check_target(path: str | os.PathLike[str], *, overwrite: bool, format: str, what: str) -> Path:
    """Where `path` leads, past symbolic links, with its parent made; ValueError for what must not be overwritten."""
    try:
        target = Path(path).resolve()
    except RuntimeError as error:  # a link that leads to itself
        raise ValueError(f"path {str(path)!r} leads nowhere: {error}") from error
    _check_free(target, path, overwrite=overwrite, format=format, what=what)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _check_free(target: Path, path: str | os.PathLike[str], *, overwrite: bool, format: str, what: str) -> None:
    if target.exists() and not overwrite:
        raise _exists(path)
    if target.exists() and _format_of(target) != format:
        raise ValueError(f"path {str(path)!r} is not {what}, and only {what} is overwritten")


def _exists(path: str | os.PathLike[str]) -> ValueError:
    return ValueError(f"path {str(path)!r} exists: choose another, or overwrite it (overwrite=True, --overwrite)")


def _format_of(folder: Path) -> str | None:
    """What the manifest in `folder` says it describes; a damaged manifest still says that much, or nothing."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest.get("format") if isinstance(manifest, dict) else None
    except (OSError, ValueError):
        return None


def _fresh_name(target: Path, role: str) -> Path:
    return target.with_name(f".{target.name}-{role}-{secrets.token_hex(6)}")


def _replace(
    staging: Path, target: Path, path: str | os.PathLike[str], *, overwrite: bool, format: str, what: str
) -> None:
    """Between the two renames of an overwrite the old one is `.<name>-old-...`: never half of one, never neither.

    Writing takes long, so what is at the target is looked at again. What appears after that stays too: a directory is
    renamed onto nothing, or onto an empty directory.
    """
    _check_free(target, path, overwrite=overwrite, format=format, what=what)
    if not target.exists():
        try:
            staging.rename(target)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _exists(path) from error
            raise
        sync_folder(target.parent)
        return
    old = _fresh_name(target, "old")
    target.rename(old)
    try:
        staging.rename(target)
    except BaseException:
        old.rename(target)
        raise
    sync_folder(target.parent)
    _remove(old)


def _remove(old: Path) -> None:
    """Removes what was replaced. The new one is in its place, so a failure here is not one of the write: it warns."""
    try:
        (old / MANIFEST).unlink()  # first: from here on what is left of it does not open
        shutil.rmtree(old)
    except OSError as error:
        warnings.warn(f"what was overwritten is left at {str(old)!r}: {error}", stacklevel=2)


def sync_folder(folder: Path) -> None:
    """Makes the names in a directory last through a power cut, as fsync does a file's content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes `manifest` with its checksum; ValueError where it holds anything but plain JSON values."""
    try:
        plain = json.loads(json.dumps(manifest))  # what will be read: keys as text, tuples as lists
    except (TypeError, ValueError) as error:
        raise ValueError(f"info must hold plain JSON values: {error}") from error
    plain["crc32"] = manifest_checksum(plain)
    with naming(folder / MANIFEST), open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps(plain, indent=1))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: Path, *, format: str, version: int, what: str) -> dict[str, Any]:
    """The manifest of `folder`; ValueError, naming the file, when it is absent, cut, altered or of another kind."""
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} is not {what}: it has no {MANIFEST}{_how_to_make(folder, format)}")
    try:
        text = file.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is cut or altered: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != format:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(f"{file} does not describe a {format}{_how_to_open(folder, str(found), format)}")
    if manifest.get("version") != version:
        raise ValueError(f"{file} has version {manifest.get('version')}, this gnnsys reads version {version}")
    if manifest.pop("crc32", None) != manifest_checksum(manifest):
        raise ValueError(f"{file} does not match its checksum: it was altered")
    if not _is_as_written(text):
        raise ValueError(f"{file} is not as it was written: it was altered, though it says the same")
    return manifest


GRAPH_FORMAT, PARTS_FORMAT = "gnnsys-graph", "gnnsys-parts"


def _how_to_open(folder: Path, found: str, wanted: str) -> str:
    """What to call instead, where a directory is of another of our kinds."""
    name = str(folder)
    if (found, wanted) == (GRAPH_FORMAT, PARTS_FORMAT):
        cut = f"gnnsys partition {name} --parts P --out DIR"
        return f": it is a saved graph, which gnnsys.graph.load({name!r}) reads; for parts, cut it first: {cut}"
    if (found, wanted) == (PARTS_FORMAT, GRAPH_FORMAT):
        return f": it is a directory of parts, which gnnsys.open({name!r}) opens"
    return ""


def _how_to_make(folder: Path, wanted: str) -> str:
    if wanted != PARTS_FORMAT:
        return ""
    if _is_of_dgl(folder):
        return (
            ": it describes a partition of DGL's, which gnnsys does not read; make parts of the DGL graph itself, by "
            "gnnsys.partition.partition_graph(graph, P, DIR)"
        )
    is_file = folder.is_file()
    source = str(folder) if is_file and folder.suffix in FILE_ENDINGS else "SOURCE"
    made = f"; make one with: gnnsys partition {source} --parts P --out DIR"
    if is_file and source == "SOURCE":
        made += f", where SOURCE is a saved graph or a file whose name ends in one of {', '.join(FILE_ENDINGS)}"
    return made


def _is_as_written(text: str) -> bool:
    """Whether the text has no other spelling than ours: a bit may turn 1e9 into 1E9, which no sum of values tells."""
    values = json.loads(text)
    return text == json.dumps(values, indent=1 if "\n" in text else None)


def manifest_checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _is_of_dgl(path: Path) -> bool:
    """Whether this is the description that DGL writes of a partition, or a directory that has one."""
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        try:
            described = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else None
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(described, dict) and {"part_method", "num_parts", "graph_name"} <= described.keys():
            return True
    return False
