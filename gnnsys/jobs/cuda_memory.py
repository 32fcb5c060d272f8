"""Memory of a GPU that several processes read, by the driver's own functions (libcuda), without torch.

Torch's allocator cuts tensors from segments, and a handle is always one of a whole segment; its reference counts stay
wrong after a user was killed. So a block that is shared is an allocation of its own: whoever made it hands out 64
bytes, and each process that opens them has the block in its address space. The driver forgets a process when it ends,
however it does; the block itself ends when its maker frees it or ends, and the last user has closed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

HANDLE_BYTES = 64
_ON_DEMAND = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_OUT_OF_MEMORY = 2
_LIBRARY = "libcuda.so.1"


class CudaError(RuntimeError):
    """What the driver refused, in its own words."""


class CudaOutOfMemory(CudaError):
    """The device has no room for it."""


def device_bytes(index: int = 0) -> int:
    """How much memory a device has. No context is made: this process takes nothing of it."""
    cuda, found = _driver(), ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(found), _device(cuda, index))
    return found.value


def device_name(index: int = 0) -> str:
    """As the driver says it, such as "NVIDIA H200"."""
    cuda, found = _driver(), ctypes.create_string_buffer(256)
    _call(cuda, "cuDeviceGetName", found, ctypes.c_int(len(found)), _device(cuda, index))
    return found.value.decode(errors="replace")


def _driver() -> ctypes.CDLL:
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaError(f"there is no {_LIBRARY}: install NVIDIA's driver") from error
    _call(cuda, "cuInit", ctypes.c_uint(0))
    return cuda


def _device(cuda: ctypes.CDLL, index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    return device


def _call(cuda: ctypes.CDLL, name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code == 0:
        return
    said = ctypes.c_char_p()
    cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(said))
    text = f"{name} failed with {code}: {(said.value or b'unknown error').decode()}"
    raise CudaOutOfMemory(text) if code == _OUT_OF_MEMORY else CudaError(text)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class CudaDevice:
    """One device by its number among those that this process sees, with the context that torch uses, too."""

    def __init__(self, index: int = 0) -> None:
        self._cuda, self._context = _driver(), ctypes.c_void_p()
        device = _device(self._cuda, index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, num_bytes: int) -> int:
        """The address of a block; CudaOutOfMemory where there is no room."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        """64 bytes by which another process opens a block that was allocated here."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, exported: bytes) -> int:
        """The address that another process's block has here."""
        if len(exported) != HANDLE_BYTES:
            raise ValueError(f"a handle has {HANDLE_BYTES} bytes, got {len(exported)}")
        handle, address = _Handle.from_buffer_copy(exported), ctypes.c_uint64()
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_ON_DEMAND))
        return address.value

    def close(self, address: int) -> None:
        """Takes a block that was opened out of this process, once all that was queued here is done."""
        with self._current():
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, as the driver says."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the device's context that of this thread, and puts the one before back."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        _call(self._cuda, name, *arguments)


class MappedBlock:
    """A block of another process, opened here until nothing refers to it or to one of its pieces."""

    def __init__(self, device: CudaDevice, handle: bytes) -> None:
        self.address = device.open(handle)
        weakref.finalize(self, _close_quietly, device, self.address).atexit = False

    def piece(self, offset: int, num_bytes: int) -> BlockPiece:
        return BlockPiece(self, offset, num_bytes)


class BlockPiece:
    """Some bytes of a block. Torch makes a tensor of it without a copy (`torch.as_tensor`), which keeps it."""

    def __init__(self, block: MappedBlock, offset: int, num_bytes: int) -> None:
        self._block, self._offset, self._num_bytes = block, offset, num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self._block.address + self._offset
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _close_quietly(device: CudaDevice, address: int) -> None:
    """A context that an illegal address has ended cannot close anything: the driver does, with the process."""
    with contextlib.suppress(CudaError):
        device.close(address)
