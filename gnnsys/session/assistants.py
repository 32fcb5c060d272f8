"""Hosts of a plan that run no rank: each has one process, `gnnsys assist`, that serves its parts and runs its samplers.

Ranks and these processes are told of each other by one variable, ASSISTANTS: where each such host listens, and the
job's key. `gnnsys launch --plan` and `Lab.run(plan=...)` set it. To the ranks they are machines behind their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gnnsys.comm import Client, CommError, Keys, Kind, find_address

ASSISTANTS = "GNNSYS_ASSISTANTS"


@dataclass
class Assistants:
    """`endpoints` by the name of the host; `keys` are the job's. `samplers`: where those of each host listen, known
    once the graph is open."""

    endpoints: Mapping[str, str]
    keys: Keys
    samplers: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Assistants | None:
        """None where there are none; ValueError for a variable that says nothing of that."""
        text = (os.environ if environment is None else environment).get(ASSISTANTS)
        if not text:
            return None
        try:
            values = json.loads(text)
            hosts = {str(name): str(where) for name, where in values["hosts"].items()}
            if not hosts or not all(where.startswith("tcp://") and urlsplit(where).port for where in hosts.values()):
                raise ValueError("hosts listen at tcp://ADDRESS:PORT")
            return cls(hosts, Keys.from_json(values["key"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{ASSISTANTS} must have hosts and a key, as gnnsys launch --plan sets it: {error}"
            ) from None

    @classmethod
    def with_new_key(cls, endpoints: Mapping[str, str]) -> Assistants:
        """For a job that is about to start."""
        made = cls(endpoints, Keys.generate())
        if cls.from_environment({ASSISTANTS: made.text()}) is None:
            raise AssertionError("a text that was just made says nothing")
        return made

    def text(self) -> str:
        """What `from_environment` reads. It has the secret key."""
        return json.dumps({"hosts": dict(self.endpoints), "key": self.keys.to_json()}, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """The same where the same was told."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        """In the order of their machine numbers, which begin behind those of machines with ranks."""
        return list(self.endpoints)

    def own_address(self) -> str:
        """The address of this machine by which they reach it."""
        host = urlsplit(next(iter(self.endpoints.values()))).hostname
        return find_address(str(host)).own

    # -- what rank 0 asks of them ------------------------------------------------------------------------------------

    def survey(self, client: Client, first: int, path: str) -> list[dict[str, Any]]:
        """What each has at `path`; machines are numbered from `first`."""
        asked = [
            client.request(first + number, Kind.OPEN, options={"path": path, "survey": True})
            for number in range(len(self.endpoints))
        ]
        reports: list[dict[str, Any]] = []
        for name, pending in zip(self.endpoints, asked, strict=True):
            try:
                reports.append(pending.result().options)
            except CommError as error:
                reports.append({"error": f"{name}: {getattr(error, 'remote_text', error)}"})
        return reports

    def serve(
        self, client: Client, first: int, path: str, machine_of_part: Sequence[int], verify: bool, timeout: float
    ) -> tuple[dict[str, list[str]], str | None]:
        """Has each open its parts and start its samplers; where these listen, or what is wrong."""
        asked = []
        for number in range(len(self.endpoints)):
            parts = [part for part, machine in enumerate(machine_of_part) if machine == first + number]
            options = {"path": path, "parts": parts, "verify": verify}
            asked.append(client.request(first + number, Kind.OPEN, options=options, timeout=timeout))
        found: dict[str, list[str]] = {}
        for name, pending in zip(self.endpoints, asked, strict=True):
            try:
                found[name] = [str(where) for where in pending.result().options.get("samplers", [])]
            except CommError as error:
                return {}, f"{name}: {getattr(error, 'remote_text', error)}"
        return found, None


def run_assistant() -> int:
    """What `gnnsys assist` does; the exit code."""
    from gnnsys.session.assist import assist  # with all of the loaders, which ranks import by themselves

    return assist()
