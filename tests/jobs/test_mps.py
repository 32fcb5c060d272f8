"""The daemon of MPS as a process: started, asked, adopted, ended, and what is said where it cannot be had.

A stand-in speaks for the control program (tests/jobs/mps_stand_in.py); tests/cuda/test_mps.py has the real one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnsys.jobs import mps
from gnnsys.jobs.mps import DeviceSharing, MpsDaemon, MpsUnavailable, start_sharing
from tests.support.processes import alive, await_true, processes


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The stand-in under a name of its own, on PATH, run by this Python."""
    script = tmp_path / "bin" / "mps-control-stand-in"
    script.parent.mkdir()
    text = (Path(__file__).parent / "mps_stand_in.py").read_text()
    script.write_text(text.replace("#!/usr/bin/env python3", f"#!{sys.executable}"))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mps, "_PROBE_SECONDS", 30.0)
    return script.name


def served(daemon: MpsDaemon) -> str | None:
    return None


@pytest.fixture
def daemon(program: str, tmp_path: Path) -> Iterator[MpsDaemon]:
    found = MpsDaemon(tmp_path / "mps", program, served)
    yield found
    found.close()
    assert not found._processes() and not found.folder.exists() and not found._pipe.exists()


def test_a_daemon_is_asked_and_ends_a_client_and_leaves_nothing_behind(daemon: MpsDaemon) -> None:
    assert not daemon.is_alive()
    daemon.start()
    assert daemon.is_alive() and len(daemon._processes()) == 1 and not daemon.was_adopted
    assert daemon.clients() == {4242: 77}
    assert daemon.terminate_client(4242) and not daemon.terminate_client(4242)
    daemon.close()
    daemon.close()
    assert not daemon.is_alive()


def test_what_a_client_may_take_is_rounded_up_to_megabytes(daemon: MpsDaemon) -> None:
    daemon.start()
    environment = daemon.environment(memory=(4 << 30) + 1, device=2)
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "2=4097M"
    assert Path(environment["CUDA_MPS_PIPE_DIRECTORY"]) == daemon._pipe and daemon._pipe.is_dir()
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in daemon.environment()
    with pytest.raises(ValueError, match="memory must be a positive number of bytes, got 0"):
        daemon.environment(memory=0)


SERVICE = """
import sys, time
from gnnsys.jobs.mps import MpsDaemon
daemon = MpsDaemon(sys.argv[1], sys.argv[2], lambda daemon: None).start()
print("serves", *daemon._processes(), flush=True)
time.sleep(300)
"""


def test_the_daemon_of_a_service_that_was_killed_is_adopted_and_ended_by_the_next(
    daemon: MpsDaemon, program: str
) -> None:
    with processes() as running:
        number = running.start_code("service", SERVICE, daemon.folder, program)
        pid = int(running.await_output(number, "\n").split()[1])
        os.kill(running.pid(number), signal.SIGKILL)
        daemon.start()
        assert daemon.was_adopted and daemon._processes() == [pid]
        daemon.close()
        await_true(lambda: not alive(pid), "the daemon has ended", 60)


def test_a_daemon_that_does_not_answer_is_ended_and_another_one_started(
    daemon: MpsDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_COMMAND_SECONDS", 0.5)
    monkeypatch.setattr(mps, "_END_SECONDS", 0.5)
    monkeypatch.setattr(mps, "_QUIT_SECONDS", 0)
    monkeypatch.setattr(MpsDaemon.command, "__defaults__", (0.5,))
    monkeypatch.setenv("TEST_MPS", "silent")
    with pytest.raises(MpsUnavailable, match=r"does not start: it does not answer .*time slices"):
        daemon.start()
    assert not daemon._processes()  # it took more than SIGTERM
    monkeypatch.setattr(MpsDaemon.command, "__defaults__", (20.0,))
    monkeypatch.setattr(mps, "_COMMAND_SECONDS", 20.0)
    monkeypatch.delenv("TEST_MPS")
    assert daemon.start().is_alive()


def test_a_folder_with_a_long_path_has_its_pipes_elsewhere_and_the_next_service_finds_them(
    program: str, tmp_path: Path
) -> None:
    folder = tmp_path / ("long-" * 20)
    first = MpsDaemon(folder, program, served).start()
    pipe = Path(first.environment()["CUDA_MPS_PIPE_DIRECTORY"])
    assert len(str(pipe)) < 80 and pipe.is_dir()
    second = MpsDaemon(folder, program, served).start()
    assert second.was_adopted and second.environment() == first.environment()
    second.close()
    assert not pipe.exists() and not folder.exists() and not first.is_alive()


def test_without_the_control_program_jobs_take_turns_and_who_wants_mps_is_told_the_remedy(tmp_path: Path) -> None:
    sharing = start_sharing(tmp_path, program="no-such-program")
    assert sharing.said.startswith("jobs share the device by time slices, for MPS needs no-such-program")
    assert sharing.environment(1 << 30) == {} and sharing.is_alive() and not sharing.terminate_client(1)
    sharing.restart()
    sharing.close()
    with pytest.raises(ValueError, match=r"not on PATH: install .* or share the device by time slices$") as error:
        start_sharing(tmp_path, "mps", program="no-such-program")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="sharing must be 'mps', 'slices' or 'auto', got 'both'"):
        start_sharing(tmp_path, "both")
    assert start_sharing(tmp_path, "slices").mps is None
    assert not list(tmp_path.iterdir())


def test_a_daemon_that_serves_no_client_is_ended_and_the_log_is_told(program: str, tmp_path: Path) -> None:
    daemon = MpsDaemon(tmp_path / "mps", program, lambda daemon: "cuInit failed with 805")
    with pytest.raises(MpsUnavailable, match=r"cuInit failed with 805 \(last words\): share the device by time slices"):
        daemon.start()
    assert not daemon._processes() and not daemon.folder.exists()


def test_a_daemon_that_refuses_to_start_says_why(program: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TEST_MPS", "refuses")
    with pytest.raises(MpsUnavailable, match="does not start: Cannot find MPS control daemon's device"):
        MpsDaemon(tmp_path / "mps", program, served).start()
    assert not (tmp_path / "mps").exists()


def test_a_control_program_that_hangs_is_ended_and_jobs_take_turns(program: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TEST_MPS", "hangs")
    monkeypatch.setattr(mps, "_START_SECONDS", 0.1)
    sharing = start_sharing(tmp_path, program=program)
    assert sharing.mps is None and "has not started a daemon within 0.1 s: share the device by" in sharing.said
    assert not (tmp_path / "mps").exists()


def test_after_an_error_that_took_all_clients_along_another_daemon_serves(daemon: MpsDaemon) -> None:
    sharing = DeviceSharing("by MPS", daemon.start())
    (before,) = daemon._processes()
    os.kill(before, signal.SIGKILL)
    await_true(lambda: not sharing.is_alive(), "the daemon is gone", 60)
    assert not sharing.terminate_client(4242)
    sharing.restart()
    assert sharing.is_alive() and daemon._processes() != [before]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU: tests/cuda has the real probe")
def test_the_real_probe_says_what_the_driver_says(daemon: MpsDaemon) -> None:
    daemon.start()
    assert "libcuda" in str(mps._probe(daemon)) or "cuInit" in str(mps._probe(daemon))
