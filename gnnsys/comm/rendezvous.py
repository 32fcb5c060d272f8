"""How the ranks of a job meet: over torchrun's own store, under a nonce that only this start of the job knows.

Waits poll, so that Ctrl-C is heard, and each has a deadline whose error names the ranks that never came, or says sooner
that one of them counts as dead. `joining` makes the group; alone it has one rank and no store.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gnnsys.comm.bounded_store import BoundedStore
from gnnsys.comm.errors import CommError, TrainerLost

if TYPE_CHECKING:
    from gnnsys.comm.joining import LaunchInfo

PREFIX = "gnnsys"
GRACE_SECONDS = 2.0  # how much longer others wait, so that what rank 0 has to say about a deadline reaches them
_POLL_SECONDS = (0.002, 0.05)

Silences = Callable[[Sequence[int]], Sequence[float]]


class RendezvousError(RuntimeError):
    """The group did not come together, or one of its ranks did not come to a meeting."""


class Group:
    """The ranks of one start of a job, and how they tell each other small things. Values are plain JSON.

    Every rank calls the same methods with the same names in the same order. `machine` numbers the torchrun agents.
    """

    def __init__(
        self,
        place: LaunchInfo | None = None,
        store: dist.Store | None = None,
        nonce: str = "",
        timeout: float = 60.0,
        store_of: Callable[[], dist.Store] | None = None,
    ) -> None:
        self.rank = place.rank if place else 0
        self.world_size = place.world_size if place else 1
        self.local_rank, self.local_world_size = 0, 1
        self.machine, self.num_machines = 0, 1
        self.machine_of_rank = [0]
        self.address = place.address if place else "127.0.0.1"
        self.nonce = nonce or secrets.token_hex(16)
        self.timeout = timeout
        self._hosts_store = bool(place and place.hosts_store and store is not None)
        self._store = None if store is None else BoundedStore(store)
        self._store_of = store_of
        self._turns: dict[str, int] = {}
        self._silences: Silences | None = None
        self._lost_after = math.inf
        self._store_seconds = timeout

    def watch(self, silences: Silences, lost_after: float) -> None:
        """From now on a meeting ends with TrainerLost where a rank that does not come was silent for `lost_after`.

        `silences(ranks)` are seconds; where it raises, nobody knows.
        """
        self._silences, self._lost_after = silences, lost_after
        self._store_seconds = lost_after
        if self._store is not None:
            self._store.seconds = lost_after

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its machine."""
        return self.local_rank == 0

    @property
    def incarnation(self) -> int:
        """A number for this start of the job, the same on every rank."""
        return int(self.nonce[:12], 16)

    @property
    def process_group_store(self) -> dist.Store | None:
        """A connection of its own for `init_process_group`, under the job's nonce; None in a group of one."""
        return None if self._store_of is None else dist.PrefixStore(f"{PREFIX}/{self.nonce}/pg", self._store_of())

    def apart(self, name: str) -> Group:
        """The same ranks with a connection and names of their own: for a thread that meets others beside this one."""
        other = copy.copy(self)
        turn = self._turns[f"apart {name}"] = self._turns.get(f"apart {name}", -1) + 1  # keys of the last one remain
        other.nonce, other._turns, other._hosts_store = f"{self.nonce}/{name}-{turn}", {}, False
        other._store = None if self._store_of is None else BoundedStore(self._store_of(), self._store_seconds)
        return other

    def gather(self, name: str, value: Any = None, timeout: float | None = None) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self._store is None:
            if self.world_size > 1:
                raise RendezvousError(f"rank {self.rank} has left its group: it cannot meet the others for {name!r}")
            return [json.loads(json.dumps(value))]
        timeout = self.timeout if timeout is None else timeout
        key = self._turn(name)
        self._call(lambda store: store.set(f"{key}/{self.rank}", json.dumps(value)))
        ranks = [f"{key}/{rank}" for rank in range(self.world_size)]
        if self.rank == 0:
            try:
                came = self._wait_for_ranks(ranks, ranks, name, timeout)
            except TrainerLost as lost:
                self._set(f"{key}/all", {"error": str(lost), "lost": lost.to_json()})
                raise
            if not came:
                message = self._absent(name, ranks, timeout)
                self._set(f"{key}/all", {"error": message})
                raise RendezvousError(message)
            values = [json.loads(text) for text in self._call(lambda store: store.multi_get(ranks))]
            self._set(f"{key}/all", {"values": values})
            self._clear(name)
            return values
        if not self._wait_for_ranks([f"{key}/all"], ranks, name, timeout + GRACE_SECONDS):
            raise RendezvousError(self._absent(name, ranks, timeout))
        answer = self._get(f"{key}/all")
        if "lost" in answer:
            raise TrainerLost(answer["error"], **answer["lost"])
        if "error" in answer:
            raise RendezvousError(answer["error"])
        return list(answer["values"])

    def share(self, name: str, value: Any = None, root: int = 0, timeout: float | None = None) -> Any:
        """What `root` gave, on every rank."""
        if self._store is None:
            return json.loads(json.dumps(value))
        timeout = self.timeout if timeout is None else timeout
        key = self._turn(name)
        if self.rank == root:
            self._set(key, value)
        elif not self._wait([key], timeout):
            raise RendezvousError(f"rank {root} did not arrive at {name!r} within {timeout:g} s")
        return self._get(key)

    def share_secret(self, name: str, value: Any = None, root: int = 0, timeout: float | None = None) -> Any:
        """The same as `share`; it is deleted from the store once every rank has it, or one does not come for it."""
        key = f"{PREFIX}/{self.nonce}/{name}/{self._turns.get(name, -1) + 1}"
        try:
            shared = self.share(name, value, root, timeout)
            self.barrier(f"{name} taken", timeout)
        finally:
            if self._store is not None and self.rank == root:
                with contextlib.suppress(RuntimeError, OSError):  # it went with the store
                    self._store.delete_key(key)
        return shared

    def barrier(self, name: str = "barrier", timeout: float | None = None) -> None:
        """Returns when every rank has called it."""
        self.gather(name, None, timeout)

    def agree(self, name: str, error: BaseException | str | None, timeout: float | None = None) -> None:
        """Where a rank has something to complain of, every rank raises the same ValueError, in words of the first."""
        texts = self.gather(name, None if error is None else str(error) or type(error).__name__, timeout)
        complaints = {rank: text for rank, text in enumerate(texts) if text is not None}
        if complaints:
            first = next(iter(complaints.values()))
            more = sum(text != first for text in complaints.values())
            cause = error if isinstance(error, BaseException) else None
            raise ValueError(f"{first} (and {more} other ranks failed otherwise)" if more else first) from cause

    def leave(self) -> None:
        """Says that this rank needs nobody any more. Others see it in `left`."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError, OSError):  # whoever held the store is gone: nobody is left to tell
                self._store.set(f"{PREFIX}/{self.nonce}/left/{self.rank}", "")

    def left(self) -> list[int]:
        """The ranks that have left; all of them where the store is gone with whoever held it."""
        ranks = list(range(self.world_size))
        if self._store is None:
            return ranks
        try:
            keys = {rank: f"{PREFIX}/{self.nonce}/left/{rank}" for rank in ranks}
            return (
                ranks if self._store.check(list(keys.values())) else [r for r in ranks if self._store.check([keys[r]])]
            )
        except (RuntimeError, OSError):
            return ranks

    def all_left(self, timeout: float = 0.0) -> bool:
        """Whether every rank has left, waiting up to `timeout` for it."""
        return poll(lambda: len(self.left()) == self.world_size, timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Leaves. Whoever holds the store waits a little for the others, which still may read from it. Idempotent."""
        self.leave()
        if self._hosts_store:
            self.all_left(timeout)
        if self._store is not None:
            self._store.close()
        self._store = self._store_of = None

    # -- the store -----------------------------------------------------------------------------------------------------

    def _turn(self, name: str) -> str:
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        return f"{PREFIX}/{self.nonce}/{name}/{turn}"

    def _clear(self, name: str) -> None:
        """Removes the meeting before this one from the store: who came to this one has read all of that."""
        if self._turns[name] == 0:
            return
        before = f"{PREFIX}/{self.nonce}/{name}/{self._turns[name] - 1}"
        for key in [f"{before}/all", *(f"{before}/{rank}" for rank in range(self.world_size))]:
            self._call(partial(_delete, key=key))

    def _call(self, act: Callable[[BoundedStore], Any]) -> Any:
        if self._store is None:
            raise RendezvousError("the group is closed")
        try:
            return act(self._store)
        except (RuntimeError, OSError) as error:
            where = f"rank {self.rank} lost torchrun's store at {self.address}"
            raise RendezvousError(
                f"{where}: the process that holds it has ended or cannot be reached ({first_line(error)})"
            ) from error

    def _set(self, key: str, value: Any) -> None:
        self._call(lambda store: store.set(key, json.dumps(value)))

    def _get(self, key: str) -> Any:
        return json.loads(self._call(lambda store: store.get(key)))

    def _wait(self, keys: Sequence[str], timeout: float) -> bool:
        return poll(lambda: self._call(lambda store: store.check(list(keys))), timeout)

    def _wait_for_ranks(self, keys: Sequence[str], ranks: Sequence[str], name: str, timeout: float) -> bool:
        """As `_wait`; TrainerLost where a rank whose key in `ranks` is not there, or rank 0, counts as dead.

        Others than rank 0 are more patient, so that what rank 0 says of it reaches them.
        """
        if self._silences is None:
            return self._wait(keys, timeout)
        lost_after = self._lost_after + (GRACE_SECONDS if self.rank else 0.0)
        deadline = time.monotonic() + timeout
        while not self._wait(keys, max(0.0, min(self._lost_after / 4, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            missing = [rank for rank, key in enumerate(ranks) if self._awaits(rank) or not self._wait([key], 0)]
            try:
                silences = self._silences(missing)
            except CommError:  # the server cannot say
                continue
            for rank, silence in zip(missing, silences, strict=True):
                if silence >= lost_after:
                    raise TrainerLost(
                        f"rank {rank} was not heard of for {silence:.1f} s while others waited for it at {name!r}: it "
                        "has ended, is stopped, or cannot be reached. Look at its output, and start again from the "
                        "last checkpoint; raise lost_after if it may pause that long",
                        rank=rank,
                        silent_for=silence,
                    )
        return True

    def _awaits(self, rank: int) -> bool:
        """Whether this rank waits for that one even after it came: rank 0, which tells the others what all gave."""
        return rank == 0 and self.rank != 0

    def _absent(self, name: str, keys: Sequence[str], timeout: float) -> str:
        missing = [rank for rank, key in enumerate(keys) if not self._wait([key], 0)]
        return absence(missing or [0], f"at {name!r}", timeout)


def absence(ranks: Sequence[int], where: str, timeout: float) -> str:
    """One line about ranks that never came."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:16]))}"
    rest = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return (
        f"{who}{rest} did not arrive {where} within {timeout:g} s: look at the output of that process, "
        f"or give a longer timeout if it is only slow"
    )


def poll(ready: Callable[[], bool], timeout: float) -> bool:
    """Whether it became true in time. Sleeps ever longer between looks, up to a twentieth of a second."""
    deadline = time.monotonic() + timeout
    pause, longest = _POLL_SECONDS
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True


def _delete(store: BoundedStore, key: str) -> None:
    store.delete_key(key)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
