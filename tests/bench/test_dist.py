"""A job is measured phase by phase, in the lab at its rates; what its rows are made of is arithmetic on that."""

import json
import math

import pytest

from gnnsys.bench.dist.inputs import TWO_LEVEL, make_parts
from gnnsys.bench.dist.phase import BEGIN, END, FIGURES, NON_STOP, READY, SYNCHRONOUS, Phase, go_file, save
from gnnsys.bench.dist.run_job import PhaseFigures, run_job
from gnnsys.bench.dist.settings import QUICK, DistSettings
from gnnsys.lab import HostTraffic, available
from tests.support.processes import module_code, run_ranks

TINY = DistSettings(
    num_nodes=3000,
    num_classes=4,
    num_features=256,
    hosts=2,
    trainers=1,
    batch_size=50,
    fanouts=(4, 3),
    hidden=8,
    steps=3,
)


PHASES = [
    Phase(name="slow", mode=SYNCHRONOUS, rate="2mbit", warm=1),
    Phase(name="fast", mode=NON_STOP, warm=1, epochs=2),
]
TRAIN = module_code("gnnsys.bench.dist.train")


def check_ranks(ranks: list[dict], epochs: int) -> None:
    assert len(ranks) == 2
    for rank in ranks:
        assert (rank["steps"], rank["seeds"]) == (3 * epochs, 150 * epochs)
        assert rank["waited"] + rank["computed"] <= rank["seconds"] and math.isfinite(rank["loss"])
    assert sum(rank["counts"]["bytes_remote"] for rank in ranks) > 0


def test_trainers_go_through_their_phases_and_tell_the_figures_of_all_ranks(tmp_path):
    """On two machines that are processes of this host; in the lab they have links and rates, which takes a minute."""
    parts = make_parts(tmp_path, TINY, TWO_LEVEL, 2)
    TINY.task(2).save(tmp_path)
    save(PHASES, tmp_path)
    for phase in PHASES:
        for word in (READY, BEGIN):
            go_file(tmp_path, word, phase.name).touch()
    first, second = run_ranks(TRAIN, [1, 1], tmp_path, parts)
    lines = [line.split(maxsplit=2) for line in first.stdout.splitlines() if line.startswith("phase-")]
    words = [READY, BEGIN, END, FIGURES]
    assert [line[:2] for line in lines] == [[word, phase.name] for phase in PHASES for word in words]
    for line, phase in zip(lines[3::4], PHASES, strict=True):
        check_ranks(json.loads(line[2]), phase.epochs)
    assert "phase-" not in second.stdout


@pytest.mark.long  # trainers and what they tell: the test before; rates, quotas and counters of links: tests/lab
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_the_phases_of_a_job_are_measured_at_their_rates(tmp_path):
    parts = make_parts(tmp_path, TINY, TWO_LEVEL, 2)
    found = run_job(tmp_path / "job", parts, PHASES, TINY.task(2), cpu=0.9, timeout=180)
    slow = found["slow"]
    for phase in PHASES:
        check_ranks(found[phase.name].ranks, phase.epochs)
        assert found[phase.name].seeds == 300
    rows = sum(rank["counts"]["bytes_remote"] for rank in slow.ranks)
    assert sum(t.bytes_in for t in slow.traffic.values()) > rows
    assert slow.seconds >= 0.5 * slow.link_seconds("2mbit") > 0.5  # the bucket lets its burst through at once
    assert slow.samples_per_s == pytest.approx(300 / slow.seconds)


def test_the_busiest_direction_of_the_busiest_link_is_the_bound():
    traffic = {1: HostTraffic(4_000_000, 1_000_000, 0, 0), 2: HostTraffic(2_000_000, 5_000_000, 0, 0)}
    rank = {"seconds": 8.0, "seeds": 100, "waited": 2.0}
    figures = PhaseFigures(Phase(name="p", epochs=2), traffic, {1: 1.0, 2: 1.0}, [rank, rank])
    assert figures.busiest_bytes == 2_500_000
    assert figures.link_seconds("20mbit") == pytest.approx(1.0)
    assert (figures.seconds, figures.samples_per_s, figures.waited_share) == (4.0, 25.0, 0.25)


def test_settings_are_read_from_what_a_person_writes():
    texts = {"rates": "1gbit,50mbit", "cpu": "0.9", "fanouts": "5,3", "num_features": "64", "rate": "50mbit"}
    settings = DistSettings.from_texts(texts, QUICK)
    assert (settings.rates, settings.cpu, settings.fanouts) == (("1gbit", "50mbit"), 0.9, (5, 3))
    assert (settings.num_features, settings.rate, settings.batch_size) == (64, "50mbit", QUICK["batch_size"])
    assert settings.graph["num_features"] == 64


@pytest.mark.parametrize(
    "texts, message",
    [
        ({"speed": "1"}, "there is no setting 'speed', only num_nodes"),
        ({"cpu": "half"}, "setting cpu='half' is not what it should be"),
        ({"rates": "fast"}, "a rate must look like"),
        ({"hosts": "1"}, "hosts must be at least 2"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        DistSettings.from_texts(texts, {})
