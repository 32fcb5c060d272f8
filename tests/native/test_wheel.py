"""One library for every Python from 3.10 on: it is loaded by each interpreter at hand, from the checkout and a wheel.

An interpreter is `python3.N` on PATH or of pyenv, or the one that runs the tests. Where it has no torch, all that can
be seen is that the package imports and that the command line parses.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PROGRAM = """
import json, sys
import gnnsys
from gnnsys.cli.main import build_parser
build_parser().parse_args(["doctor", "parts"])
found = {"python": "%d.%d" % sys.version_info[:2], "package": gnnsys.__file__, "torch": None}
try:
    import torch
except ImportError:
    pass
else:
    from gnnsys.graph import sbm
    from gnnsys.ops import spmm
    graph = sbm(100)
    ours = spmm(graph.csc(), torch.ones(100, 4))
    degrees = torch.bincount(graph.edge_index()[1], minlength=100).float()
    assert torch.equal(ours, degrees[:, None].expand(100, 4))
    found["torch"] = torch.__version__
print(json.dumps(found))
"""

OWN = "{}.{}".format(*sys.version_info)  # of which the other tests show that the library loads


@functools.cache
def interpreter(version: str) -> str | None:
    """The Python of a version; a name on PATH may be pyenv's, with nothing behind it."""
    if version == OWN:
        return sys.executable
    name = f"python{version}"
    for python in (shutil.which(name), *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/{name}")))):
        if python and subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return python
    return None


def check_import(version: str, package: Path) -> None:
    """Imports the package from a folder by another Python, and has the native core compute there."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no python{version} here")
    environment = {**os.environ, "PYTHONPATH": str(package)}
    ended = subprocess.run(
        [python, "-c", PROGRAM], env=environment, cwd=package, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["python"] == version and Path(found["package"]) == package / "gnnsys" / "__init__.py"
    if found["torch"] is None:
        pytest.skip(f"python{version} has no torch: the package imports, the native core was not tried")


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != OWN])
def test_the_built_library_loads_into_another_python(version: str):
    check_import(version, ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel .` makes of a copy of the checkout without anything built."""
    folder = tmp_path_factory.mktemp("wheel")
    leave = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("gnnsys", "csrc"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=leave)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), "."]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja is there
    made = subprocess.run(
        command, cwd=folder / "source", env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=1800
    )
    assert made.returncode == 0, made.stderr[-4000:]
    (file,) = folder.glob("*.whl")
    return file


# Compiles everything. Its promise is kept by the library of the checkout, above, which is the same.
@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_imports_in_this_python(version: str, wheel: Path, tmp_path: Path):
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    assert {"gnnsys/_C.abi3.so", "gnnsys/py.typed", "gnnsys/cli/commands/doctor.py"} <= names
    assert not any(name.startswith(("tests/", "csrc/")) for name in names)
    check_import(version, tmp_path)
