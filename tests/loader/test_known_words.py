"""A keyword that a loader does not know is refused in one line that says what was meant."""

import inspect

import pytest
import torch

import gnnsys
from gnnsys.graph import sbm
from gnnsys.loader import LinkNeighborLoader, NeighborLoader, SubgraphLoader, knows_words, words_of

GRAPH = sbm(60, seed=0)


class Made:
    @knows_words(["batch_size"], instead={"device": "write batch.to(device)"})
    def __init__(self, data, sizes=(), *, seed=0, **more):
        self.given = data, sizes, seed, more


class Own(Made):
    """A user's, with words of its own."""

    def __init__(self, folder, **more):
        super().__init__(folder, **more)


def test_words_that_are_known_go_through():
    assert Made(1, (2,), seed=3, batch_size=4).given == (1, (2,), 3, {"batch_size": 4})
    assert Own(folder="here", sizes=(5,)).given == ("here", (5,), 0, {})
    assert list(inspect.signature(Made).parameters) == ["data", "sizes", "seed", "more"]
    assert words_of(Made.__init__) == ["data", "sizes", "seed"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sises": (2,)}, "Made takes no 'sises': did you mean 'sizes'?"),
        ({"batchsize": 2}, "Made takes no 'batchsize': did you mean 'batch_size'?"),
        ({"device": "cpu"}, "Made takes no 'device': write batch.to(device)"),
        ({"xyz": 1}, "Made takes no 'xyz', only ['batch_size', 'data', 'seed', 'sizes']"),
        ({"more": 1}, "Made takes no 'more', only ['batch_size', 'data', 'seed', 'sizes']"),
    ],
)
def test_words_that_are_not_are_refused_with_the_name_that_was_meant(given, told):
    with pytest.raises(TypeError) as error:
        Made(1, **given)
    assert str(error.value) == told


def test_a_subclass_is_called_by_its_own_name():
    with pytest.raises(TypeError, match=r"^Own takes no 'sises': did you mean 'sizes'\?$"):
        Own("here", sises=(2,))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_neighbor": [2]}, r"takes no 'num_neighbor': did you mean 'num_neighbors'\?"),
        ({"num_neighbors": [2], "batchsize": 2}, r"takes no 'batchsize': did you mean 'batch_size'\?"),
        ({"num_neighbors": [2], "num_workers": 2}, "takes no 'num_workers': write num_threads"),
        ({"num_neighbors": [2], "pin_memory": True}, "takes no 'pin_memory': write device"),
    ],
)
@pytest.mark.parametrize("make", [NeighborLoader, LinkNeighborLoader])
def test_our_own_loaders_refuse_what_they_do_not_know(make, given, told):
    with pytest.raises(TypeError, match=f"^{make.__name__} {told}"):
        make(GRAPH, **given)


def test_a_loader_of_subgraphs_refuses_what_it_does_not_know():
    sampler = gnnsys.sampling.SaintNodeSampler(GRAPH, 10, num_subgraphs=2)
    with pytest.raises(TypeError, match=r"^SubgraphLoader takes no 'drop_lasts': did you mean 'drop_last'\?$"):
        SubgraphLoader(GRAPH, sampler, drop_lasts=True)


@pytest.mark.parametrize("seed", ["a", 1.5, None, torch.tensor([1, 2])])
def test_a_seed_that_is_no_whole_number_is_refused_when_the_loader_is_made(seed):
    for make in (NeighborLoader, LinkNeighborLoader):
        with pytest.raises(ValueError, match="seed must be a whole number, got"):
            make(GRAPH, [2], seed=seed)


@pytest.mark.parametrize("seed", [-1, 1 << 70, torch.tensor(3)])
def test_any_whole_number_is_a_seed(seed):
    assert len(list(NeighborLoader(GRAPH, [2], seed=seed, batch_size=30, num_threads=0, across_epochs=False))) == 2
