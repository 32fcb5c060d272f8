"""What an agent looks at before a job starts: ports, peers, parts, checkpoints. Called by name, answered as JSON."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import Any

from gnnsys.launch.part_files import MANIFEST, file_problem, folders_there, read_listing

MOST_PROBLEMS = 5
_CHECKPOINT = re.compile(r"step-\d{10,}")


class Ports:
    """Ports that this host listens at while others try to reach it."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def listen(self, port: int = 0) -> int:
        """Listens at a port, or at any free one, on every address; its number."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        made = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
        self._sockets.append(made)
        return int(made.getsockname()[1])

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()


def reach(targets: list[dict[str, Any]], timeout: float) -> dict[str, str]:
    """Tries to open a connection to each target; by name, why it failed."""
    from concurrent.futures import ThreadPoolExecutor  # imports logging, which no other request needs

    def attempt(target: dict[str, Any]) -> str | None:
        try:
            socket.create_connection((target["address"], int(target["port"])), timeout).close()
        except OSError as error:
            return str(error) or type(error).__name__
        return None

    with ThreadPoolExecutor(32) as pool:
        found = pool.map(attempt, targets)
        return {target["name"]: why for target, why in zip(targets, found, strict=True) if why is not None}


def find_parts(paths: list[str]) -> dict[str, dict[str, Any]]:
    """Which of these are directories of parts here, and which parts' folders they have."""
    found = {}
    for path in paths:
        if os.path.isfile(os.path.join(path, MANIFEST)):  # unlike Path's, false for what can be no path
            with contextlib.suppress(ValueError):
                listing = read_listing(Path(path))
                there = folders_there(listing)
                found[path] = {"num_parts": listing.num_parts, "digest": listing.digest, "parts": there}
    return found


def check_parts(path: str, parts: list[int], verify: bool) -> list[str]:
    """What is wrong with the files of these parts: a few of the problems."""
    listing, problems = read_listing(Path(path)), []
    for file in listing.of_parts(parts):
        if why := file_problem(listing.path, file, verify=verify):
            problems.append(why)
            if len(problems) == MOST_PROBLEMS:
                break
    return problems


def newest_checkpoint(path: str) -> str | None:
    """The name of the newest checkpoint in a folder that has a manifest; None where there is none."""
    folder = Path(path)
    names = [each.name for each in folder.iterdir()] if os.path.isdir(folder) else []
    made = (name for name in names if _CHECKPOINT.fullmatch(name) and os.path.isfile(folder / name / MANIFEST))
    return max(made, default=None)
