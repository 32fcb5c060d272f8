"""A key in a file: how servers that run on their own and those who ask them come to have the same one."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

from gnnsys.comm.keys import Keys


def read_key(path: str | os.PathLike[str]) -> Keys:
    """The keys that `make_key` wrote; ValueError, naming the file, where it holds none or others may read it."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ValueError(f"others may read it (mode {mode:o}), run chmod 600 on it")
            return Keys.from_json(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a key file: {error}") from error


def make_key(path: str | os.PathLike[str]) -> Keys:
    """New keys in a new file that only its owner reads, or the keys of the file that is there.

    Who makes it at the same time gets the same keys: the file has its name once it is whole.
    """
    if os.path.lexists(path):
        return read_key(path)
    keys = Keys.generate()
    descriptor, unnamed = tempfile.mkstemp(prefix=".key-", dir=Path(path).parent)  # with mode 600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(keys.to_json(), file)
        os.link(unnamed, path)
    except FileExistsError:
        return read_key(path)
    finally:
        os.unlink(unnamed)
    return keys
