"""What `import gnnsys` gives to somebody who looks around before reading anything."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import pydoc
import sys
from pathlib import Path

import pytest

import gnnsys

PACKAGE = Path(gnnsys.__file__).parent
INTERNAL = {"cli"}  # the command, not a library
FACES = {"dgl": "dgl", "pyg": "torch_geometric"}  # rooms for users of another library, which must be there


def test_every_room_is_an_attribute_after_import_gnnsys(monkeypatch: pytest.MonkeyPatch):
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - INTERNAL
    for room in rooms:
        if room in FACES and importlib.util.find_spec(FACES[room]) is None:
            continue  # what is said then: below
        monkeypatch.delattr(gnnsys, room, raising=False)  # what an import elsewhere has set
        assert getattr(gnnsys, room) is importlib.import_module(f"gnnsys.{room}")
    assert rooms <= set(dir(gnnsys))


def test_dir_and_help_show_every_class_and_function():
    assert set(gnnsys.__all__) <= set(dir(gnnsys))
    shown = pydoc.plain(pydoc.render_doc(gnnsys))
    for name in gnnsys.__all__:
        kind = "class" if inspect.isclass(getattr(gnnsys, name)) else name
        assert f"{kind} {name}" in shown or f"{name}(" in shown


def test_what_is_not_there_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'gnnsys' has no attribute 'Neighbourloader'"):
        gnnsys.Neighbourloader  # noqa: B018
    assert not hasattr(gnnsys, "nonsense")


def test_the_version_is_the_installed_one_and_a_checkout_has_one_too(monkeypatch: pytest.MonkeyPatch):
    assert gnnsys.__version__ == importlib.metadata.version("gnnsys")

    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert gnnsys.__version__ == "0+checkout"


def test_a_face_whose_library_is_not_here_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for face, library, package in (("pyg", "torch_geometric", "torch-geometric"), ("dgl", "dgl", "dgl")):
        monkeypatch.setitem(sys.modules, library, None)  # importing it fails
        for name in [name for name in sys.modules if f"{name}.".startswith(f"gnnsys.{face}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(gnnsys, face, raising=False)
        with pytest.raises(AttributeError, match=f"pip install {package}"):
            getattr(gnnsys, face)
