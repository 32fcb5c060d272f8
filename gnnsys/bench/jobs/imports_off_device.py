"""`python -m gnnsys.bench.jobs.imports_off_device NAME` imports a module and prints, as JSON, what of it a process may
import before it is forked into some that use a GPU: all where the device is left alone, else what came before.

Whoever has touched an NVIDIA device has opened `/dev/nvidia-uvm`.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
from typing import Any

DEVICE_FILE = "nvidia-uvm"
_OPENED = "/proc/self/fd"


def has_touched_device() -> bool:
    opened = (os.path.join(_OPENED, number) for number in os.listdir(_OPENED))
    return any(os.path.basename(os.readlink(each)) == DEVICE_FILE for each in opened if os.path.islink(each))


def import_off_device(name: str) -> list[str]:
    """Imports the module. What may be imported before, in that order; the last is the module itself where all may."""
    plain, found = builtins.__import__, list[str]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        known = len(sys.modules)
        module = plain(*args, **kwargs)
        if not found and len(sys.modules) > known and has_touched_device():
            found.extend(_whole(list(sys.modules)[:known]))
        return module

    builtins.__import__ = watched
    try:
        importlib.import_module(name)
    finally:
        builtins.__import__ = plain
    if found or has_touched_device():
        return found
    return [*_whole(list(sys.modules)), name]


def _whole(names: list[str]) -> list[str]:
    """Those that have been imported to their end, and all packages that they are in."""
    started = {name for name in names if not _is_whole(name)}
    return [name for name in names if not any(part in started for part in _parts(name))]


def _is_whole(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.name == name and not getattr(spec, "_initializing", False)


def _parts(name: str) -> list[str]:
    """`a.b.c` is in `a` and in `a.b`, and is itself."""
    words = name.split(".")
    return [".".join(words[: number + 1]) for number in range(len(words))]


if __name__ == "__main__":
    print(json.dumps(import_off_device(sys.argv[1])))
