"""What may be saved, what is found by itself, and what is refused at once rather than when it is needed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import gnnsys
from gnnsys.checkpoint.generators import read_generators, seed_generators, write_generators
from gnnsys.checkpoint.snapshot import as_it_is, check_state, same, snapshot
from gnnsys.checkpoint.states import sort_states
from gnnsys.store import Shard, Store


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"kept": [{"deep": self.value}]}

    def load_state_dict(self, state):
        self.value = state["kept"][0]["deep"]


class OfEachRank(Holder):
    def load_state_dicts(self, states):
        self.value = [state["kept"][0]["deep"] for state in states]


@pytest.fixture
def store():
    shard = Shard(0)
    yield Store(machine_of_part=[0], local=shard)
    shard.close()


@pytest.mark.parametrize("value", [slice(1, 2), object(), Holder(1), lambda: 1, np.float64(1.0)])
def test_what_only_unpickling_could_read_is_refused_when_it_is_named_and_when_it_comes_later(tmp_path, value):
    words = rf"thing\['kept'\]\[0\]\['deep'\] is a {type(value).__name__}, which"
    with pytest.raises(ValueError, match=words):
        gnnsys.resume(tmp_path / "none", thing=Holder(value))
    assert not (tmp_path / "none").exists(), "before anything is done"
    thing = Holder(1)
    with gnnsys.resume(tmp_path, thing=thing) as saver:
        thing.value = value
        with pytest.raises(ValueError, match=words):
            saver.save()
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_told_is_refused_when_it_is_named(tmp_path):
    class Broken(Holder):
        def state_dict(self):
            raise KeyError("window")

    with pytest.raises(ValueError, match="window"):
        gnnsys.resume(tmp_path, thing=Broken(1))


@pytest.mark.parametrize("value", [3, 2.5, None, "text", b"bytes", (1, 2), {1, 2}, torch.float16, torch.ones(2), True])
def test_plain_values_and_tensors_come_back(tmp_path, value):
    gnnsys.resume(tmp_path, thing=Holder(value), asynchronous=False).save()
    other = Holder(None)
    gnnsys.resume(tmp_path, thing=other)
    assert type(other.value) is type(value) and same(other.value, value)


def test_what_is_not_copied_is_the_tensor_itself_unless_it_is_a_piece_of_another(tmp_path):
    whole, odd = torch.arange(6.0), torch.eye(2).to_sparse()
    taken = snapshot({"whole": whole, "piece": whole[1:2], "odd": odd}, "state", as_it_is)
    assert taken["whole"].data_ptr() == whole.data_ptr()
    assert taken["piece"].untyped_storage().nbytes() == 4 and taken["piece"].tolist() == [1.0]
    assert check_state({"whole": whole, "deep": [{"half": torch.ones(3).half()}]}, "state") == 24 + 6


def test_a_copy_is_of_the_moment_it_was_taken():
    weight = nn.Parameter(torch.ones(2))
    copied = snapshot({"w": weight, "list": [weight.detach()]}, "state")
    with torch.no_grad():
        weight.zero_()
    assert copied["w"].tolist() == copied["list"][0].tolist() == [1, 1]


def test_embeddings_inside_modules_and_optimizers_are_found(store):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = gnnsys.DistEmbedding(store, 10, 2, "inner")

    model, alone = Model(), gnnsys.DistEmbedding(store, 10, 2, "alone")
    states = sort_states({"model": model, "sparse": gnnsys.SparseAdam([model.inner, alone])})
    assert {name: table.name for name, table in states.tables.items()} == {"model.inner": "inner", "sparse.1": "alone"}
    states = sort_states({"sparse": gnnsys.SparseAdam([model.inner, alone]), "users": alone})
    assert sorted(states.tables) == ["sparse.0", "users"]


def test_what_cannot_be_saved_is_named(store, tmp_path):
    table = store.create("t", 10)
    for states, words in (
        ({"number": 3}, "number is a int, which has no state_dict"),
        ({"one": table, "other": table}, "other and one are one table, 't'"),
        ({"fixed": store.create("fixed", 10, mutable=False)}, "fixed is the table 'fixed', which never changes"),
    ):
        with pytest.raises(ValueError, match=words):
            gnnsys.resume(tmp_path, **states)
    for options in ({"every": 0}, {"keep": -1}, {"every": 2.5}):
        with pytest.raises(ValueError, match=r"must be a whole number, at least 1"):
            gnnsys.resume(tmp_path, **options)


def test_saving_twice_without_a_step_between_is_told(tmp_path):
    with gnnsys.resume(tmp_path, thing=Holder(1), asynchronous=False) as saver:
        saver.save()
        with pytest.raises(ValueError, match=r"step 0 is saved already: call saver.step\(\)"):
            saver.save()
        saver.step()
        assert saver.save() == saver.save() == tmp_path / "step-0000000001"
    with pytest.raises(ValueError, match="this saver is closed"):
        saver.step()


def test_generators_go_on_where_they_were_and_new_ranks_get_streams_of_their_own():
    states = read_generators()

    def draw():
        return torch.rand(2).tolist(), np.random.normal(), random.gauss(0, 1), torch.randn(1).tolist()

    drawn = draw()
    write_generators(states)
    assert draw() == drawn
    new = []
    for rank in (2, 3, 2):
        seed_generators([states, states], rank)
        new.append(draw())
    assert new[0] == new[2] and len({str(one) for one in [drawn, *new]}) == 3
