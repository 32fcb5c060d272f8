"""A key in a file: how servers that run on their own and those who ask them come to have the same one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gnnsys.comm.keys import Keys


def read_key(path: str | os.PathLike[str]) -> Keys:
    """The keys that `make_key` wrote; ValueError, naming the file, where it holds none."""
    try:
        return Keys.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a key file: {error}") from error


def make_key(path: str | os.PathLike[str]) -> Keys:
    """New keys in a new file that only its owner reads, or the keys of the file that is there."""
    keys = Keys.generate()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_key(path)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(keys.to_json(), file)
    return keys
