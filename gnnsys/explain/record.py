"""What a run was guided by, in a file per trainer: every version, and from which batch on. For `Guide(replay=FOLDER)`.

A file is a checksum (SHA-256) and a state without pickled code behind it: whatever was altered is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gnnsys.graph import some

_MAGIC = b"gnnsys guide 2\n"
_NAMES = {"rank", "world_size", "options", "end", "sampler"}


def save_record(folder: str | os.PathLike[str], record: Mapping[str, Any]) -> Path:
    """Writes the record of a rank into a folder, in place of one that is there."""
    assert set(record) == _NAMES
    path = _path(folder, record["rank"])
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save({**record, "options": _text(record["options"])}, buffer)
    data = buffer.getvalue()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(_MAGIC + hashlib.sha256(data).digest() + data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_record(
    folder: str | os.PathLike[str], rank: int, world_size: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a rank; ValueError unless it is whole, of as many ranks, and of a loader with these options."""
    path = _path(folder, rank)
    try:
        told = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"replay={os.fspath(folder)!r} has no record of rank {rank}: {error}. Record a run with Guide(record=True) "
            "and guide.save_record(FOLDER) on every rank"
        ) from error
    head = len(_MAGIC) + hashlib.sha256().digest_size
    if not told.startswith(_MAGIC) or hashlib.sha256(told[head:]).digest() != told[len(_MAGIC) : head]:
        raise ValueError(f"{path} is no record of a guide, or was damaged: record the run again")
    record: dict[str, Any] = torch.load(io.BytesIO(told[head:]), weights_only=True, map_location="cpu")
    if (record["rank"], record["world_size"]) != (rank, world_size):
        raise ValueError(
            f"{path} is of rank {record['rank']} of {record['world_size']}, this is rank {rank} of {world_size}: "
            "replay a run with as many trainers"
        )
    theirs, ours = json.loads(record["options"]), json.loads(_text(options))
    if differ := [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]:
        what = some([f"{name}={ours.get(name)!r} (recorded: {theirs.get(name)!r})" for name in differ], most=3)
        raise ValueError(
            f"{path} is of another loader, here it has {what}: replay with a loader like the one of the record"
        )
    return record


def _text(options: Mapping[str, Any]) -> str:
    return json.dumps(dict(options), default=str, sort_keys=True)


def _path(folder: str | os.PathLike[str], rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.guide"
