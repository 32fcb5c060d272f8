"""A million mutated messages are `make fuzz`; here are the first of another seed."""

from __future__ import annotations

import pytest

from tests.fuzz.mutate import message
from tests.fuzz.run import fuzz, judge
from tests.fuzz.served import Usage


@pytest.mark.usefixtures("forked_servers")
def test_a_server_answers_a_correct_client_throughout_and_stays_as_large_as_it_was(tmp_path):
    assert fuzz(tmp_path / "parts", num_messages=800, seed=1) is None


@pytest.mark.usefixtures("forked_servers")
def test_no_sealed_message_that_was_changed_is_accepted_and_a_correct_client_is_answered_throughout(tmp_path):
    assert fuzz(tmp_path / "parts", num_messages=3_000, seed=1, is_sealed=True) is None


def test_a_mutated_message_is_made_again_from_its_seed_and_number():
    recorded = [[bytes(range(200)), b"x" * 50], [bytes(120)]]
    again = [message(3, number, recorded) for number in range(200)]
    assert again == [message(3, number, recorded) for number in range(200)]
    assert len({tuple(frames) for frames in again}) > 150
    assert again != [message(4, number, recorded) for number in range(200)]


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (lambda at: min(at, 300_000) * 40, None),  # levels off
        (lambda at: at * 5 + at % 7_000 * 300, None),  # the allocator's own
        (lambda at: at * 19, "memory grows"),
        (lambda at: at * 400, "memory grew"),
    ],
)
def test_memory_that_has_not_stopped_growing_is_told(memory, words):
    points = [(at, Usage(10**8 + memory(at), 50, 7)) for at in range(25_000, 1_000_001, 25_000)]
    told = judge(points)
    assert told is None if words is None else told is not None and words in told
