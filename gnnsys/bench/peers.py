"""The peers a row may stand beside: which of them can be imported here, in what version, and why not.

Nothing is imported before it is asked for, and a peer that fails to import is a reason in the report, not an error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from functools import cache
from types import ModuleType

import torch

PEERS = {  # name in the report -> (module, distribution)
    "dgl": ("dgl", "dgl"),
    "pyg": ("torch_geometric", "torch-geometric"),
    "pymetis": ("pymetis", "pymetis"),
    "pyg-lib": ("pyg_lib", "pyg-lib"),
    "torch-sparse": ("torch_sparse", "torch-sparse"),
}


@cache
def find(name: str) -> ModuleType | str:
    """The peer's module, or the reason there is none."""
    module, distribution = PEERS[name]
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return f"{distribution} is not installed"
        return f"{distribution} does not import: {error}"
    except Exception as error:  # a peer built for another torch fails in any way it likes
        return f"{distribution} does not import: {type(error).__name__}: {str(error).splitlines()[0]}"


def missing(*names: str) -> dict[str, str]:
    """Those of `names` that cannot be imported, with the reason."""
    found = {name: find(name) for name in names}
    return {name: reason for name, reason in found.items() if isinstance(reason, str)}


def version(name: str) -> str | None:
    """The version of an importable peer, None otherwise."""
    if isinstance(find(name), str):
        return None
    try:
        return importlib.metadata.version(PEERS[name][1])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def set_threads(num_threads: int) -> None:
    """Threads for this thread's next parallel regions: torch's and ours, and DGL's where it brought its own OpenMP."""
    torch.set_num_threads(num_threads)
    dgl = sys.modules.get("dgl")
    if dgl is not None:
        dgl.utils.set_num_threads(num_threads)
