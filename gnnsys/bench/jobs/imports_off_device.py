"""Prints, as JSON, the modules that a process may import before it forks, where the forks use a GPU. None of them
touches it. `python -m gnnsys.bench.jobs.imports_off_device NAME` imports the module NAME and lists what came with it;
NAME itself is the last where nothing touches the device. `--listed FILE` imports the modules in FILE and lists them
again, or none where one of them touches the device after all.

Whoever has touched an NVIDIA device has opened `/dev/nvidia-uvm`.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

DEVICE_FILE = "nvidia-uvm"
LIST = "GNNSYS_IMPORTS"  # the variable that names the file for `import_listed`
_OPENED = "/proc/self/fd"


def has_touched_device() -> bool:
    opened = (os.path.join(_OPENED, number) for number in os.listdir(_OPENED))
    return any(os.path.basename(os.readlink(each)) == DEVICE_FILE for each in opened if os.path.islink(each))


def import_off_device(name: str) -> list[str]:
    """Imports the module. What was imported to its end when the device was last seen untouched, in that order."""
    plain, seen = builtins.__import__, ImportedModules()

    def watched(*args: Any, **kwargs: Any) -> Any:
        module = plain(*args, **kwargs)
        seen.look()
        return module

    builtins.__import__ = watched
    try:
        importlib.import_module(name)
    finally:
        builtins.__import__ = plain
    seen.look()
    return [*(each for each in seen.names() if each != name), *([] if seen.is_touched else [name])]


class ImportedModules:
    """Modules in the order in which they were seen imported to their end, as long as the device was untouched."""

    def __init__(self) -> None:
        self.is_touched = False
        self._imported: dict[str, None] = {}
        self._begun: dict[str, None] = {}
        self._num_seen = 0

    def look(self) -> None:
        """Called after every import."""
        if self.is_touched:
            return
        new = list(sys.modules)[self._num_seen :] if len(sys.modules) != self._num_seen else []
        begun = self._begun | dict.fromkeys(new)
        ended = [name for name in begun if _is_imported(name)]
        if new or ended:
            self.is_touched = has_touched_device()
        if not self.is_touched:
            self._num_seen = len(sys.modules)
            self._imported |= dict.fromkeys(ended)
            self._begun = {name: None for name in begun if name not in self._imported}

    def names(self) -> list[str]:
        """Without those in a package that is not among them."""
        return [name for name in self._imported if all(package in self._imported for package in _packages(name))]


def import_again(names: list[str]) -> list[str]:
    """Those names; none where importing them touches the device: one that came late may import what came before it."""
    for name in names:
        with contextlib.suppress(Exception):  # of a name that a library has given to a part of itself
            importlib.import_module(name)
    return [] if has_touched_device() else names


def _is_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and spec.name == name and not getattr(spec, "_initializing", False)


def _packages(name: str) -> list[str]:
    """`a.b.c` is in `a` and in `a.b`, and is itself."""
    words = name.split(".")
    return [".".join(words[: number + 1]) for number in range(len(words))]


def main(words: list[str]) -> None:
    is_listed = words[0] == "--listed"
    names = import_again(json.loads(Path(words[1]).read_text())) if is_listed else import_off_device(words[0])
    print(f"\n{json.dumps(names)}", flush=True)
    os._exit(0)  # what libraries say when they end is not for whoever reads this


if __name__ == "__main__":
    main(sys.argv[1:])
