"""Files of a checkpoint that a machine does not have, from one that does: through a table of bytes in the shards.

Machines with disks of their own have only what they wrote themselves, and a job may come back with its machines in
another order, or with more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gnnsys.checkpoint.files import Source
from gnnsys.comm.rendezvous import Group
from gnnsys.store import Store

if TYPE_CHECKING:
    from gnnsys.session import Session

_ROW = 1 << 16  # bytes
_SECONDS = 1800.0  # for all machines to send or take what they lack


def bring(
    group: Group,
    session: Session | None,
    path: Path,
    files: Sequence[str],
    holders: Mapping[str, list[int]],
    sizes: Mapping[str, int],
) -> dict[str, Source]:
    """Every one of `files` on every rank: as a path where its machine has it. All ranks call it alike."""
    found: dict[str, Source] = {file: path / file for file in files if group.machine in holders[file]}
    everyone = set(range(group.num_machines))
    away = [file for file in files if set(holders[file]) != everyone]
    if not away:
        return found
    assert session is not None and session.client is not None, "a process that is alone has every file"
    machines = list(range(group.num_machines))
    store = Store(
        machine_of_part=machines, machine=group.machine, client=session.client, rank=group.rank,
        world_size=group.world_size, timeout=group.timeout,
    )  # fmt: skip
    name, problem, begin = f"checkpoint/{group.nonce[:16]}", None, _begins(away, sizes)
    try:
        store.create(name, begin[away[-1]] + _rows(sizes[away[-1]]), (_ROW,), torch.uint8)
        for file in away:
            if group.is_leader and group.machine == holders[file][0]:
                _send(store, name, begin[file], path / file)
        store.flush()
    except (RuntimeError, ValueError, OSError) as error:
        problem = error
    group.agree("checkpoint's files sent", problem, _SECONDS)
    try:
        for file in away:
            if file not in found:
                ids = torch.arange(begin[file], begin[file] + _rows(sizes[file]))
                found[file] = store.tensor(name)[ids].flatten()[: sizes[file]].numpy().tobytes()
    except (RuntimeError, ValueError, OSError) as error:
        problem = error
    group.agree("checkpoint's files taken", problem, _SECONDS)
    if group.rank == 0:
        store.drop(name)
    return found


def _send(store: Store, name: str, first: int, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content.extend(bytes(-len(content) % _ROW))
    rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, _ROW)
    store.push(name, torch.arange(first, first + rows.shape[0]), rows).result()


def _rows(size: int) -> int:
    return max(1, -(-size // _ROW))


def _begins(files: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    begin, at = {}, 0
    for file in files:
        begin[file] = at
        at += _rows(sizes[file])
    return begin
