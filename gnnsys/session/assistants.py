"""Hosts of a plan that run no rank: each has one process, `gnnsys assist`, that serves its parts and runs its samplers.

Ranks and these processes are told of each other by one variable, ASSISTANTS: where each such host listens, and the
job's key. `gnnsys launch --plan` and `Lab.run(plan=...)` set it. To the ranks they are machines behind their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from gnnsys.comm import CURVE, Client, CommError, Keys, Kind, find_address

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
        answers = self._ask(client, first, [{"path": path, "survey": True}] * len(self.endpoints), None)
        return [answer if isinstance(answer, dict) else {"error": answer} for answer in answers]

    def serve(
        self, client: Client, first: int, path: str, machine_of_part: Sequence[int], verify: bool, timeout: float,
        job: Mapping[str, Any],
    ) -> tuple[dict[str, list[str]], str | None]:  # fmt: skip
        """Has each forget what an earlier life of the job had there, open its parts and start its samplers; where these
        listen, or what is wrong. `job`: what `AssistedJob` says of it."""
        if (problem := self.forget(client, first)) is not None:
            return {}, problem
        served = [
            [part for part, machine in enumerate(machine_of_part) if machine == first + number]
            for number in range(len(self.endpoints))
        ]
        told = [{"path": path, "parts": parts, "verify": verify, **job} for parts in served]
        found: dict[str, list[str]] = {}
        for name, answer in zip(self.endpoints, self._ask(client, first, told, timeout), strict=True):
            if isinstance(answer, str):
                return {}, answer
            found[name] = [str(where) for where in answer.get("samplers", [])]
        return found, None

    def forget(self, client: Client, first: int) -> str | None:
        """Has each close its parts and drop the tables that were made there; what is wrong."""
        answers = self._ask(client, first, [{"path": None}] * len(self.endpoints), None)
        return next((answer for answer in answers if isinstance(answer, str)), None)

    def _ask(
        self, client: Client, first: int, told: Sequence[dict[str, Any]], timeout: float | None
    ) -> list[dict[str, Any] | str]:
        """Has each do what `told` has for it, all at once; what they say, or what is wrong with one."""
        asked = [
            client.request(first + number, Kind.OPEN, options=options, timeout=timeout)
            for number, options in enumerate(told)
        ]
        answers: list[dict[str, Any] | str] = []
        for name, pending in zip(self.endpoints, asked, strict=True):
            try:
                answers.append(pending.result().options or {})
            except CommError as error:
                answers.append(f"{name}: {getattr(error, 'remote_text', error)}")
        return answers


@dataclass(frozen=True, kw_only=True)
class AssistedJob:
    """What a host without ranks must know of the job's session, which begins after it: seconds of silence after which a
    rank counts as dead, and how messages are encrypted (`Keys.encrypts`)."""

    lost_after: float = 30.0
    encrypts: bool | str = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AssistedJob:
        """Of the options of a request, which may have others; ValueError for what is none."""
        own = cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
        seconds = own.lost_after
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= 86400:
            raise ValueError(f"lost_after must be from 0 to 86400 seconds, got {seconds!r:.100}")
        if own.encrypts not in (True, CURVE):
            raise ValueError(f"a host without ranks encrypts by True or {CURVE!r}, got {own.encrypts!r:.100}")
        return own


def run_assistant() -> int:
    """What `gnnsys assist` does; the exit code."""
    from gnnsys.session.assist import assist  # with all of the loaders, which ranks import by themselves

    return assist()
