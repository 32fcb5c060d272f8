"""Graphs with everything that is awkward in them, and one way to compare a layer with a peer's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture
def edge_index() -> Tensor:
    """40 nodes, 200 edges in no order: parallel edges, self loops (one of them twice), nodes without any edge."""
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(0, 34, (2, 196), generator=generator)
    loops = torch.tensor([[5, 5, 9, 11], [5, 5, 9, 11]])
    return torch.cat([edges, loops], 1)[:, torch.randperm(200, generator=generator)]


@pytest.fixture
def bipartite() -> Tensor:
    """150 edges from 40 sources to 25 destinations."""
    generator = torch.Generator().manual_seed(4)
    return torch.stack([torch.randint(40, (150,), generator=generator), torch.randint(25, (150,), generator=generator)])


def random_rows(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def rows() -> Callable[..., Tensor]:
    return random_rows


def outputs_and_gradients(layer: nn.Module, inputs: list[Tensor], call: Callable[..., Tensor]) -> dict[str, Tensor]:
    leaves = [value.clone().requires_grad_() for value in inputs]
    out = call(layer, *leaves)
    parameters = dict(layer.named_parameters())
    cotangent = random_rows(*out.shape, dtype=out.dtype, seed=9)
    gradients = torch.autograd.grad(out, [*leaves, *parameters.values()], cotangent, allow_unused=True)
    names = [f"input {i}" for i in range(len(leaves))] + list(parameters)
    return {"output": out} | {f"gradient of {n}": g for n, g in zip(names, gradients, strict=True) if g is not None}


@pytest.fixture
def assert_same_layer() -> Callable[..., None]:
    """Copies the peer's parameters into ours and compares the output and every gradient."""

    def compare(
        ours: nn.Module,
        peer: nn.Module,
        inputs: list[Tensor],
        call: Callable[..., Tensor],
        call_peer: Callable[..., Tensor] | None = None,
        copy: Callable[[], None] | None = None,
    ) -> None:
        ours.to(inputs[0].dtype), peer.to(inputs[0].dtype)
        if copy is None:
            ours.load_state_dict(peer.state_dict())
        else:
            copy()
        got = outputs_and_gradients(ours, inputs, call)
        expected = outputs_and_gradients(peer, inputs, call_peer or call)
        if copy is None:
            assert got.keys() == expected.keys()
        tolerance = TOLERANCE[inputs[0].dtype]
        for name in [n for n in expected if copy is None or n == "output" or n.startswith("gradient of input")]:
            close = torch.allclose(got[name], expected[name], rtol=tolerance, atol=tolerance)
            assert close, f"{name} differs by up to {float((got[name] - expected[name]).abs().max()):g}"

    return compare
