"""Imports what the JSON file in GNNSYS_IMPORTS lists. It is what `multiprocessing` is told that its forks are to have
imported: names are given to it in a command line, and these may be thousands."""

import contextlib
import importlib
import json
import os
from pathlib import Path

LIST = "GNNSYS_IMPORTS"

if LIST in os.environ:
    for _name in json.loads(Path(os.environ[LIST]).read_text()):
        with contextlib.suppress(Exception):  # of a name that a library has given to a part of itself
            importlib.import_module(_name)
