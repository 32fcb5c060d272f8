"""Say what is installed: versions, threads, the native core, and the peers that can be imported."""

from __future__ import annotations

import argparse


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
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        **found,
    }


def native_core() -> str:
    """Where the native core was loaded from, or why it was not."""
    try:
        import gnnsys._C
        import gnnsys.ops
    except ImportError as error:
        return f"missing: {str(error).splitlines()[0]}"
    return str(gnnsys._C.__file__)
