"""The command line: what it prints, and the exit codes scripts rely on."""

import pytest

from gnnsys.cli import main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("bench", "info"))


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
