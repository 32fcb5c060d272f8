"""What a contest makes of its turns."""

import numpy as np
import torch

from gnnsys.bench.partition import contest
from gnnsys.bench.partition.contest import COMMUNICATION, OURS, Contest
from gnnsys.graph import rmat


def test_sides_take_turns_whose_medians_are_told_with_the_last_partition(monkeypatch):
    ran = []

    def run_one(folder, side):
        ran.append(side)
        turn = ran.count(side)
        np.save(folder / "part.npy", np.full(4, turn, dtype=np.int32))
        seconds = {OURS: (5.0, 1.0, 3.0), COMMUNICATION: (7.0, 9.0, 2.0)}[side][turn - 1]
        return {"seconds": seconds, "peak_bytes": 100 * seconds}

    monkeypatch.setattr(contest, "_run_one", run_one)
    held = Contest(lambda: rmat(32, 64, seed=0), (OURS, COMMUNICATION), 2, ["edges"], turns=3)
    assert [held.figures(side).seconds for side in (OURS, COMMUNICATION)] == [3.0, 7.0]
    assert [held.figures(side).peak_bytes for side in (OURS, COMMUNICATION)] == [300.0, 700.0]
    assert torch.equal(held.figures(OURS).part, torch.full((4,), 3, dtype=torch.int32))
    assert ran == [OURS, COMMUNICATION] * 3, "once, whoever asks how often"
