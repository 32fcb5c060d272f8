"""What is counted of batches without a run: rows and edges by owner, times, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gnnsys.profiling import DryJob, count_shares, profile_parts
from gnnsys.profiling.dry_run import home_parts
from tests.profiling.communities import two_parts

JOB = DryJob(fanouts=(5, 4), batch_size=32, seed=3, num_threads=0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_parts(tmp_path_factory.mktemp("counting") / "parts")


def test_rows_and_edges_of_batches_are_counted_by_owner(parts: Path) -> None:
    share = count_shares(parts, JOB, trainers=1, num_batches=3).shares[0]
    assert (share.rows.sum(1) == share.nodes).all()
    assert (share.edges.sum(1) > share.seeds).all()
    assert ((share.seeds == 31) | (share.seeds == 32)).all()
    assert (share.batch_bytes >= share.nodes * 16 * 4).all()
    assert (share.requests > 0).all()


@pytest.mark.parametrize("depth", [1, 4])
def test_progress_goes_from_no_batch_to_all_of_them(parts: Path, depth: int) -> None:
    seen: list[tuple[int, int]] = []
    job = replace(JOB, num_threads=1, prefetch=depth)
    count_shares(parts, job, trainers=2, num_batches=3, progress=lambda done, total: seen.append((done, total)))
    total = seen[0][1]
    assert total in (2 * 2 * 3, 4 * 2 * 3) and seen == [(done, total) for done in range(total + 1)]


def test_no_seeds_are_told(parts: Path) -> None:
    with pytest.raises(ValueError, match="has neither 'test_mask' nor 'test'"):
        count_shares(parts, DryJob(fanouts=(2,), batch_size=4, what="test"), num_batches=1)


def test_a_profile_of_parts_knows_what_a_step_takes_and_sums(parts: Path) -> None:
    profile = profile_parts(parts, JOB, hidden=8, num_batches=10)
    assert profile.num_parts == len(profile.shares) == 2
    assert all((share.computing > 0).all() and (share.sampling > 0).all() for share in profile.shares)
    widths = [(16, 8), (8, 50)]  # of two layers; fifty classes where the graph says nothing
    assert profile.gradients.dense == sum(4 * (2 * a * b + b) for a, b in widths)
    assert profile.byte_work.seal > 0
    assert profile_parts(parts, JOB, hidden=8, num_batches=1, encrypt=False).byte_work.seal == 0


@pytest.mark.parametrize(
    ("share", "counts", "trainers", "home"),
    [
        (range(0, 10), [10, 10], 1, (0,)),
        (range(5, 15), [10, 10], 1, (0, 1)),
        (range(8, 18), [10, 10], 1, (1,)),
        (range(0, 20), [5, 5, 5, 5], 2, (0, 1)),
        (range(0, 0), [10, 10], 1, (0,)),
    ],
)
def test_home_is_where_a_quarter_of_the_seeds_are(
    share: range, counts: list[int], trainers: int, home: tuple[int, ...]
) -> None:
    assert home_parts(share, counts, trainers) == home


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fanouts": ()}, "fanouts must be"),
        ({"fanouts": (0,)}, "fanouts must be"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
def test_wrong_options_are_told(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DryJob(**{"fanouts": (2,), "batch_size": 4, **options})  # type: ignore[arg-type]
