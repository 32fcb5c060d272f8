"""A short run of the fuzzer of full-graph training, the same cases every time."""

from __future__ import annotations

from collections import Counter

from tests.fuzz.fullgraph import judge


def test_random_models_are_what_their_modules_are_on_the_whole_graph():
    found = Counter(judge(seed) for seed in range(40))
    assert found["right"] >= 20, found
