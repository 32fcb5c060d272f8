"""Finds the subcommands, parses the line, calls one, and turns what users can get wrong into one line.

A subcommand is a module in `gnnsys.cli.commands` with a docstring (its first line is the help), `add_arguments(parser)`
and `run(args) -> int`, the exit code. Modules import torch and the rooms inside `run`, so `gnnsys --help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import gnnsys
from gnnsys.cli import commands

USER_ERRORS = (ValueError, OSError, ImportError)
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gnnsys", description="Graph neural network training in plain PyTorch.")
    parser.add_argument("--version", action=_Version, nargs=0, help="say which gnnsys this is, and end")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for found in pkgutil.iter_modules(commands.__path__):
        module = importlib.import_module(f"{commands.__name__}.{found.name}")
        summary = (module.__doc__ or "").splitlines()[0].rstrip(".")
        command = subparsers.add_parser(found.name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


class _Version(argparse.Action):
    """Looked up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"gnnsys {gnnsys.__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Bad input: one line on stderr and exit code 2 (GNNSYS_TRACEBACK=1 shows where it arose)."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except USER_ERRORS as error:
        if os.environ.get("GNNSYS_TRACEBACK"):
            raise
        print(f"gnnsys {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"gnnsys {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
