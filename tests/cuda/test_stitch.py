"""stitch on a GPU, from pieces there and on the host, against the host's."""

from __future__ import annotations

import pytest
import torch

from gnnsys.ops import PartNeighbors, stitch_neighbors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random_pieces(sizes: list[int], wide: bool, weighted: bool, seed: int) -> list[PartNeighbors]:
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for number, size in enumerate(sizes):
        counts = torch.randint(0, 6, (size,), generator=generator).int()
        if size > 2:
            counts[size // 2] = 5000  # a hub among those that have few
        total = int(counts.sum())
        ids = torch.randint(0, 1 << 30, (total,), generator=generator)
        edges = torch.randint(0, 1 << 30, (total,), generator=generator)
        edges = edges.int() if number % 2 else edges + (1 << 40)
        weight = torch.rand(total, generator=generator) if weighted else None
        pieces.append(PartNeighbors(counts, ids if wide else ids.int(), edges, weight))
    return pieces


def on_device(piece: PartNeighbors) -> PartNeighbors:
    return PartNeighbors(*(None if rows is None else rows.cuda() for rows in piece))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_pieces_on_the_host_and_on_the_device_are_put_together_as_on_the_host(wide: bool, weighted: bool) -> None:
    for seed, sizes in enumerate([[0, 1], [700, 3, 0, 40_000], [1, 1], [5000]]):
        pieces = random_pieces(sizes, wide, weighted, seed)
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
        segments = [(k, sum(sizes[:k]), sizes[k]) for k in reversed(range(len(sizes)))]
        expected = stitch_neighbors(order, pieces, segments, wide=wide)
        for mask in (0b0000, 0b1111, 0b0101):
            placed = [on_device(piece) if mask >> k & 1 else piece for k, piece in enumerate(pieces)]
            found = stitch_neighbors(order.cuda(), placed, segments, wide=wide)
            for name, ours, theirs in zip(found._fields, found, expected, strict=True):
                assert (ours is None) == (theirs is None), name
                if theirs is not None:
                    assert ours.is_cuda and ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs), name


def test_page_locked_pieces_may_be_changed_as_soon_as_the_call_returns() -> None:
    (piece,) = random_pieces([40_000], wide=True, weighted=False, seed=3)
    locked = PartNeighbors(*(None if rows is None else rows.pin_memory() for rows in piece))
    order = torch.arange(40_000)
    expected = stitch_neighbors(order, [piece], [(0, 0, 40_000)], wide=True)
    found = stitch_neighbors(order.cuda(), [locked], [(0, 0, 40_000)], wide=True)
    for rows in locked[:3]:
        rows.fill_(-1)
    assert torch.equal(found.ids.cpu(), expected.ids) and torch.equal(found.positions.cpu(), expected.positions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"counts": torch.tensor([1, -1, 2], dtype=torch.int32)}, "counts must not be negative"),
        ({"counts": torch.tensor([0, 0, 1], dtype=torch.int32)}, "counts add up to 1, but there are 2"),
        ({"edges": torch.tensor([1, 2, 3])}, "2 ids and 3 edges"),
        ({"counts": torch.tensor([1, 1], dtype=torch.int32)}, "answers 2 seeds, 3 are asked"),
    ],
)
def test_what_another_machine_says_is_checked_before_it_is_used(change: dict[str, torch.Tensor], said: str) -> None:
    good = PartNeighbors(torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([4, 5]), torch.tensor([6, 7]))
    with pytest.raises(ValueError, match=said):
        stitch_neighbors(torch.arange(3, device="cuda"), [good._replace(**change)], [(0, 0, 3)], wide=True)
