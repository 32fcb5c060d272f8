"""The build backend: setuptools, able to see the torch that is already installed.

pip builds in an isolated environment, where `requires = ["torch"]` would download a second torch (gigabytes of
CUDA) only to read its headers. Before each hook this backend puts the outer environment's site-packages on the
path, and asks pip for torch only when there is still none to be found.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools


def _outer_site_packages() -> list[str]:
    """site-packages of the interpreter's own prefix and of the prefix its `pip` was called from."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefixes = [os.environ.get("VIRTUAL_ENV"), sys.prefix, sys.exec_prefix, Path(sys.executable).parent.parent]
    folders = []
    for prefix in prefixes:
        if prefix:
            folders += [Path(prefix) / "lib" / version / "site-packages", Path(prefix) / "Lib" / "site-packages"]
    folders += [Path(p) for p in site.getsitepackages()]
    return [str(f) for f in dict.fromkeys(folders) if f.is_dir()]


def _see_torch() -> bool:
    if importlib.util.find_spec("torch") is None:
        for folder in _outer_site_packages():
            if (Path(folder) / "torch").is_dir():
                site.addsitedir(folder)
    return importlib.util.find_spec("torch") is not None


def _requirements(hook: Callable[..., list[str]], config_settings: Any) -> list[str]:
    """What setuptools asks for; without torch in sight setup.py cannot even be read, so torch comes first."""
    return hook(config_settings) if _see_torch() else ["torch>=2.10"]


def get_requires_for_build_wheel(config_settings=None):
    return _requirements(_setuptools.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _requirements(_setuptools.get_requires_for_build_editable, config_settings)


def get_requires_for_build_sdist(config_settings=None):
    return _requirements(_setuptools.get_requires_for_build_sdist, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    _see_torch()
    return _setuptools.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    _see_torch()
    return _setuptools.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _see_torch()
    return _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _see_torch()
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    _see_torch()
    return _setuptools.build_sdist(sdist_directory, config_settings)
