"""Imported by the process that others are forked from, and by nobody else: it imports what `fresh_processes` has listed
in a file. `multiprocessing` takes names of modules too, but in a command line, and these may be thousands."""

import contextlib
import json
import os
from pathlib import Path

from gnnsys.bench.jobs.imports_off_device import LIST, import_again

_file = os.environ.pop(LIST, None)
if _file is not None:
    with contextlib.suppress(OSError, ValueError):  # whoever has listed them has ended
        import_again(json.loads(Path(_file).read_text()))
