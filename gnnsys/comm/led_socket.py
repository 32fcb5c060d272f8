"""A client's socket, and who reads it: the client's thread, or a caller that waits for a reply.

A reply that one thread reads for another costs a hand-over, which takes longer than reading it. So a caller that waits
takes the lead: it reads, and delivers what comes for others too. Meanwhile this socket does not wake the client's
thread. When the caller has what it waits for, or its time is over, the client's thread reads again: at once, or from
the next message that is sent on where nothing is outstanding. One caller leads at a time; the others wait until
somebody delivers to them.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sized
from typing import Any

from gnnsys.comm.sealing import SealedChannel
from gnnsys.comm.sockets import SharedSocket, WakeUp

_POLL_SECONDS = 3600.0  # at a time: poll() takes no number of milliseconds that is too large
_CHECK_SECONDS = 0.001  # for the client's thread to see that nobody leads
_LEAVE_SECONDS = 1.0  # for a leader to let go of a socket that is to be closed


class LedSocket(SharedSocket):
    """`epoll` is what the client's thread sleeps on; `wake_up` is how others wake it.

    `awaited` is what replies are awaited for on this socket, where there are no other messages that matter.
    """

    def __init__(
        self, socket: Any, wake_up: WakeUp, epoll: select.epoll, channel: SealedChannel | None = None,
        awaited: Sized | None = None,
    ) -> None:  # fmt: skip
        super().__init__(socket, wake_up, channel)
        self.is_led = False
        self._awaited = awaited
        self._wakes_thread = True
        self.leader_wake_up = WakeUp()
        self._thread_wake_up = wake_up
        self._epoll = epoll
        self._lead = threading.Lock()
        self._is_leaving = False
        self._poller = select.poll()
        for fd in (self.fd, self.leader_wake_up.fileno()):
            self._poller.register(fd, select.POLLIN)
        epoll.register(self.fd, select.EPOLLIN)

    def lead(self, is_there: Callable[[], int], until: float, read: Callable[[bool], None]) -> None:
        """Calls `read(is_told)` in this thread whenever something comes, until `is_there()` or the time `until`.

        Returns at once where another caller leads, and early where the socket is about to be closed. Whoever makes
        `is_there()` true from another thread calls `leader_wake_up.wake()` afterwards. Where the socket is still `hot`
        when this returns, more may have come, and the descriptor does not say so.
        """
        if not self._lead.acquire(blocking=False) and (self.is_led or not self._lead.acquire(timeout=_CHECK_SECONDS)):
            return
        wake_up = self.leader_wake_up
        try:
            self._take_over()
            while not (self._is_leaving or self.is_cut):
                wake_up.sleeping = True
                wait = until - time.monotonic()
                if wait <= 0 or is_there():
                    return
                is_told = False
                if not self.hot:
                    for fd, _ in self._poller.poll(1000 * min(wait, _POLL_SECONDS) + 1):
                        if fd == self.fd:
                            is_told = True
                        else:
                            wake_up.clear()
                wake_up.sleeping = False
                read(is_told)
                if is_there():
                    return
        finally:
            wake_up.sleeping = False
            try:
                self._give_back()
            finally:
                self._lead.release()

    def check_leader(self) -> None:
        """For the client's thread, from time to time: takes the socket back from a leader that was cut off midway."""
        if self._lead.acquire(blocking=False):
            self._give_back()
            self._wake_thread()
            self._lead.release()

    def close(self, linger_ms: int) -> None:
        self._is_leaving = True
        self.leader_wake_up.wake()
        has_left = self._lead.acquire(timeout=_LEAVE_SECONDS)  # and nobody leads again
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(self.fd)
        super().close(linger_ms)
        if has_left:
            self.leader_wake_up.close()

    def _look_for_news(self) -> None:
        # A leader leaves without asking whether there is more, so `hot` may be wrong: it is asked here instead, while
        # the other end works. Where nobody leads, the sender reads what there is: to wake a thread would cost more.
        self.hot = self._has_news()
        if self.is_led:
            if self.hot:
                self._wake_up.wake()
        elif not self._wakes_thread:
            self._wake_thread()

    def _take_over(self) -> None:
        # A sender that finds something sets `hot` before it looks whom to wake; here it is the other way round.
        self._wake_up = self.leader_wake_up
        self._epoll.modify(self.fd, 0)
        self._wakes_thread = False  # not before: a sender that sees it undoes the line above, and must come behind it
        self.is_led = True

    def _give_back(self) -> None:
        # Whoever sends adds to `awaited` before it looks at `is_led`; here it is the other way round.
        self.is_led = False
        self._wake_up = self._thread_wake_up
        if self._awaited is None or self._awaited:
            self._wake_thread()

    def _wake_thread(self) -> None:
        """Has the client's thread woken by what comes from now on."""
        self._wakes_thread = True
        try:  # noqa: SIM105 - a `suppress` costs as much as the call
            self._epoll.modify(self.fd, select.EPOLLIN)
        except (OSError, ValueError):  # closed while this caller was held up
            pass
