"""Completion by real shells: what `gnnsys completion SHELL` prints is loaded, and asked as a user's TAB would."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.cli.main import build_parser
from gnnsys.cli.shell_completion import FILES, FOLDERS, NOTHING, for_bash, for_fish, for_zsh, words_of

# Bash fills COMP_WORDS as it cuts a line: "=" is a word of its own.
ASK_BASH = """
eval "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_gnnsys && printf '%s\\n' "${COMPREPLY[@]}"
complete -p gnnsys
"""


def completed(*typed: str, folder: Path | None = None) -> set[str]:
    script = for_bash(words_of(build_parser()))
    asked = subprocess.run(
        ["bash", "--norc", "-c", ASK_BASH, "bash", script, *typed],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )
    assert asked.returncode == 0, asked.stderr
    *found, registered = asked.stdout.splitlines()
    assert registered == "complete -F _gnnsys gnnsys"
    return set(found) - {""}


@pytest.fixture(scope="module", autouse=True)
def has_bash():
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")


def test_bash_completes_commands():
    assert completed("gnnsys", "in") == {"info", "inspect"}
    assert {"demo", "doctor", "launch", "--version"} <= completed("gnnsys", "")
    assert completed("gnnsys", "nonsense", "in") == {"info", "inspect"}


def test_bash_completes_the_options_of_the_command_that_was_typed():
    assert completed("gnnsys", "doctor", "--ho") == {"--hosts"}
    assert completed("gnnsys", "info", "--") == {"--help"}
    assert "--restarts" in completed("gnnsys", "launch", "--local", "2", "--re")


@pytest.mark.parametrize("typed", [["--scale", ""], ["--scale", "="], ["--scale", "=", ""]])
def test_bash_completes_the_choices_of_an_option(typed: list[str]):
    assert completed("gnnsys", "bench", "ops", *typed) == {"small", "full"}
    assert completed("gnnsys", "completion", "z") == {"zsh"}


def test_bash_completes_files_and_folders_where_they_are_wanted(tmp_path: Path):
    (tmp_path / "hosts.txt").touch()
    (tmp_path / "parts").mkdir()
    assert completed("gnnsys", "push", "", folder=tmp_path) == {"parts"}
    assert completed("gnnsys", "push", "parts", "--hosts", "", folder=tmp_path) == {"hosts.txt", "parts"}
    assert completed("gnnsys", "launch", "--local", "", folder=tmp_path) == set()


def test_every_option_of_every_command_is_in_every_script():
    """Subcommands of subcommands too."""
    parser = build_parser()
    top = words_of(parser)
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    assert {command.path for command in top.commands} == {(name,) for name in commands.choices}
    scripts = [for_bash(top), for_zsh(top), for_fish(top)]
    for name, command in commands.choices.items():
        for option in (string for action in command._actions for string in action.option_strings):
            bare = option.lstrip("-")
            spelled = (option, option, f"-{'l' if option.startswith('--') else 's'} {bare}")
            assert all(f"{word}" in script for word, script in zip(spelled, scripts, strict=True)), (name, option)


def test_a_parser_is_read_with_those_below_it():
    parser = argparse.ArgumentParser(description="Top.")
    below = parser.add_subparsers().add_parser("run", description="Runs it.\n\nMore.")
    below.add_argument("--count", "-c", type=int, help="how often; 3%% of it")
    below.add_argument("--quick", action="store_true")
    below.add_argument("--out", metavar="DIR")
    below.add_argument("number", type=int)
    below.add_argument("file", metavar="FILE", nargs="?")
    (run,) = words_of(parser).commands
    assert (run.path, run.help, run.place) == (("run",), "Runs it", FILES)
    assert [option.value for option in run.options] == ["", NOTHING, "", FOLDERS]
    assert run.options[1].names == ("--count", "-c") and run.options[1].help == "how often"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_itself_reads_the_script(shell: str, capsys: pytest.CaptureFixture[str]):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    read = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (read.returncode, read.stderr) == (0, "")


def test_fish_completes_commands_options_and_choices():
    if shutil.which("fish") is None:
        pytest.skip("there is no fish")
    script = for_fish(words_of(build_parser()))

    def asked(line: str) -> set[str]:
        program = f"{script}\ncomplete -C '{line}'"
        found = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stderr
        return {each.split("\t")[0] for each in found.stdout.splitlines()}

    assert asked("gnnsys in") == {"info", "inspect"}
    assert asked("gnnsys doctor --ho") == {"--hosts"}
    assert asked("gnnsys bench ops --scale ") == {"small", "full"}
    assert asked("gnnsys completion z") == {"zsh"}


# What zsh gives only to a user who types is stood in for: the functions that show what was found.
ASK_ZSH = """
compdef() { : } ; compset() { : } ; _describe() { print -l -- $described } ; compadd() { print -l -- $described }
_files() { print -- files $@ }
eval "$1"; shift
words=("$@"); CURRENT=$#
_gnnsys
"""


def test_zsh_completes_commands_options_and_choices():
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh")
    script = for_zsh(words_of(build_parser()))

    def asked(*typed: str) -> set[str]:
        command = ["zsh", "-f", "-c", ASK_ZSH, "zsh", script, *typed]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (found.returncode, found.stderr) == (0, "")
        return {line.split(":")[0] for line in found.stdout.splitlines()}

    assert {"demo", "info", "doctor"} <= asked("gnnsys", "")  # zsh itself takes those that begin as typed
    assert {"--hosts", "--json"} <= asked("gnnsys", "doctor", "--ho")
    assert asked("gnnsys", "bench", "ops", "--scale", "") == {"small", "full"}
    assert asked("gnnsys", "bench", "ops", "--scale=") == {"small", "full"}
    assert asked("gnnsys", "push", "") == {"files -/"}
