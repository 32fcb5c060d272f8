"""The native core under AddressSanitizer with UBSan, or under ThreadSanitizer: `make sanitize` (docs/native.md).

Builds the core with the sanitizer into build/sanitize/, beside links to everything else of the repository, and runs the
C++ tests and the Python tests below on it; the installed core is left alone. Reports are written to files by whichever
process finds something, also one that a test started, and any report fails the run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "sanitize"
NAMES_LEFT_OUT = ("right_gradient", "larger_than_the_limit", "structure_loses_most")


@dataclass(frozen=True)
class Kind:
    """A sanitizer: how code is compiled for it, what its runtime is told, and which tests' native calls it watches."""

    flags: str
    runtimes: tuple[str, ...]
    options: dict[str, str]
    environment: dict[str, str]
    paths: tuple[str, ...]
    quick: tuple[str, ...]
    """A part, in minutes."""
    planted: dict[str, str]
    """Mistakes of tests/native/planted/ and the words that the report of each has."""
    left_out: tuple[str, ...] = ()
    """Tests that measure memory or time, which a sanitizer takes for itself."""
    plugins: tuple[str, ...] = ()
    names_left_out: tuple[str, ...] = NAMES_LEFT_OUT
    """By their names: thousands of calls alike (numerical derivatives), and a few more that measure."""


KINDS = {
    "address": Kind(
        flags="address,undefined",
        runtimes=("libasan.so", "libstdc++.so.6"),
        options={
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        environment={},
        paths=(
            "tests/native",
            "tests/ops",
            "tests/graph",
            "tests/partition",
            "tests/store",
            "tests/sampling",
            "tests/pipeline",
            "tests/loader",
            "tests/nn",
        ),
        quick=("tests/ops", "tests/store"),
        planted={
            "overflow": "heap-buffer-overflow",
            "undefined": "signed integer overflow",
            "core_overflow": "heap-buffer-overflow",
        },
        plugins=("csrc.sanitize.damage",),
        left_out=("tests/partition/test_memory.py", "tests/store/test_memory.py"),
    ),
    # Where several Python threads are in the core at once: pulls beside pushes and steps, a server's workers, the
    # stages of a pipeline. No loop of ours runs on OpenMP in this build (csrc/common/helpers.cpp).
    "thread": Kind(
        flags="thread",
        runtimes=("libtsan.so", "libstdc++.so.6"),
        options={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=0:second_deadlock_stack=1"},
        environment={"OMP_NUM_THREADS": "1"},
        paths=(
            "tests/native/test_threads.py",
            "tests/ops/test_store.py",
            "tests/ops/test_rows.py",
            "tests/ops/test_sampling.py",
            "tests/ops/test_structure.py",
            "tests/ops/test_relabel.py",
            "tests/ops/test_spmm.py",
            "tests/ops/test_attention.py",
            "tests/store",
            "tests/sampling",
            "tests/pipeline",
            "tests/loader",
        ),
        quick=("tests/native/test_threads.py",),
        planted={"race": "data race", "loop_race": "data race", "core_race": "data race"},
        left_out=("tests/store/test_memory.py",),
        # ThreadSanitizer ends a forked process that starts a thread.
        names_left_out=(*NAMES_LEFT_OUT, "forked_process_has_threads"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--quick", action="store_true", help="a part, in minutes")
    parser.add_argument("--selftest", action="store_true", help="make mistakes on purpose instead: each must be found")
    parser.add_argument("--no-native", action="store_true", help="leave the C++ tests out")
    parser.epilog = "What stands behind -- is given to pytest instead of the tests that are listed here."
    given = sys.argv[1:]
    ours = given[: given.index("--")] if "--" in given else given
    arguments = parser.parse_args(ours)
    kind = KINDS[arguments.kind]
    folder = BUILD / arguments.kind
    environment = sanitized_environment(kind, folder)
    if not (arguments.no_native or arguments.selftest):
        run_native_tests(kind, folder, environment)
    tree = build_core(kind, folder)
    check_core(tree, environment)
    if arguments.selftest:
        return run_selftest(kind, folder, environment)
    paths = kind.quick if arguments.quick else kind.paths
    left_out = [f"--ignore={path}" for path in kind.left_out]
    plugins = [f"-p{plugin}" for plugin in ("no:cacheprovider", *kind.plugins)]
    command = [sys.executable, "-m", "pytest", *plugins, *left_out, "-k"]
    command.append(" and ".join(f"not {name}" for name in kind.names_left_out))
    command += given[len(ours) + 1 :] or paths
    began = time.monotonic()
    status = subprocess.run(command, cwd=tree, env=environment).returncode
    reports = read_reports(folder)
    print(reports, end="")
    verdict = "clean" if status == 0 and not reports else "NOT clean"
    print(f"{kind.flags}: {verdict}, pytest ended with {status}, tests took {time.monotonic() - began:.0f} s")
    return status or int(bool(reports))


def sanitized_environment(kind: Kind, folder: Path) -> dict[str, str]:
    """For programs that load an instrumented library into a python that is not: the runtime comes first."""
    reports = folder / "reports"
    empty(reports)
    environment = {**os.environ, **kind.environment}
    environment |= {name: f"{value}:log_path={reports}/report" for name, value in kind.options.items()}
    environment["LD_PRELOAD"] = " ".join(runtime(name) for name in kind.runtimes)
    environment["PYTHONPATH"] = str(folder / "tree")
    environment["GNNSYS_SANITIZER"] = kind.flags
    environment["GNNSYS_DAMAGE_LOG"] = str(folder / "last_damage.txt")
    return environment


def runtime(name: str) -> str:
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"the compiler has no {name}: install GCC's sanitizer runtimes")
    return found


def build_core(kind: Kind, folder: Path) -> Path:
    """A folder that looks like the repository, with an instrumented core in place of the ordinary one."""
    environment = {**os.environ, "GNNSYS_SANITIZE": kind.flags}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    places = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "objects")]
    run([sys.executable, "setup.py", "build_ext", *places], environment, "the build", folder / "build.log")
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "gnnsys").mkdir(parents=True)
    for entry in REPOSITORY.iterdir():
        if entry.name not in ("gnnsys", "build", "dist", "shared") and not entry.name.startswith("."):
            (tree / entry.name).symlink_to(entry)
    for entry in (REPOSITORY / "gnnsys").iterdir():
        if entry.suffix != ".so":
            (tree / "gnnsys" / entry.name).symlink_to(entry)
    (core,) = (folder / "lib" / "gnnsys").glob("_C*.so")
    (tree / "gnnsys" / core.name).symlink_to(core)
    return tree


def check_core(tree: Path, environment: dict[str, str]) -> None:
    """The tests below would pass on the ordinary core too: make sure that it is not the one they get."""
    program = "import ctypes, gnnsys.ops, gnnsys._C as core; print(core.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, env=environment, capture_output=True, text=True, timeout=300
    )
    if found.returncode != 0:
        raise SystemExit(f"the instrumented core does not load: {found.stderr}")
    if not found.stdout.startswith(str(tree)):
        raise SystemExit(f"tests would load {found.stdout.strip()} instead of the instrumented core in {tree}")


