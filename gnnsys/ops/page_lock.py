"""Host memory that a GPU reads where it is: pages are locked for it, and given back.

A file that is mapped for reading can be locked too, without a copy: all processes of a machine then share what the
kernel keeps of the file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnsys.ops._library import native
from gnnsys.ops._workspace import takes_outputs_only


class PageLock:
    """Locks `bytes` of memory at `address` for the GPUs of this process, until `close`.

    `error` is 0, or CUDA's number of what it refused it for: some file systems, maps that may be written, and limits.
    Whoever closes it waits first until no kernel reads the memory any more, and keeps the memory until then.
    """

    def __init__(self, address: int, bytes: int, device: torch.device, *, read_only: bool) -> None:
        self.bytes = bytes
        self._address = address
        self._on: Tensor | None = torch.empty(0, device=device)
        self.error = int(native.lock_pages(self._on, address, bytes, read_only))
        if self.error:
            self._on = None

    @property
    def is_held(self) -> bool:
        return self._on is not None

    def close(self) -> None:
        """Gives the pages back. Idempotent."""
        on, self._on = self._on, None
        if on is not None:
            native.unlock_pages(on, self._address)


@torch.library.register_fake("gnnsys::lock_pages")
def _(on, address, bytes, read_only) -> int:
    return 0


@torch.library.register_fake("gnnsys::unlock_pages")
def _(on, address) -> int:
    return 0


takes_outputs_only("lock_pages", "unlock_pages", device_types=["cuda"])
