"""Minutes of it are `python -m tests.fuzz.state`; here are a few cases, and that it finds what is wrong."""

from __future__ import annotations

import pytest

from gnnsys.store import Shard
from tests.fuzz.state import main, run_case


def test_a_store_through_random_actions_is_torchs_model_of_it():
    for seed in range(8):
        told = run_case(seed)
        assert told is None, told


@pytest.mark.filterwarnings("ignore")
def test_moments_that_a_load_keeps_are_found_and_the_seed_is_told(monkeypatch, capsys):
    def keep_all(self: Shard, table, what, states) -> None:
        table.rounds.restart(what)
        for state in states:
            self._state(table, state)

    monkeypatch.setattr(Shard, "_restart", keep_all)
    seed = next(seed for seed in range(100, 150) if run_case(seed) is not None)
    assert main(["--seed", str(seed), "--one"]) == 1
    told = capsys.readouterr().out
    assert f"repeat it: python -m tests.fuzz.state --seed {seed} --one" in told and " load emb" in told
