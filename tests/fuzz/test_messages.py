"""A million mutated messages are `make fuzz`; here are the first of another seed."""

from __future__ import annotations

from tests.fuzz.mutate import message
from tests.fuzz.run import fuzz


def test_a_server_answers_a_correct_client_throughout_and_stays_as_large_as_it_was(tmp_path):
    assert fuzz(tmp_path / "parts", num_messages=20_000, seed=1) is None


def test_a_mutated_message_is_made_again_from_its_seed_and_number():
    recorded = [[bytes(range(200)), b"x" * 50], [bytes(120)]]
    again = [message(3, number, recorded) for number in range(200)]
    assert again == [message(3, number, recorded) for number in range(200)]
    assert len({tuple(frames) for frames in again}) > 150
    assert again != [message(4, number, recorded) for number in range(200)]
