"""The same pull through torch.distributed.rpc: rows in a process of its own, fetched by a remote call."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from gnnsys.bench.child_process import Child

ASKER, OWNER = "asker", "owner"
_SECONDS = 300.0


class HeldRows:
    """Made and kept by the owner."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self._rows = torch.randn(num_rows, dim)

    def fetch(self, ids: Tensor) -> Tensor:
        return self._rows.index_select(0, ids)


class RpcRows:
    """`pull(ids)` has the rows that the other process holds."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gnnsys-rpc-")
        self._meeting = Path(self._folder.name) / "meeting"
        self._size = (num_rows, dim)

    def __enter__(self) -> RpcRows:
        self._child = Child("gnnsys.bench.store.serve_rpc", str(self._meeting), env={"OMP_NUM_THREADS": "1"})
        try:
            join(ASKER, 0, self._meeting)
        except BaseException:
            self._child.close()
            raise
        self._rows = rpc.remote(OWNER, HeldRows, args=self._size)
        return self

    def __exit__(self, *_: object) -> None:
        del self._rows
        self._child.end()
        rpc.shutdown()
        self._child.close()
        self._folder.cleanup()

    def pull(self, ids: Tensor) -> Tensor:
        return self._rows.rpc_sync(timeout=_SECONDS).fetch(ids)


def join(name: str, rank: int, meeting: Path) -> None:
    """Over sockets: left to itself, TensorPipe moves rows through shared memory, which no other machine has."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=_SECONDS, _transports=["uv"], _channels=["basic"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses what it calls deprecated itself
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
