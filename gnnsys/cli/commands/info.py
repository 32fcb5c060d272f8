"""Say what is installed: versions, threads, the native core, and the peers that can be imported."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # nothing to choose


def run(args: argparse.Namespace) -> int:
    del args
    for name, value in facts().items():
        print(f"{name:<14}{value}")
    return 0


def facts() -> dict[str, str]:
    """What a bug report should begin with."""
    import torch

    import gnnsys
    from gnnsys.bench import environment, peers

    machine = environment()
    found = {name: peers.version(name) or f"- ({peers.find(name)})" for name in peers.PEERS}
    return {
        "gnnsys": gnnsys.__version__,
        "native core": native_core(),
        "torch": torch.__version__,
        "python": machine["versions"]["python"],
        "processor": f"{machine['processor']} ({machine['machine']}), {machine['cores']} cores",
        "threads": str(torch.get_num_threads()),
        "accelerator": accelerator(),
        **found,
    }


def accelerator() -> str:
    """The GPU, and how it can read parts: in files that are locked for it, or only in its own memory."""
    import torch

    if not torch.cuda.is_available():
        return "none"
    from gnnsys.ops import HAS_CUDA_KERNELS, WHY_NO_KERNELS

    name = torch.cuda.get_device_name()
    if not HAS_CUDA_KERNELS:
        return f"{name}; parts are sampled by the host: {WHY_NO_KERNELS}"
    return f"{name}; {how_files_are_read(torch.device('cuda', torch.cuda.current_device()))}"


def how_files_are_read(device: torch.device) -> str:
    """Where a mapped file can be locked for the device, or a copy of it; tried with one in the temporary folder."""
    import tempfile

    import numpy as np
    import torch

    from gnnsys.store import RegisteredFiles

    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/rows.npy", np.zeros(1 << 16, np.float32))
        files = RegisteredFiles(device)
        found = files.view(torch.from_numpy(np.load(f"{folder}/rows.npy", mmap_mode="c")))
        why_copied, is_copied = files.why_copied, files.copied_bytes > 0
        files.close()
    if found is None:
        return f"reads mapped files: no, {files.why_not}"
    return f"reads shared copies of files in memory: {why_copied}" if is_copied else "reads mapped files"


def native_core() -> str:
    """Where the native core was loaded from, or why it was not."""
    try:
        import gnnsys._C
        import gnnsys.ops
    except ImportError as error:
        return f"missing: {str(error).splitlines()[0]}"
    return f"{gnnsys._C.__file__} ({gnnsys.ops.SIMD_LEVEL})"
