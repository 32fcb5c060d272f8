"""Parses the line, calls a subcommand, and turns what users can get wrong into one line.

A subcommand is a module in `gnnsys.cli.commands`, listed in its `GROUPS`, with a docstring (its first line is the
help), `add_arguments(parser)` and `run(args) -> int`, the exit code. Modules import torch and the rooms inside `run`,
so `gnnsys --help` is quick.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import gnnsys
from gnnsys.cli import commands
from gnnsys.observe import shorten_spinning

USER_ERRORS = (ValueError, OSError, ImportError)
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    modules = {
        name: importlib.import_module(f"{commands.__name__}.{name}")
        for names in commands.GROUPS.values()
        for name in names
    }
    parser = _Parser(
        prog="gnnsys",
        usage="gnnsys [-h] [--version] COMMAND ...",
        description="Graph neural network training in plain PyTorch.",
        epilog=_grouped({name: _summary(module) for name, module in modules.items()}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="say which gnnsys this is, and end")
    subparsers = parser.add_subparsers(
        prog="gnnsys",
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=argparse.ArgumentParser,
        help=argparse.SUPPRESS,
    )
    for name, module in modules.items():
        command = subparsers.add_parser(name, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _summary(module: ModuleType) -> str:
    return (module.__doc__ or "").splitlines()[0].rstrip(".")


def _grouped(summaries: Mapping[str, str]) -> str:
    """Commands by what one wants to do, each with its summary."""
    lines, width = [], max(40, shutil.get_terminal_size().columns - 2)  # as argparse has it
    for group, names in commands.GROUPS.items():
        lines.append(f"{group}:")
        for name in names:
            lines += textwrap.wrap(f"  {name:<12}{summaries[name]}", width, subsequent_indent=" " * 14)
        lines.append("")
    return "\n".join([*lines, "gnnsys COMMAND --help says more of each."])


class _Parser(argparse.ArgumentParser):
    """Of the line up to the command: a command that does not exist is answered with the one that is like it."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '([^']*)'", message):
            names = list(itertools.chain(*commands.GROUPS.values()))
            near = difflib.get_close_matches(found[1], names, n=1)
            meant = f"did you mean {near[0]}?" if near else "gnnsys --help lists the commands"
            message = f"there is no command {found[1]!r}: {meant}"
        super().error(message)


class _Version(argparse.Action):
    """Looked up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"gnnsys {gnnsys.__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Bad input: one line on stderr and exit code 2 (GNNSYS_TRACEBACK=1 shows where it arose)."""
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return EXIT_USER_ERROR
    args = parser.parse_args(argv)
    shorten_spinning()
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
