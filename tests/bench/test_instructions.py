"""Instructions are counted one by one where the processor does not count them, in all threads, without a trace.

Counts are made in a process of their own: what threads of other tests do in this one would be counted too.
"""

import gc
import json
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from gnnsys.bench.instructions import STEPPED, TIMED, Counter
from gnnsys.bench.store.pull_checks import PullMessages, checked, trusting

CANNOT_STEP = 77


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What went wrong in each of `BODIES`, nothing where all was well."""
    program = "from tests.bench.test_instructions import step_all; step_all()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=360)
    if done.returncode == CANNOT_STEP:
        pytest.skip(f"processes are not stepped here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == BODIES.keys()
    return found


def step_all() -> None:
    try:
        counter = Counter((STEPPED,))
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT_STEP)
    sys.setswitchinterval(3600)  # by the clock, threads of a stepped process would do little else than take turns
    gc.disable()
    found = {}
    for name, body in BODIES.items():
        try:
            body(counter)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    counter.close()
    print(json.dumps(found))


def count(counter: Counter, call) -> float:
    """The least of some: the interpreter may do something else now and then, but nothing less."""
    call()
    return min(counter.count(call)[0] for _ in range(3))


def twice_the_work(counter):
    assert counter.unit == STEPPED
    one, two, three = (count(counter, lambda n=n: sum(range(1000, 1000 + n))) for n in (100, 500, 900))
    assert two - one == pytest.approx(three - two, rel=0.25), (one, two, three)
    assert 10e-6 < (two - one) / 400 < 1e-3, "tens of instructions for every number that is added"


def work_of_threads(counter):
    begin, done, results = threading.Semaphore(0), threading.Semaphore(0), []

    def work() -> None:
        begin.acquire()
        results.append(sum(range(500)))
        done.release()

    def of_another() -> None:
        begin.release()
        done.acquire()

    def of_a_new_one() -> None:
        thread = threading.Thread(target=lambda: results.append(sum(range(500))))
        thread.start()
        thread.join()

    alone = count(counter, lambda: sum(range(500)))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert counter.count(of_another)[0] > 0.8 * alone
    assert counter.count(of_a_new_one)[0] > 0.8 * alone
    of_another()
    for thread in threads:
        thread.join(30)
    assert len(results) == 3 and not any(thread.is_alive() for thread in threads), "they live on, untraced"


def waits_and_errors(counter):
    waited, seconds = counter.count(lambda: time.sleep(0.2))
    assert seconds >= 0.2 and waited < 0.1
    with pytest.raises(ZeroDivisionError):
        counter.count(lambda: 1 // 0)
    assert counter.count(lambda: None)[1] < 30


BODIES = {"twice the work": twice_the_work, "work of threads": work_of_threads, "waits and errors": waits_and_errors}


@pytest.mark.long  # the instrument of one figure of `gnnsys bench store`, whose case runs in test_suites.py
def test_twice_the_work_is_twice_the_instructions(told):
    assert told["twice the work"] == ""


@pytest.mark.long
def test_work_of_other_threads_is_counted_old_ones_and_new_ones(told):
    assert told["work of threads"] == ""


@pytest.mark.long
def test_waiting_is_not_work_and_what_is_raised_comes_out(told):
    assert told["waits and errors"] == ""


def test_a_machine_that_cannot_count_takes_the_time():
    counter = Counter((TIMED,))
    counted, seconds = counter.count(lambda: sum(range(10**6)))
    assert counter.unit == TIMED and counted >= 0 and seconds > 0


def test_what_is_checked_can_be_done_without_checks_too():
    traffic = PullMessages(20_000, 128)
    assert traffic.num_chunks == 3
    for make in (checked, trusting):
        call = make(traffic)
        call(), call()
