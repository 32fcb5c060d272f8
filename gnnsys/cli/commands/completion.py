"""Print a script that has your shell complete commands, options and files of gnnsys.

bash: eval "$(gnnsys completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit;
fish: gnnsys completion fish > ~/.config/fish/completions/gnnsys.fish
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that you use")


def run(args: argparse.Namespace) -> int:
    from gnnsys.cli import shell_completion
    from gnnsys.cli.main import build_parser

    script = {"bash": shell_completion.for_bash, "zsh": shell_completion.for_zsh, "fish": shell_completion.for_fish}
    print(script[args.shell](shell_completion.words_of(build_parser())), end="")
    return 0
