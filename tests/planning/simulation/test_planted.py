"""What `binding` names is what was planted: a slow link in or out, few cores, a slow trainer, a server thread."""

from __future__ import annotations

import pytest

from gnnsys.bench.plan.planted import PLANTED, planted_run


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_bottleneck_is_named(what: str) -> None:
    machines, worker_seconds, words = PLANTED[what]
    run = planted_run(machines, worker_seconds)
    assert run.seconds > 1.5 * planted_run().seconds
    binding = run.binding()
    assert binding.names[binding.first] == words
    assert binding.percent(binding.first) > 50
    assert words in run.report()
