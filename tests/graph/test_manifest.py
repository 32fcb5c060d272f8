"""Staged directories: what is at the destination when the writing ends, not only when it begins."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from gnnsys.graph import load, save, sbm
from gnnsys.graph.manifest import staged

GRAPH = {"format": "gnnsys-graph", "what": "a saved graph"}


@pytest.mark.parametrize("names", [["notes.txt"], []])
def test_a_directory_that_appears_meanwhile_is_not_replaced(names, tmp_path):
    target = tmp_path / "graph"
    refused = pytest.raises(ValueError, match=r"graph' exists: choose another, or overwrite it")
    with refused, staged(target, overwrite=False, **GRAPH):
        target.mkdir()
        for name in names:
            (target / name).write_text("kept")
    assert os.listdir(target) == names and os.listdir(tmp_path) == ["graph"]


def test_what_was_put_in_the_place_of_a_graph_meanwhile_is_not_overwritten(tmp_path):
    target = tmp_path / "graph"
    save(sbm(300), target)
    refused = pytest.raises(ValueError, match="only a saved graph is overwritten")
    with refused, staged(target, overwrite=True, **GRAPH):
        shutil.rmtree(target)
        target.mkdir()
        (target / "notes.txt").write_text("kept")
    assert os.listdir(target) == ["notes.txt"] and os.listdir(tmp_path) == ["graph"]


def test_overwriting_through_a_link_replaces_what_it_leads_to(tmp_path):
    save(sbm(300), tmp_path / "data" / "graph")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "graph")
    save(sbm(200), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "link").num_nodes() == 200
    assert load(tmp_path / "data" / "graph").num_nodes() == 200
    assert os.listdir(tmp_path / "data") == ["graph"]


def test_a_link_that_leads_to_itself_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(ValueError, match="link'"):
        save(sbm(200), tmp_path / "link", overwrite=True)
    assert os.listdir(tmp_path) == ["link"]


def test_what_cannot_be_removed_after_an_overwrite_is_named_and_the_new_one_is_there(tmp_path, monkeypatch):
    save(sbm(300), tmp_path / "graph")

    def busy(folder, *args, **kwargs):
        raise OSError(errno.EBUSY, "busy", str(folder))

    monkeypatch.setattr(shutil, "rmtree", busy)
    with pytest.warns(UserWarning, match=r"what was overwritten is left at .*\.graph-old-"):
        save(sbm(200), tmp_path / "graph", overwrite=True)
    assert load(tmp_path / "graph").num_nodes() == 200
