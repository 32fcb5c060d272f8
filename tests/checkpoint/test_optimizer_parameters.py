"""An optimizer's moments go to the parameters they were saved of, or the checkpoint is refused with their names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import gnnsys
from gnnsys.checkpoint import folder as folders
from gnnsys.checkpoint.files import read_state, write_state
from gnnsys.session import Session
from tests.checkpoint.groups import on_ranks
from tests.support.grid import grid


class Model(nn.Module):
    """Parameters of one shape, but for `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.w0, self.w1 = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
        self.last = nn.Parameter(torch.zeros(4))


def adam(model: Model, *groups: str) -> torch.optim.Adam:
    """Over groups of parameters, such as "w0 w1", "last"."""
    return torch.optim.Adam([{"params": [getattr(model, name) for name in group.split()]} for group in groups])


def save(folder, *groups: str, with_model: bool = True) -> None:
    model = Model()
    optimizer = adam(model, *groups)
    (3 * model.w0 + 2 * model.w1).sum().backward()
    model.last.grad = torch.ones(4)
    optimizer.step()
    states = {"model": model} if with_model else {}
    with gnnsys.resume(folder, optimizer=optimizer, **states) as saver:
        saver.save()


def restored(folder, *groups: str, with_model: bool = True) -> torch.optim.Adam:
    model = Model()
    optimizer = adam(model, *groups)
    states = {"model": model} if with_model else {}
    try:
        with gnnsys.resume(folder, optimizer=optimizer, **states) as saver:
            assert saver.restored is not None
    except ValueError:
        assert not optimizer.state and not model.w0.any(), "nothing is changed before the error"
        raise
    moments = optimizer.state
    assert with_model is False or torch.equal(moments[model.w0]["exp_avg"], torch.full((2, 3), 0.3))
    return optimizer


@grid(
    case={
        "two of one shape": (["w0 w1"], ["w1 w0"], "place 0 of group 0 had model.w0 [2, 3] and has model.w1 [2, 3]; p"),
        "groups": (["w0", "w1"], ["w1", "w0"], "place 0 of group 1 had model.w1 [2, 3] and has model.w0 [2, 3]"),
        "one less": (["w0 w1"], ["w0"], "place 1 of group 0 had model.w1 [2, 3] and has nothing"),
        "one more": (["w0"], ["w0 w1"], "place 1 of group 0 had nothing and has model.w1 [2, 3]"),
        "a new group": (["w0"], ["w0", "last"], "group 1 is new"),
        "a missing group": (["w0", "last"], ["w0"], "group 1 is missing"),
        "both": (["w0 w1"], ["last w0"], "place 0 of group 0 had model.w0 [2, 3] and has model.last [4]"),
    }
)  # fmt: skip
def test_an_optimizer_over_other_parameters_is_refused_by_their_names(tmp_path, case):
    before, after, words = case
    save(tmp_path, *before)
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        restored(tmp_path, *after)
    assert "optimizer has other parameters than in the checkpoint of step 0" in str(refused.value)
    restored(tmp_path, *before)


def test_of_parameters_without_a_name_shapes_are_compared(tmp_path):
    save(tmp_path, "w0 last", with_model=False)
    restored(tmp_path, "w1 last", with_model=False)
    words = r"had a parameter of no module that resume\(\) was given \[2, 3\] and has .* \[4\]"
    with pytest.raises(ValueError, match=words):
        restored(tmp_path, "last w0", with_model=False)


def test_names_that_torch_was_given_count_where_no_module_has_them(tmp_path):
    def optimizer(*names: str) -> torch.optim.Adam:
        model = Model()
        return torch.optim.Adam([(name, getattr(model, name)) for name in names])

    with gnnsys.resume(tmp_path, optimizer=optimizer("w0", "w1")) as saver:
        saver.save()
    with pytest.raises(ValueError, match=r"had w0 \[2, 3\] and has w1 \[2, 3\]"):
        gnnsys.resume(tmp_path, optimizer=optimizer("w1", "w0"))


def test_a_checkpoint_of_earlier_versions_is_restored(tmp_path):
    save(tmp_path, "w0 w1")
    path = tmp_path / "step-0000000000"
    manifest = folders.read_checkpoint(path)
    state = read_state(path / "rank-0.pt")
    del state["parameters"]
    manifest["files"]["rank-0.pt"] = write_state(path / "rank-0.pt", state)
    folders.describe(path, manifest)
    restored(tmp_path, "w0 w1")


def test_each_rank_is_compared_with_what_it_saved_itself(tmp_path):
    def life(orders: list[str]) -> list[object]:
        def body(group):
            model = Model()
            states = {"model": model, "optimizer": adam(model, orders[group.rank])}
            with Session(group, 60) as session, gnnsys.resume(tmp_path, session=session, **states) as saver:
                restored = saver.restored is not None
                saver.step()
                saver.save()
            return restored

        return on_ranks(len(orders), body)

    assert life(["w0 w1", "w1 w0"]) == [False, False]
    assert life(["w0 w1", "w1 w0"]) == [True, True]
    assert all("place 0 of group 0 had model.w1" in str(error) for error in life(["w0 w1"] * 2))
    assert life(["w0 w1"]) == [True], "another number of ranks takes the states of rank 0"


class Several(torch.optim.Optimizer):
    """An optimizer of optimizers, which has no groups of its own."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def state_dict(self):
        return {"parts": [each.state_dict() for each in self.parts]}

    def load_state_dict(self, state):
        for each, its in zip(self.parts, state["parts"], strict=True):
            each.load_state_dict(its)


def test_an_optimizer_without_groups_is_saved_and_restored(tmp_path):
    for restored in (False, True):
        model = Model()
        with gnnsys.resume(
            tmp_path, model=model, optimizer=Several(adam(model, "w0 w1"), adam(model, "last"))
        ) as saver:
            assert (saver.restored is not None) == restored
            saver.step()
            saver.save()
