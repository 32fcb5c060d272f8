"""Ids, masks and links in the faces for PyG and DGL: the same meaning whatever holds them, floats refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import gnnsys.pyg
from tests.loader.test_inputs import HOLDERS, LINK_HOLDERS, mask_of

NUM_NODES = 40
EDGES = torch.randint(0, NUM_NODES, (2, 300), generator=torch.Generator().manual_seed(0))


def plain() -> Data:
    return Data(x=torch.arange(NUM_NODES).float()[:, None], edge_index=EDGES)


def typed() -> HeteroData:
    data = HeteroData()
    data["a"].x = torch.arange(NUM_NODES).float()[:, None]
    data["a", "to", "a"].edge_index = EDGES
    return data


def test_pyg_loaders_take_masks_whatever_holds_them() -> None:
    mask = mask_of(NUM_NODES)
    expected = mask.nonzero().view(-1)
    for name, hold in HOLDERS.items():
        for data, given, store in (
            (plain(), hold(mask), lambda batch: batch),
            (typed(), ("a", hold(mask)), lambda batch: batch["a"]),
        ):
            loader = gnnsys.pyg.NeighborLoader(data, [2], input_nodes=given, batch_size=7)
            stores = [store(batch) for batch in loader]
            assert torch.equal(torch.cat([s.n_id[: s.batch_size] for s in stores]), expected), name
            assert torch.equal(torch.cat([s.input_id for s in stores]), expected), name  # of a mask PyG gives node ids
            few = loader(hold(torch.tensor([3, 1])))
            assert store(few).n_id[:2].tolist() == [expected[3], expected[1]], name
            chosen = store(loader(hold(mask_of(expected.numel()))))
            assert torch.equal(chosen.n_id[: chosen.batch_size], expected[mask_of(expected.numel())]), name


def test_pyg_loaders_refuse_floats_and_masks_of_another_length() -> None:
    loader = gnnsys.pyg.NeighborLoader(plain(), [2], batch_size=5)
    for wrong in ([0.0, 3.0], np.array([1.5]), torch.tensor([2.0]), [True] * 3, np.ones(41, bool), [True, 5]):
        calls: list[Callable[[], Any]] = [
            lambda wrong=wrong: gnnsys.pyg.NeighborLoader(plain(), [2], input_nodes=wrong),
            lambda wrong=wrong: gnnsys.pyg.NeighborLoader(typed(), [2], input_nodes=("a", wrong)),
            lambda wrong=wrong: loader(wrong),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(ValueError):
                call()
                raise AssertionError(f"call {number} took {wrong!r}")


def test_pyg_links_mean_the_same_whatever_holds_them() -> None:
    links = torch.tensor([[3, 1, 4], [1, 5, 9]])
    for name, hold in LINK_HOLDERS.items():
        batch = next(iter(gnnsys.pyg.LinkNeighborLoader(plain(), [2], edge_label_index=hold(links), batch_size=3)))
        assert torch.equal(batch.n_id[batch.edge_label_index], links), name
        given = (("a", "to", "a"), hold(links))
        batch = next(iter(gnnsys.pyg.LinkNeighborLoader(typed(), [2], edge_label_index=given, batch_size=3)))
        assert torch.equal(batch["a"].n_id[batch["a", "to", "a"].edge_label_index], links), name
    for wrong in (links.double(), links.numpy() * 0.5, [[0.5], [1.0]], links > 2, links[:1]):
        with pytest.raises(ValueError, match="edge_label_index"):
            gnnsys.pyg.LinkNeighborLoader(plain(), [2], edge_label_index=wrong)
        with pytest.raises(ValueError, match="edge_label_index"):
            gnnsys.pyg.LinkNeighborLoader(typed(), [2], edge_label_index=(("a", "to", "a"), wrong))
