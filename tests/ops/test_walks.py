"""random_walks against its definition: a hop of one neighbour for every step, a coin for every restart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnsys.ops import COIN_SIDES, CSC, draw_below, random_walks, sample_neighbors, stream_key
from tests.ops.test_sampling import random_csc
from tests.support.grid import grid


def by_definition(csc: CSC, roots: Tensor, step_keys: list[int], coin_keys: list[int], coin: int, original) -> Tensor:
    """Walk by walk, step by step."""
    out = [roots.tolist()]
    for step, key in enumerate(step_keys):
        after = []
        for walk, (node, root) in enumerate(zip(out[-1], roots.tolist(), strict=True)):
            number, back = torch.tensor([walk]), root if coin else -1
            goes_back = coin and int(draw_below(number, COIN_SIDES, key=coin_keys[step])) < coin
            if node < 0 or goes_back:
                after.append(back)
                continue
            seed = torch.tensor([node], dtype=csc.indices.dtype)
            ids = None if original is None else original[seed.long()].long()
            found = sample_neighbors(csc, seed, 1, key=key, tree=number, rng_ids=ids)
            after.append(int(found.ids[0]) if found.ids.numel() else back)
        out.append(after)
    return torch.tensor(out).T


@grid(dtype=[torch.int32, torch.int64], coin=[0, COIN_SIDES // 3, COIN_SIDES], ids=[None, torch.int32, torch.int64])
def test_a_step_is_a_hop_of_one_neighbour_and_a_restart_a_coin(dtype: torch.dtype, coin: int, ids) -> None:
    csc = random_csc(90, 160, dtype)  # many nodes have one in-edge, or none
    roots = torch.randint(0, 90, (130,), generator=torch.Generator().manual_seed(3))
    original = None if ids is None else torch.randperm(90, generator=torch.Generator().manual_seed(4)).to(ids)
    keys = [stream_key(7, step) for step in range(5)], [stream_key(8, step) for step in range(5)]
    found = random_walks(csc, roots, step_keys=keys[0], coin_keys=keys[1], coin=coin, original=original)
    assert torch.equal(found, by_definition(csc, roots, *keys, coin, original))
    assert bool((found < 0).any()) == (coin == 0)


def test_threads_change_nothing() -> None:
    csc, roots = random_csc(500, 6000), torch.arange(5000) % 500
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(random_walks(csc, roots, step_keys=range(9), coin_keys=range(9, 18), coin=COIN_SIDES // 9))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_walks_of_no_steps_and_no_walks() -> None:
    csc = random_csc(9, 30)
    assert random_walks(csc, torch.tensor([3, 4]), step_keys=[]).tolist() == [[3], [4]]
    assert random_walks(csc, torch.empty(0, dtype=torch.int64), step_keys=[1, 2]).shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roots": torch.tensor([9])}, r"roots must be in \[0, 9\)"),
        ({"roots": torch.tensor([1], dtype=torch.int32)}, "roots must be Long"),
        ({"coin": -1}, "coin must be in"),
        ({"coin": 5}, "coin_keys must be as many as step_keys, 2, got 0"),
        ({"original": torch.arange(3)}, "original must have an id for each of 9 nodes"),
    ],
)
def test_bad_arguments_are_refused(options: dict, message: str) -> None:
    arguments = {"roots": torch.tensor([0]), "step_keys": [1, 2], **options}
    with pytest.raises(ValueError, match=message):
        random_walks(random_csc(9, 30), arguments.pop("roots"), **arguments)


def test_damaged_structure_is_refused() -> None:
    with pytest.raises(ValueError, match="indices must be in"):
        random_walks(CSC(torch.tensor([0, 1]), torch.tensor([5]), 9), torch.tensor([0]), step_keys=[1])
    with pytest.raises(ValueError, match="indptr must ascend"):
        torn = CSC(torch.tensor([0, 9, 2, 3]), torch.tensor([0, 1, 2]), 3)
        random_walks(torn, torch.tensor([0]), step_keys=[1])
