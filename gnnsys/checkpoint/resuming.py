"""`resume`: the one call that a training script needs. Restores the newest checkpoint, and returns the Saver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gnnsys.checkpoint.folder_lock import FolderLock
from gnnsys.checkpoint.restore import restore
from gnnsys.checkpoint.saver import Saver
from gnnsys.checkpoint.snapshot import check_state
from gnnsys.checkpoint.states import States, sort_states, unwrapped
from gnnsys.comm import Group, Place

if TYPE_CHECKING:
    from gnnsys.session import Session


def resume(
    folder: str | os.PathLike[str],
    *,
    every: int | None = None,
    keep: int = 2,
    asynchronous: bool = True,
    session: Session | None = None,
    **states: Any,
) -> Saver:
    """Restores the newest complete checkpoint in `folder`, if there is one. Every rank calls it with the same names.

    `states`: modules (DDP or not), optimizers, schedulers, loaders, embeddings, tables, and anything else that has
    state_dict() and load_state_dict(). Generators of torch, numpy and Python are saved without being named. The saver
    saves every `every` steps and keeps the newest `keep`; without `every` only `saver.save()` saves. With
    `asynchronous` it writes a copy while training goes on, and where that would not fit into memory, or without
    `asynchronous`, training waits until all is written.

    On the CPU a resumed job does what an unbroken one would, bit for bit. With DDP on more than two ranks that takes
    `find_unused_parameters=True`: otherwise DDP lays its buckets out anew in every process, and sums in another order.

    >>> saver = gnnsys.resume("checkpoints/", every=100, model=model, optimizer=optimizer, loader=loader)
    >>> for epoch in range(loader.epoch, 10):
    ...     for batch in loader:
    ...         train(batch)
    ...         saver.step()
    """
    from gnnsys.session import current

    if session is None:
        session = current()
    place = Place.from_environment()
    if session is None and place is not None and place.world_size > 1:
        raise ValueError("this process was launched by torchrun: call gnnsys.init() before gnnsys.resume()")
    if session is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"torch.distributed has {dist.get_world_size()} ranks, and without a session each would save as if it were "
            "alone, over the others: call gnnsys.init() before gnnsys.resume()"
        )
    group = Group() if session is None else session.group
    problem, sorted_states = None, States()
    try:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
        sorted_states = sort_states(states)
        for name, value in [*sorted_states.shared.items(), *sorted_states.own.items()]:
            check_state(unwrapped(value).state_dict(), name)
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = error
    group.agree("resume", problem)
    told = group.gather("resume alike", [sorted_states.names(), every, keep, asynchronous])
    differ = [rank for rank, values in enumerate(told) if values != told[0]]
    if differ:
        raise ValueError(
            f"rank 0 and rank {differ[0]} call resume() with different states, every, keep or asynchronous: {told[0]} "
            f"and {told[differ[0]]}"
        )
    path = Path(folder).resolve()
    _check_folders(group, path)
    lock = FolderLock(path, group.nonce)
    found = restore(path, group, session, sorted_states, lock)
    return Saver(
        path, group, session, sorted_states, every=every, keep=keep, asynchronous=asynchronous, found=found,
        lock=lock,
    )  # fmt: skip


def _check_folders(group: Group, path: Path) -> None:
    """ValueError, on every rank, if ranks of one machine have different folders. Machines may differ."""
    first: dict[int, tuple[int, str]] = {}
    for rank, folder in enumerate(group.gather("resume folder", str(path))):
        other, known = first.setdefault(group.machine_of_rank[rank], (rank, folder))
        if folder != known:
            raise ValueError(
                f"ranks {other} and {rank} are on one machine and call resume() with different folders, {known} and "
                f"{folder}: a checkpoint is one folder for all ranks, which write files of their own to it"
            )
