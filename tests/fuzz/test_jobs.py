"""Minutes of it are `python -m tests.fuzz.jobs`; here is one case, and that it finds what is wrong."""

from __future__ import annotations

from tests.support.processes import run_code

ONE = "import sys; from tests.fuzz.jobs import main; sys.exit(main(['--seed', '1', '--one']))"
BROKEN = """
from gnnsys.jobs.fresh_state import FreshState
FreshState.restore = lambda self: None
FreshState.changes = lambda self: []
"""


def test_what_is_not_put_back_is_found_and_the_seed_is_told():
    good, bad = run_code(ONE), run_code(BROKEN + ONE)
    assert good.returncode == 0 and "1 cases from seed 1 on, 0 failed" in good.stdout, good
    assert bad.returncode == 1 and "repeat it: python -m tests.fuzz.jobs --seed 1 --one" in bad.stdout, bad
