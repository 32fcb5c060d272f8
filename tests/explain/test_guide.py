"""Guides say what is wrong with them, and how to put it right."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from gnnsys.explain import Explaining, Guide, RandomMasks, check_guided
from gnnsys.explain.weights import layout_of, load_state_bytes, plain_model, state_to_bytes
from gnnsys.graph import sbm, typed_graph
from gnnsys.partition import partition_graph
from gnnsys.session import init
from tests.explain.models import sage

MODEL = "tests.explain.models:sage"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_features": 0}, r"num_features .* \(0, 1\], got 0: write 1.0"),
        ({"num_features": 1.5}, r"\(0, 1\], got 1.5"),
        ({"eps": -0.1}, "eps"),
        ({"every": 0}, "every must be a whole number"),
        ({"pools": 2.5}, "pools must be a whole number"),
        ({"threshold": float("nan")}, "threshold"),
        ({"explainer": "gradients"}, "did you mean 'gradient'"),
        ({"row_dtype": "float16"}, "row_dtype must be one of bfloat16, float32"),
        ({"round_rows": 0}, "round_rows must be a whole number"),
        ({"share": 0.0}, r"share is .* in \(0, 1\]"),
        ({"model": "models.sage"}, "package.module:function"),
        ({"model": "__main__:make"}, "module of its own"),
    ],
)
def test_a_guide_that_cannot_be_is_refused(arguments: dict[str, object], text: str):
    with pytest.raises(ValueError, match=text):
        Guide(**{"model": MODEL, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_package.models:sage", "cannot be imported: No module"),
        ("tests.explain.models:nothing", "cannot be imported.*nothing"),
        ("tests.explain.models:not_a_function", "is str, not a function"),
        ("tests.explain.models:no_model", "torch.nn.Module, got int"),
    ],
)
def test_a_function_that_makes_no_model_is_named(name: str, text: str):
    with pytest.raises(ValueError, match=text):
        Guide(model=name).make_model()


def test_making_the_model_leaves_the_generator_of_the_user_as_it_is():
    before = torch.get_rng_state()
    Guide(model=MODEL).make_model()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_defaults_are_those_of_the_thesis():
    guide = Guide(model=MODEL)
    assert (guide.eps, guide.num_features, guide.every, guide.num_steps) == (0.1, 0.85, 30, 50)
    assert guide.threshold == 0.01 and isinstance(Guide(model=MODEL, explainer="random").make_explainer(), RandomMasks)


def test_graphs_that_cannot_be_guided_are_refused(tmp_path):
    guide = Guide(model=MODEL)
    with pytest.raises(ValueError, match=r"gnnsys.open\(DIR\)"):
        check_guided(sbm(100), guide)
    partition_graph(typed_graph(400), 2, tmp_path / "typed")
    partition_graph(sbm(200, num_classes=4, num_features=24), 2, tmp_path / "parts")
    with init() as session:
        with pytest.raises(ValueError, match="one node type and one edge type"):
            check_guided(session.open(tmp_path / "typed"), guide)
        graph = session.open(tmp_path / "parts")
        with pytest.raises(ValueError, match="features='z' is not among"):
            check_guided(graph, Guide(model=MODEL, features="z"))
        with pytest.raises(ValueError, match="floating point"):
            check_guided(graph, Guide(model=MODEL, features="y"))
        with pytest.raises(ValueError, match=r"another model than the one that is trained.*same function"):
            Explaining(graph, sage(), Guide(model="tests.explain.models:wider"))
        with pytest.raises(ValueError, match="not on this machine"):
            Explaining(graph, sage(), guide, parts=[5])


def test_weights_are_those_of_the_model_inside_whatever_it_was_wrapped_in():
    model, store = sage(), distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        compiled = torch.compile(model, backend="eager")
        wrapped = (parallel, compiled, torch.compile(parallel, backend="eager"), DistributedDataParallel(compiled))
        for each in wrapped:
            assert plain_model(each) is model
            made = sage()
            assert layout_of(made) == layout_of(plain_model(each))
            load_state_bytes(made, state_to_bytes(plain_model(each)))
            assert all(torch.equal(a, b) for a, b in zip(made.parameters(), model.parameters(), strict=True))
    finally:
        distributed.destroy_process_group()


def test_rows_are_never_fetched_in_a_wider_type_than_they_are_stored_in():
    for stored, as_bfloat16, as_float32 in (
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float16),
        (torch.float64, torch.bfloat16, torch.float32),
    ):
        assert Guide(model=MODEL).rows_as(stored) == as_bfloat16
        assert Guide(model=MODEL, row_dtype="float32").rows_as(stored) == as_float32


def test_what_masks_do_not_depend_on_is_not_in_the_digest():
    first = Guide(model=MODEL)
    assert first.digest() == Guide(model=MODEL, share=0.5, timeout=3.0).digest()
    assert first.digest() != Guide(model=MODEL, round_rows=99).digest()
