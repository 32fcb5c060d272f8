"""Imported by the process that others are forked from, and by nobody else: it imports what `fresh_processes` has listed
in a file. `multiprocessing` takes names of modules too, but in a command line, and these may be thousands."""

import contextlib
import importlib
import json
import os
from pathlib import Path

_file = os.environ.pop("GNNSYS_IMPORTS", None)
if _file is not None:
    _names = []
    with contextlib.suppress(OSError, ValueError):  # whoever has listed them has ended
        _names = json.loads(Path(_file).read_text())
    for _name in _names:
        with contextlib.suppress(Exception):  # of a name that a library has given to a part of itself
            importlib.import_module(_name)
