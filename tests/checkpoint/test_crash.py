"""A process that ends anywhere in a save leaves the checkpoint before, or the new one, whole."""

from __future__ import annotations

import json

import pytest
import torch

from gnnsys.checkpoint import STAGES
from tests.checkpoint.training import assert_same, make_parts, train
from tests.support.processes import run_ranks

STEPS = 7
COUNTS = STAGES.index("described")  # from this stage on the new one counts

# One process that has done nothing yet forks once for every stage: each child ends there, as if it had been killed.
PROGRAM = """
import json, os, sys
import torch
from gnnsys.checkpoint import STAGES
from tests.checkpoint.training import train
parts, base = sys.argv[1:]
for name in [name for name in os.environ if name.endswith("RANK") or name.endswith("WORLD_SIZE")]:
    del os.environ[name]  # it is alone
torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).step()  # what is imported late is imported once, for all of them
codes = {}
for number, stage in enumerate(STAGES):
    child = os.fork()
    if child == 0:
        passed = []
        def end(reached):
            passed.append(reached)
            if reached == stage and passed.count("begun") == 2:
                os._exit(9)
        def prepare(saver):
            saver.on_stage = end
        train(parts, f"{base}/{number}", 6, every=2, keep=1, prepare=prepare, asynchronous=False)
        os._exit(0)
    codes[stage] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("crash") / "parts")


@pytest.fixture(scope="module")
def crashed(parts, tmp_path_factory):
    base = tmp_path_factory.mktemp("crashed")
    (ended,) = run_ranks(PROGRAM, 1, parts, base, timeout=120)
    assert json.loads(ended.stdout) == dict.fromkeys(STAGES, 9), "every one ended where it was told to"
    return base


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the processes that crash: sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def unbroken(parts, one_thread, tmp_path_factory):
    return train(parts, tmp_path_factory.mktemp("unbroken"), STEPS)


@pytest.mark.parametrize("number", range(len(STAGES)), ids=[stage.replace(" ", "-") for stage in STAGES])
def test_a_job_resumes_wherever_its_save_was_cut(parts, crashed, unbroken, number):
    folder = crashed / str(number)
    values, losses = train(parts, folder, STEPS, every=3, keep=1)
    assert min(losses) == (4 if number >= COUNTS else 2)
    assert losses == {step: unbroken[1][step] for step in losses}
    assert_same(values, unbroken[0])
    assert [path.name for path in folder.iterdir()] == ["step-0000000006"], "nothing is left of what was cut"
