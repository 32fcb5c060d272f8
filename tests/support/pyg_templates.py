"""PyG writes Python code for every class of layer, from the same templates, which it parses each time: here, once."""

from __future__ import annotations

import functools
import sys
from typing import Any


def parse_templates_once() -> None:
    """Where PyG was imported. What it writes is the same."""
    template = sys.modules.get("torch_geometric.template")
    if template is None:
        return
    make = template.Environment

    @functools.cache
    def of_folders(*folders: str) -> Any:
        return make(loader=template.FileSystemLoader(folders))

    template.Environment = lambda loader: of_folders(*loader.searchpath)
