"""The command line: what it prints, and the exit codes scripts rely on."""

import importlib.metadata
import itertools
import pkgutil
import re
import subprocess
import sys

import pytest

from gnnsys.cli import commands, main


def test_help_lists_every_command_once_in_its_group(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    groups: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if re.fullmatch(r"[a-z ]+:", line):
            names = groups.setdefault(line[:-1], [])
        elif found := re.match(r"  ([a-z]+) {2,}\S", line):
            names.append(found[1])
    groups.pop("options")
    assert {group: tuple(names) for group, names in groups.items()} == commands.GROUPS
    assert sorted(itertools.chain(*groups.values())) == [each.name for each in pkgutil.iter_modules(commands.__path__)]


def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"gnnsys {importlib.metadata.version('gnnsys')}\n"


def test_help_and_version_do_not_wait_for_torch():
    """In a process of its own: this one has torch."""
    program = """
import sys
from gnnsys.cli import commands, main
for option in ("--help", "--version"):
    try: main([option])
    except SystemExit: pass
import gnnsys; dir(gnnsys); gnnsys.__version__
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)


def test_without_a_command_the_help_is_printed_and_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert "start here:" in printed.out and not printed.err


@pytest.mark.parametrize(
    ("given", "said"),
    [("parition", "'parition': did you mean partition?"), ("zzz", "'zzz': gnnsys --help lists the commands")],
)
def test_a_command_that_does_not_exist_is_answered_with_the_one_that_is_like_it(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        main([given, "cora", "--parts", "2"])
    assert stopped.value.code == 2
    assert f"there is no command {said}" in capsys.readouterr().err


def test_a_wrong_choice_of_an_option_is_still_said_by_its_own_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["completion", "nonsense"])
    assert "there is no command" not in capsys.readouterr().err


def test_an_unknown_suite_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no suite 'nonsense'" in error and "ops, loader" in error


def test_a_json_file_in_a_folder_that_does_not_exist_is_refused_before_anything_is_timed(tmp_path, capsys):
    assert main(["bench", "ops", "--json", str(tmp_path / "nowhere" / "rows.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_info_names_torch_the_native_core_and_absent_peers(capsys: pytest.CaptureFixture[str]):
    import torch

    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "_C.abi3.so" in printed
    assert "torch-sparse" in printed
