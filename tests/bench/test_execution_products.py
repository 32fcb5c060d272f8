"""Rows of products of the first layer: on the host, where they mean nothing, every line but the GPU's runs."""

from functools import partial

import pytest

from gnnsys.bench.case import OURS, NotHere
from gnnsys.bench.execution import BENCHMARKS, products
from gnnsys.bench.execution.products import ALL, DEFAULT, FASTER, STALE, host_products, refused_reason
from gnnsys.bench.workload import Sizes, Workload
from gnnsys.planning import WayTrial
from gnnsys.planning.execution import plan as plans

TINY = Sizes(1_000, 5_000, num_seeds=8)
ON_HOST = {"device": "cpu"}


@pytest.fixture
def work(monkeypatch):
    monkeypatch.setattr(products, "_WIDE", 100)
    monkeypatch.setattr(products, "_NODES", 60_000)  # of which a thousandth
    monkeypatch.setattr(plans, "WayTrial", partial(WayTrial, warm=1, measured=1, rounds=1))
    with Workload(TINY, settings=ON_HOST) as made:
        yield made


def test_what_a_plan_takes_stands_beside_the_default_and_products_of_all_batches(work, capsys):
    cases = {case.name: case for case in host_products(work)}
    found = {side: made.call() for side, made in cases["execution/products, 100 to 16"].sides().items()}
    assert found.keys() == {OURS, DEFAULT, ALL, STALE} and min(found.values()) > 0
    assert "batches stay on the host" in capsys.readouterr().err
    chosen = cases["execution/products, 100 to 16, chosen"].sides()[OURS].call()
    assert chosen == 0.0, "on the host there is no such way to choose"
    assert cases["execution/products, 100 to 16"].versus[0].target == FASTER


def test_the_reason_of_a_refusal_is_the_plans(work):
    assert "batches stay on the host" in refused_reason(work)


def test_they_are_rows_of_the_suite_and_need_a_gpu():
    assert host_products in BENCHMARKS
    work = Workload(TINY, settings={"device": "cuda"})
    names = [case.name for case in host_products(work)]
    assert names == [
        "execution/products, 8415 to 16",
        "execution/products, 8415 to 16, chosen",
        "execution/products, 100 to 256, refused",
    ]
    with pytest.raises(NotHere, match="GPU"):
        refused_reason(work)
