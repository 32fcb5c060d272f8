"""The command as a whole, on this machine: every line has its form, JSON says the same, and the exit code follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gnnsys.cli import main
from gnnsys.doctor import ADVICE, FAILS, OK, Diagnosis, exit_code, report_text

SUBJECTS = ("gnnsys", "python", "torch", "cryptography", "native core", "devices", "threads", "/dev/shm", "huge pages")


def test_a_real_run_says_each_thing_once_and_its_exit_code_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    subjects = [each["subject"] for each in found]
    assert set(SUBJECTS) <= set(subjects) and len(set(subjects)) == len(subjects)
    assert code == any(each["state"] == FAILS for each in found)
    core = next(each for each in found if each["subject"] == "native core")
    assert core["state"] == OK and "_C.abi3.so (" in core["found"]
    assert main(["doctor", str(tmp_path)]) == 1  # no parts
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) + 2 and lines[-2].startswith("fails   parts          ")


def test_it_works_where_torch_cannot_be_imported():
    """In a process of its own: this one has torch."""
    program = (
        "import sys; sys.modules['torch'] = None; from gnnsys.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    found = {each["subject"]: each for each in json.loads(ended.stdout)}
    assert ended.returncode == 1 and "does not import" in found["torch"]["found"]
    assert found["native core"]["remedy"] == "install torch first" and found["threads"]["found"].endswith("cores")


def test_advice_does_not_change_the_exit_code():
    well, advice = Diagnosis("a", "is well"), Diagnosis("b", "is slow", "it waits", "do this", ADVICE)
    fails = Diagnosis("c", "is not there", "it is needed", "install it", FAILS)
    assert exit_code([]) == exit_code([well, advice]) == 0 and exit_code([fails, well]) == 1
    assert report_text([well, advice, fails]).splitlines() == [
        "ok      a              is well",
        "advice  b              is slow: it waits. Remedy: do this",
        "fails   c              is not there: it is needed. Remedy: install it",
        "1 ok, 1 to improve, 1 that will fail",
    ]


def test_what_is_not_well_must_have_a_remedy():
    with pytest.raises(AssertionError, match="remedy"):
        Diagnosis("a", "is slow", "it waits", state=ADVICE)
    with pytest.raises(AssertionError, match="one line"):
        Diagnosis("a", "two\nlines")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["parts", "--to", "h1:1"], "leave DIR away"),
        (["--listen", "70000"], "--listen must be below 65536"),
        (["--seconds", "0"], "--seconds must be more than 0"),
        (["--hosts", "nowhere.txt"], "there is no hosts file nowhere.txt"),
    ],
)
def test_bad_use_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