def run_native_tests(kind: Kind, folder: Path, environment: dict[str, str]) -> None:
    sys.path.insert(0, str(REPOSITORY))
    from tests.native.build_native import build_native_tests

    folder.mkdir(parents=True, exist_ok=True)
    binary = build_native_tests(folder / "native_tests", sanitizer_flags(kind))
    alone = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    finished = subprocess.run([binary], env=alone, timeout=600)
    reports = read_reports(folder)
    if finished.returncode != 0 or reports:
        raise SystemExit(f"{reports}\n{kind.flags}: the C++ tests ended with {finished.returncode}")


def run_selftest(kind: Kind, folder: Path, environment: dict[str, str]) -> int:
    """Every mistake must end in a report that names it, and the program without one must end without."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.native.build_native import build_planted

    library = build_planted(folder / "planted.so", sanitizer_flags(kind))
    missed = 0
    for name, words in {"none": "", **kind.planted}.items():
        empty(folder / "reports")
        program = REPOSITORY / "tests" / "native" / "planted" / "plant.py"
        command = [sys.executable, str(program), str(library), name]
        done = subprocess.run(
            command, cwd=folder / "tree", env=environment, capture_output=True, text=True, timeout=300
        )
        reports = read_reports(folder)
        found = words in reports + done.stderr if words else done.returncode == 0 and not reports
        print(f"{'ok' if found else 'FAILED'}: {name}: {words or 'no report'}", flush=True)
        if not found:
            print(done.stdout, done.stderr, reports, sep="\n")
            missed += 1
    empty(folder / "reports")
    return int(missed > 0)


def sanitizer_flags(kind: Kind) -> list[str]:
    return [f"-fsanitize={kind.flags}", "-fno-sanitize-recover=all", "-g1"]


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


REFUSED = re.compile(r"^==\d+==WARNING: AddressSanitizer failed to allocate 0x[0-9a-f]+ bytes\n", re.MULTILINE)
"""AddressSanitizer says this of every request that it refuses. Tests of running out of memory make such requests and
check what the caller gets, so the line alone is no mistake."""


def read_reports(folder: Path) -> str:
    reports = (path.read_text(errors="replace") for path in sorted((folder / "reports").iterdir()))
    return "".join(REFUSED.sub("", report) for report in reports)


def run(command: list[str], environment: dict[str, str], what: str, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as out:
        status = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT
        ).returncode
    if status != 0:
        raise SystemExit(f"{what} failed:\n{log.read_text()[-4000:]}")
    print(f"{what} took {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
