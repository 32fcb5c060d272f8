"""Which machine serves which part: contiguous blocks where all have all, balanced where folders decide."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from gnnsys.partition import place_parts


@pytest.mark.parametrize(("num_parts", "num_machines"), [(4, 4), (8, 3), (2, 5), (1, 1), (7, 2)])
def test_where_all_machines_have_all_parts_each_serves_a_contiguous_block(num_parts, num_machines):
    placed = place_parts(num_parts, [range(num_parts)] * num_machines)
    assert placed == sorted(placed)
    sizes = [placed.count(machine) for machine in range(num_machines)]
    assert max(sizes) - min(sizes) <= 1


def test_machines_with_their_own_parts_alone_serve_those():
    assert place_parts(3, [{2}, {0}, {1}]) == [1, 2, 0]


def test_a_part_that_nobody_has_is_named():
    with pytest.raises(ValueError, match="no machine has part 2 of 4"):
        place_parts(4, [{0, 1}, {1, 3}])


def test_the_fullest_machine_has_as_few_parts_as_any_placement_allows():
    draw = random.Random(0)
    for _ in range(60):
        num_parts, num_machines = draw.randint(1, 5), draw.randint(1, 3)
        folders = [{part for part in range(num_parts) if draw.random() < 0.6} for _ in range(num_machines)]
        owners = [[m for m in range(num_machines) if part in folders[m]] for part in range(num_parts)]
        if not all(owners):
            continue
        placed = place_parts(num_parts, folders)
        assert all(part in folders[machine] for part, machine in enumerate(placed))
        best = min(max(Counter(choice).values()) for choice in itertools.product(*owners))
        assert max(Counter(placed).values()) == best
