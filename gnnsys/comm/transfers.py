"""Transfers of torch.distributed's, begun and waited for, and threads that wait. One that fails is TrainerLost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from gnnsys.comm.errors import TrainerLost


def begin_transfer(transfer: Callable[..., Any], rows: Tensor, peer: int, tag: int) -> Any:
    """Begins one transfer; where the connection is gone already, gloo says so here."""
    try:
        return transfer([rows], peer, tag)
    except RuntimeError as error:
        raise trainer_lost(peer, 0.0, "an exchange of rows", error) from error


def finish_transfer(work: Any, peer: int, limit: timedelta) -> None:
    """Waits for one transfer; what gloo says of a failed one in our words."""
    began = time.monotonic()
    try:
        work.wait(limit)
    except Exception as error:
        raise trainer_lost(peer, time.monotonic() - began, "an exchange of rows", error) from error


def trainer_lost(peer: int, silent_for: float, what: str, error: Exception) -> TrainerLost:
    name = "a rank" if peer < 0 else f"rank {peer}"
    message = (
        f"{name} was lost, or was not heard of for {silent_for:.1f} s, in {what}: look at its output, raise timeout if "
        f"it may be that late, or start again from the last checkpoint ({error})"
    )
    return TrainerLost(message, rank=peer, silent_for=silent_for)


class Waiter(threading.Thread):
    """A thread that waits for a peer inside gloo, or for work at the queue `idle`. None in the queue ends it."""

    idle: SimpleQueue[Any] | None = None


def start_waiter(name: str, target: Callable[..., None], *args: Any, idle: SimpleQueue[Any] | None = None) -> Waiter:
    thread = Waiter(target=target, args=args, name=name, daemon=True)
    thread.idle = idle
    thread.start()
    return thread
