"""Completion scripts for shells, made from the tree of argparse's parsers: what can stand where is read, not listed.

A script is fixed text: it calls neither Python nor gnnsys while one types. It knows commands and their options, the
values of options that have choices, and where a file or a folder is wanted.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

FILES, FOLDERS, NOTHING = "files", "folders", "nothing"
_OF_METAVAR = {
    "FILE": FILES, "PATH": FILES, "SCRIPT": FILES, "SOURCE": FILES, "DIR": FOLDERS, "CHECKOUT": FOLDERS,
}  # fmt: skip


@dataclass(frozen=True)
class CompletedOption:
    """An option: how it may be written, and what its value is: choices, FILES, FOLDERS, NOTHING, or "" for no value."""

    names: tuple[str, ...]
    help: str
    value: tuple[str, ...] | str


@dataclass
class CompletedCommand:
    """What can follow a command: `path` is what was typed, () for gnnsys itself; `place` is what it takes beside."""

    path: tuple[str, ...]
    help: str
    options: list[CompletedOption] = field(default_factory=list)
    commands: list[CompletedCommand] = field(default_factory=list)
    place: tuple[str, ...] | str = NOTHING

    def walk(self) -> Iterator[CompletedCommand]:
        yield self
        for command in self.commands:
            yield from command.walk()


def words_of(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> CompletedCommand:
    """Reads a parser and those below it."""
    made = CompletedCommand(path, (parser.description or "").strip().splitlines()[0].rstrip("."))
    places: list[tuple[str, ...] | str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            made.commands = [words_of(each, (*path, name)) for name, each in action.choices.items()]
        elif action.option_strings:
            said = " ".join((action.help or "").replace("%%", "%").split())
            said = said.split("; ")[0].split(" (default")[0]
            made.options.append(CompletedOption(tuple(action.option_strings), said, _value_of(action)))
        else:
            places.append(_value_of(action))
    made.place = next((each for each in places if each != NOTHING), NOTHING)
    return made


def _value_of(action: argparse.Action) -> tuple[str, ...] | str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return tuple(str(choice) for choice in action.choices)
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return _OF_METAVAR.get(shown, NOTHING)


# --- bash, and zsh by the same lists: which command is typed, what comes next


def for_bash(top: CompletedCommand) -> str:
    """A function for `complete`. It needs nothing but bash: `bash-completion` may be absent."""
    return _BASH.replace("@COMMANDS@", _paths(top)).replace("@CASES@", _cases(top, " "))


def for_zsh(top: CompletedCommand) -> str:
    """A function for `compdef`, which shows descriptions too."""
    return _ZSH.replace("@COMMANDS@", _paths(top)).replace("@CASES@", _cases(top, "\n"))


def _paths(top: CompletedCommand) -> str:
    """Patterns of a `case`: what is a command where."""
    return "|".join(shlex.quote("/".join(command.path)) for command in top.walk() if command.path)


def _cases(top: CompletedCommand, between: str) -> str:
    """For each command: what is `shown` as next words, `values` of an option that was typed, `place` for the rest."""
    lines = []
    for command in top.walk():
        words = [(each.path[-1], each.help) for each in command.commands]
        words += [(name, option.help) for option in command.options for name in option.names]
        shown = between.join(word if between == " " else f"{word}:{help}" for word, help in words)
        lines += [f"  {shlex.quote('/'.join(command.path))})", f"    shown={shlex.quote(shown)}"]
        lines += [f"    place={_kind(command.place)}", "    case $before in"]
        for option in command.options:
            if option.value:
                lines.append(f"      {'|'.join(option.names)}) value={_kind(option.value)};;")
        lines += ["    esac;;"]
    return "\n".join(lines)


def _kind(value: tuple[str, ...] | str) -> str:
    return value if isinstance(value, str) else shlex.quote("=" + " ".join(value))


_BASH = r"""# completion of gnnsys for bash: eval "$(gnnsys completion bash)"
_gnnsys() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} path= next shown= place= value= number
  COMPREPLY=()
  if [[ $current == "=" ]]; then current=  # --option=, which bash has cut in two
  elif [[ $before == "=" ]]; then before=${COMP_WORDS[COMP_CWORD-2]}
  fi
  for ((number = 1; number < COMP_CWORD; number++)); do
    next=${path:+$path/}${COMP_WORDS[number]}
    case $next in
      @COMMANDS@) path=$next;;
    esac
  done
  case $path in
@CASES@
  esac
  if [[ -z $value ]]; then
    if [[ $current == -* || $place == nothing ]]; then value="=$shown"
    else value=$place
    fi
  fi
  case $value in
    =*) mapfile -t COMPREPLY < <(compgen -W "${value#=}" -- "$current");;
    files) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$current");;
    folders) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$current");;
  esac
}
complete -F _gnnsys gnnsys
"""

_ZSH = r"""#compdef gnnsys
# completion of gnnsys for zsh: eval "$(gnnsys completion zsh)" after compinit
_gnnsys() {
  local current=$words[CURRENT] before=$words[CURRENT-1] path_typed= next shown= place= value= number
  local -a typed=("${(@)words}") described
  for ((number = 2; number < CURRENT; number++)); do
    next=${path_typed:+$path_typed/}${typed[number]}
    case $next in
      @COMMANDS@) path_typed=$next;;
    esac
  done
  if [[ $current == --*"="* ]]; then before=${current%%"="*}; compset -P '*='; fi
  case $path_typed in
@CASES@
  esac
  if [[ -z $value ]]; then
    if [[ $current == -* || $place == nothing ]]; then
      described=("${(f)shown}")
      _describe gnnsys described
      return
    fi
    value=$place
  fi
  case $value in
    "="*) described=(${=value#"="}); compadd -a described;;
    files) _files;;
    folders) _files -/;;
  esac
}
compdef _gnnsys gnnsys
"""


# --- fish: one line for each thing


def for_fish(top: CompletedCommand) -> str:
    lines = ["# completion of gnnsys for fish: gnnsys completion fish > ~/.config/fish/completions/gnnsys.fish"]
    lines += ["complete -c gnnsys -f"]
    for command in top.walk():
        typed = f"__fish_seen_subcommand_from {command.path[-1]}" if command.path else "__fish_use_subcommand"
        when = f"complete -c gnnsys -n {_fish_quote(typed)}"
        lines += [f"{when} -a {each.path[-1]} -d {_fish_quote(each.help)}" for each in command.commands]
        if command.place != NOTHING:
            lines.append(f"{when} {_fish_value(command.place)}")
        for option in command.options:
            names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
            value = f" -{'r' if option.value == FILES else 'x'} {_fish_value(option.value)}" if option.value else ""
            lines.append(f"{when} {' '.join(names)}{value.rstrip()} -d {_fish_quote(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_value(value: tuple[str, ...] | str) -> str:
    if not isinstance(value, str):
        return f"-a {_fish_quote(' '.join(value))}"
    return {FILES: "-F", FOLDERS: '-a "(__fish_complete_directories)"', NOTHING: ""}[value]


def _fish_quote(text: str) -> str:
    return "'" + re.sub(r"(['\\])", r"\\\1", text) + "'"
