"""The table of jobs, in SQLite with a write-ahead log. Every change of a job's state is one transaction here.

A change names the attempt that it belongs to and the state that it comes from. One that is late, of a process that was
taken for dead or of a service that has been replaced, changes nothing: so a job ends exactly once.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gnnsys.jobs.job_record import JobRecord, JobState, SpecEstimate
from gnnsys.jobs.job_spec import JobSpec
from gnnsys.jobs.process_identity import ProcessIdentity

VERSION = 2
_APPLICATION = 0x676E6E6A  # "gnnj": a file of SQLite that is no queue is refused
_BUSY_SECONDS = 30.0
_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, sweep INTEGER, spec TEXT NOT NULL,
    state TEXT NOT NULL, attempt INTEGER NOT NULL DEFAULT 0, submitted REAL NOT NULL, started REAL, first_step REAL,
    ended REAL, process TEXT, is_cancelling INTEGER NOT NULL DEFAULT 0, estimated INTEGER,
    estimate TEXT NOT NULL DEFAULT '', reserved INTEGER, measured INTEGER, is_alone INTEGER NOT NULL DEFAULT 0,
    num_lost INTEGER NOT NULL DEFAULT 0, graphs TEXT NOT NULL DEFAULT '{}',
    error TEXT NOT NULL DEFAULT '', result TEXT NOT NULL DEFAULT '{}', device TEXT, arrived REAL);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE endings (number INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, state TEXT NOT NULL, time REAL NOT NULL);
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# Version 1 did not write down which device had run a job: the next service does (`name_device`). A job had waited since
# it was submitted. A service of version 1 that runs meanwhile is not disturbed.
_FROM_VERSION_1 = (
    "ALTER TABLE jobs ADD COLUMN device TEXT",
    "ALTER TABLE jobs ADD COLUMN arrived REAL",
    "UPDATE jobs SET arrived = min(0.0, submitted - :now) WHERE ended IS NULL",
)
_COLUMNS = (
    "number, spec, state, sweep, attempt, submitted, started, first_step, ended, process, is_cancelling, estimated, "
    "estimate, reserved, measured, is_alone, graphs, num_lost, error, result, device, arrived"
)
_OLD_SHARING, _CLOCK = "sharing", "clock"
_LISTED = "SELECT value FROM json_each(?)"  # numbers of jobs, as one value


class QueueDatabase:
    """One connection, for one thread. `endings` has a primary key: a second end of a job would be an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._open()
        except sqlite3.Error as error:
            raise self._problem(error) from error

    def _open(self) -> None:
        version, application = self._pragma("user_version"), self._pragma("application_id")
        is_empty = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != _APPLICATION and not is_empty:
            raise ValueError(f"{self.path} is not a queue of gnnsys: name another folder")
        if version > VERSION:
            raise ValueError(
                f"{self.path} is of version {version} and this gnnsys knows up to {VERSION}: upgrade gnnsys, or name "
                "another folder"
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")  # a state that was told survives a power cut
        if is_empty:
            with self._transaction():
                if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id={_APPLICATION}")
                    self._db.execute(f"PRAGMA user_version={VERSION}")
        elif version < VERSION:
            with self._transaction():
                if self._pragma("user_version") == 1:  # nobody has done so meanwhile
                    for statement in _FROM_VERSION_1:
                        self._db.execute(statement, {"now": time.time()})
                    self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    def data_version(self) -> int:
        """Another number than before once another connection has changed something."""
        return self._pragma("data_version")

    # -- what is there

    def get(self, number: int) -> JobRecord:
        found = self.select("number = ?", [number])
        if not found:
            raise self._no_job(number)
        return found[0]

    def select(self, where: str = "1", values: Sequence[Any] = ()) -> list[JobRecord]:
        return [
            _record(row) for row in self._rows(f"SELECT {_COLUMNS} FROM jobs WHERE {where} ORDER BY number", values)
        ]

    def in_state(self, *states: JobState) -> list[JobRecord]:
        return self.select(f"state IN ({', '.join('?' * len(states))})", [state.value for state in states])

    def numbered(self, numbers: Iterable[int]) -> list[JobRecord]:
        """The jobs of these numbers, those that there are, in their order."""
        return self.select(f"number IN ({_LISTED})", [json.dumps(list(numbers))])

    def unended(self) -> list[tuple[int, JobState, bool]]:
        """Number, state and whether it is to be cancelled, of all jobs that wait or run: quick for thousands."""
        states = JobState.QUEUED.value, JobState.RUNNING.value
        wanted = "SELECT number, state, is_cancelling FROM jobs WHERE state IN (?, ?) ORDER BY number"
        return [
            (number, JobState(state), bool(is_cancelling))
            for number, state, is_cancelling in self._rows(wanted, states)
        ]

    def settings(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self._rows("SELECT name, value FROM settings")}

    # -- changes

    def set(self, settings: Mapping[str, Any]) -> None:
        with self._transaction():
            self._set(settings)

    def _set(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            self._db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, json.dumps(value)))

    def clock(self) -> float:
        """What the queue's clock showed when a service last wrote it down."""
        return float(self.settings().get(_CLOCK, 0.0))

    def keep_clock(self, seconds: float, arrived: Sequence[int] = ()) -> None:
        """Writes it down, and that these jobs, which no service had seen, have come now."""
        with self._transaction():
            self._set({_CLOCK: seconds})
            self._db.execute(
                f"UPDATE jobs SET arrived=? WHERE number IN ({_LISTED}) AND arrived IS NULL",
                (seconds, json.dumps(list(arrived))),
            )

    def add(
        self, specs: Sequence[JobSpec], estimates: Sequence[SpecEstimate], is_sweep: bool, key: str | None
    ) -> list[int]:
        """All of them or none. Where `key` has been given before, the jobs of that time: who is not sure asks again."""
        with self._transaction():
            if key is not None:
                like = "key = ? OR substr(key, 1, ?) = ?"
                there = self._db.execute(
                    f"SELECT number FROM jobs WHERE {like} ORDER BY number", (key, len(key) + 1, f"{key}\n")
                ).fetchall()
                if there:
                    return [number for (number,) in there]
            numbers: list[int] = []
            for index, (spec, found) in enumerate(zip(specs, estimates, strict=True)):
                own_key = key if key is None or not is_sweep else f"{key}\n{index}"
                sweep = numbers[0] if numbers else None
                cursor = self._db.execute(
                    "INSERT INTO jobs (key, sweep, spec, state, submitted, estimated, estimate, graphs)"
                    " VALUES (?,?,?,?,?,?,?,?)",
                    (own_key, sweep, spec.to_json(), JobState.QUEUED.value, time.time(), *found.columns()),
                )
                numbers.append(int(cursor.lastrowid or 0))
            if is_sweep and numbers:
                self._db.execute("UPDATE jobs SET sweep = ? WHERE number = ?", (numbers[0], numbers[0]))
            return numbers

    def set_estimate(self, numbers: Sequence[int], found: SpecEstimate) -> None:
        """One estimate for all of them."""
        with self._transaction():
            self._db.executemany(
                "UPDATE jobs SET estimated=?, estimate=?, graphs=? WHERE number=?",
                [(*found.columns(), number) for number in numbers],
            )

    def forget_estimates(self) -> None:
        """Jobs that have not ended are estimated anew, but those whose memory was stated."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET estimated=NULL, estimate='', graphs='{}' WHERE state IN (?, ?) AND estimate<>'stated'",
                (JobState.QUEUED.value, JobState.RUNNING.value),
            )

    def name_device(self, device: str) -> None:
        """Of what a queue of version 1 has measured: nobody wrote it down."""
        with self._transaction():
            self._db.execute("UPDATE jobs SET device=? WHERE device IS NULL AND attempt>0", (device,))
            self._db.execute(
                "INSERT OR IGNORE INTO settings SELECT ?, value FROM settings WHERE name=?",
                (sharing_setting(device), _OLD_SHARING),
            )
            self._db.execute("DELETE FROM settings WHERE name=?", (_OLD_SHARING,))

    def forget_measured(self, device: str) -> None:
        """Of jobs that wait: what another device than this has measured of them, and that they had to be alone."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET measured=NULL, is_alone=0 WHERE state=? AND attempt>0 AND device IS NOT ?",
                (JobState.QUEUED.value, device),
            )

    def start(self, number: int, process: ProcessIdentity, reserved: int, device: str = "cpu") -> int | None:
        """The number of the attempt that begins; None where the job is no longer queued."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET state=?, attempt=attempt+1, started=?, first_step=NULL, process=?, reserved=?,"
                " device=? WHERE number=? AND state=? AND is_cancelling=0",
                (
                    JobState.RUNNING.value,
                    time.time(),
                    process.to_json(),
                    reserved,
                    device,
                    number,
                    JobState.QUEUED.value,
                ),
            )
            if self._changes() != 1:
                return None
            return int(self._db.execute("SELECT attempt FROM jobs WHERE number=?", (number,)).fetchone()[0])

    def stepped(self, number: int, attempt: int, at: float) -> None:
        """When the first step of an attempt had ended."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET first_step=? WHERE number=? AND attempt=? AND state=?",
                (at, number, attempt, JobState.RUNNING.value),
            )

    def requeue(self, number: int, attempt: int, *, is_lost: bool = False, is_alone: bool | None = None,
                measured: int | None = None) -> bool:  # fmt: skip
        """Back into the queue: its process was lost, or it is to run again alone. False where that is over."""
        with self._transaction():
            self._db.execute(
                "UPDATE jobs SET state=?, process=NULL, num_lost=num_lost+?, is_alone=coalesce(?, is_alone),"
                " measured=coalesce(?, measured) WHERE number=? AND attempt=? AND state=?",
                (JobState.QUEUED.value, int(is_lost), is_alone, measured, number, attempt, JobState.RUNNING.value),
            )
            return self._changes() == 1

    def finish(
        self, number: int, attempt: int, state: JobState, *, result: Mapping[str, Any] | None = None, error: str = "",
        measured: int | None = None,
    ) -> bool:  # fmt: skip
        """The one end of a job. False where this attempt is not the one that runs."""
        with self._transaction():
            wanted = "SELECT number FROM jobs WHERE number=? AND attempt=? AND state=?"
            return bool(self._end(wanted, (number, attempt, JobState.RUNNING.value), state, result, error, measured))

    def refuse(self, numbers: Sequence[int], error: str) -> None:
        """Jobs that wait fail without having run."""
        with self._transaction():
            self._end_waiting(numbers, JobState.FAILED, error)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Those that wait are cancelled at once, of those that run the service is told: all in one transaction.

        ValueError where one of them is not there: then none is cancelled. A transaction each would take half a minute
        for thousands where the disk is busy.
        """
        with self._transaction():
            listed = [json.dumps(list(numbers))]
            there = {
                number for (number,) in self._db.execute(f"SELECT number FROM jobs WHERE number IN ({_LISTED})", listed)
            }
            for number in numbers:
                if number not in there:
                    raise self._no_job(number)
            self._db.execute(f"UPDATE jobs SET is_cancelling=1 WHERE number IN ({_LISTED}) AND ended IS NULL", listed)
            self._end_waiting(numbers, JobState.CANCELLED, "")

    def _end_waiting(self, numbers: Sequence[int], state: JobState, error: str) -> None:
        wanted = f"SELECT number FROM jobs WHERE number IN ({_LISTED}) AND state=?"
        self._end(wanted, (json.dumps(list(numbers)), JobState.QUEUED.value), state, None, error, None)

    def _end(
        self, wanted: str, values: Sequence[Any], state: JobState, result: Mapping[str, Any] | None, error: str,
        measured: int | None,
    ) -> int:  # fmt: skip
        """Ends the jobs that `wanted` selects, inside a transaction; how many."""
        ending = [number for (number,) in self._db.execute(wanted, values)]
        now, listed = time.time(), json.dumps(ending)
        self._db.execute(
            f"UPDATE jobs SET state=?, ended=?, process=NULL, result=?, error=?, measured=coalesce(?, measured)"
            f" WHERE number IN ({_LISTED})",
            (state.value, now, json.dumps(dict(result or {})), _storable(error), measured, listed),
        )
        self._db.execute(
            f"INSERT INTO endings SELECT number, attempt, state, ? FROM jobs WHERE number IN ({_LISTED})", (now, listed)
        )
        return len(ending)

    def endings(self) -> dict[int, tuple[int, str]]:
        """The attempt and the state that each job has ended with."""
        rows = self._rows("SELECT number, attempt, state FROM endings")
        return {number: (attempt, state) for number, attempt, state in rows}

    # -- SQLite

    def _changes(self) -> int:
        return int(self._db.execute("SELECT changes()").fetchone()[0])

    def _pragma(self, name: str) -> int:
        return int(self._rows(f"PRAGMA {name}")[0][0])

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._db.execute(statement, values).fetchall()
        except OverflowError:
            return []  # no job has so large a number
        except sqlite3.Error as error:
            raise self._problem(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # where the disk is full SQLite has done so already
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._problem(error) from error

    def _no_job(self, number: int) -> ValueError:
        return ValueError(f"there is no job {number} in {self.path.parent}: gnnsys jobs list shows those there are")

    def _problem(self, error: sqlite3.Error) -> Exception:
        """In words that name the remedy."""
        text, where = str(error), self.path.parent
        if "is full" in text or "I/O error" in text:
            return QueueDiskFull(
                f"nothing can be written to {where} ({error}): free some room on its disk. The queue is whole"
            )
        if "is locked" in text:
            return QueueLocked(
                f"{self.path} was held by another process for {_BUSY_SECONDS:g} s: end that one, or try again"
            )
        if "readonly" in text or "unable to open" in text or "permission" in text:
            return ValueError(f"{self.path} cannot be opened for writing ({error}): give --queue a folder of your own")
        if "not a database" in text or "malformed" in text:
            return ValueError(f"{self.path} is damaged or no queue ({error}): name another folder")
        return error


class QueueDiskFull(OSError):
    """Nothing was changed: the transaction was rolled back."""


class QueueLocked(TimeoutError):
    """Another process holds the database, perhaps one that was stopped in the midst. Nothing was changed."""


NOT_WRITTEN = (QueueDiskFull, QueueLocked)  # what a service tries again


def sharing_setting(device: str) -> str:
    """The setting that says which jobs gain nothing by running together on such a device."""
    return f"sharing on {device}"


def _storable(text: str) -> str:
    """Without halves of characters, which SQLite does not take."""
    return text.encode("utf-8", "replace").decode()


def _record(row: Sequence[Any]) -> JobRecord:
    names = _COLUMNS.split(", ")
    values = dict(zip(names, row, strict=True))
    process = values["process"]
    return JobRecord(
        **{
            **values,
            "spec": JobSpec.from_json(values["spec"]),
            "state": JobState(values["state"]),
            "process": None if process is None else ProcessIdentity.from_json(process),
            "is_cancelling": bool(values["is_cancelling"]),
            "is_alone": bool(values["is_alone"]),
            "result": json.loads(values["result"]),
            "graphs": json.loads(values["graphs"]),
        }
    )
