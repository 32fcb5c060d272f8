"""Serve parts of a graph to others, as a server on its own.

Jobs under torchrun start their servers themselves; this one outlives them. It answers until it is interrupted.
Whoever asks must have its key. Without --key one is made for this run, in a file that only its owner reads: the
loopback interface is open to every account of the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gnnsys.cli.early_refusals import check_are_parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts_dir", metavar="DIR", type=Path, help="a directory that gnnsys partition wrote")
    parser.add_argument("--parts", help="which parts, such as 0,1 (default: every part whose folder is there)")
    parser.add_argument("--bind", default="127.0.0.1", metavar="HOST[:PORT]", help="where to listen (127.0.0.1)")
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--key", type=Path, metavar="FILE", help="key file; it is made where it does not exist")
    key.add_argument("--no-key", action="store_true", help="serve every account of this machine (loopback only)")
    parser.add_argument("--bulk-port", type=int, default=0, metavar="PORT", help="for rows, with a key (default: any)")
    parser.add_argument("--tables", type=Path, metavar="DIR", help="save and load tables below DIR (default: nowhere)")
    parser.add_argument("--threads", type=int, default=2, help="requests answered at once (2)")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the files with their checksums")


def run(args: argparse.Namespace) -> int:
    check_are_parts(args.parts_dir)
    import contextlib
    import signal
    import tempfile

    from gnnsys.comm import is_loopback, make_key
    from gnnsys.session import GraphServer, wait_for_end

    host, endpoint = _endpoint(args.bind)
    if not 0 <= args.bulk_port < 65536:
        raise ValueError(f"--bulk-port must be a port below 65536, or 0 for any, got {args.bulk_port}")
    if args.key is None and not is_loopback(host):
        raise ValueError(f"--bind {args.bind} is open to other machines: give --key FILE, which is made if need be")
    own_parts = _own_parts(args.parts_dir, args.parts)
    with contextlib.ExitStack() as ends:
        path = args.key
        if path is None and not args.no_key:
            path = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="gnnsys-serve-"))) / "key"
        keys = None if path is None else make_key(path)
        server = GraphServer(
            bind=[endpoint], keys=keys, threads=args.threads, alone=True, folder=args.tables, bulk_port=args.bulk_port
        )
        ends.callback(server.close)
        server.open(str(args.parts_dir), own_parts, verify=not args.no_verify)
        (listens,) = server.start()
        key = "" if path is None else f", key={str(path)!r}"
        print(f"serving {', '.join(f'part {part}' for part in own_parts)} of {args.parts_dir} at {listens}")
        print(f"open it with gnnsys.open({str(args.parts_dir)!r}, servers=[{listens!r}]{key})", flush=True)
        wait_for_end(server.stopped, [signal.SIGINT, signal.SIGTERM], watch_input=False)
    return 0


def _own_parts(folder: Path, text: str | None) -> list[int]:
    from gnnsys.partition import open_parts, part_folder

    num_parts = open_parts(folder, verify=False).num_parts
    if text is None:
        found = [part for part in range(num_parts) if (folder / part_folder(part)).is_dir()]
        if not found:
            raise ValueError(f"{folder} has no folder of any of its {num_parts} parts")
        return found
    try:
        chosen = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--parts must be whole numbers with commas, such as 0,1, got {text!r}") from None
    if not all(0 <= part < num_parts for part in chosen):
        raise ValueError(f"--parts must be in [0, {num_parts}), got {text!r}")
    return chosen


def _endpoint(text: str) -> tuple[str, str]:
    """Address and ZeroMQ's endpoint of HOST, HOST:PORT, [IPV6]:PORT or IPV6."""
    from gnnsys.comm import endpoint, resolve

    bare = text.removeprefix("tcp://")
    host, colon, port = bare.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # no port, and perhaps a bare IPv6 address
        host, port = bare, "*"
    if not host or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise ValueError(f"--bind must be HOST or HOST:PORT, got {text!r}")
    address = resolve(host, f"--bind {text}")[0]
    return address, endpoint(address, port)
